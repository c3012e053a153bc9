"""Keys to tenants."""

import pytest
from pydantic import SecretStr
from starlette.datastructures import Headers

from service.auth import Auth, is_loopback
from service.errors import UnauthorizedError
from service.settings import Settings

KEYED = Settings(api_keys={"red": SecretStr("red-key-1"), "blue": SecretStr("blue-key-2")}, operator_key=SecretStr("operator"))


def headers(**given: str) -> Headers:
    return Headers(given)


@pytest.mark.parametrize(
    ("key", "tenant", "operator"),
    [
        pytest.param("Bearer red-key-1", "red", False, id="red"),
        pytest.param("bearer  blue-key-2 ", "blue", False, id="blue-sloppily-written"),
        pytest.param("Bearer operator", None, True, id="operator"),
    ],
)
def test_a_key_is_a_caller(key: str, tenant: str | None, operator: bool) -> None:
    caller = Auth(KEYED).caller(headers(authorization=key), client_host="203.0.113.9")
    assert (caller.tenant, caller.operator) == (tenant, operator)


@pytest.mark.parametrize("key", ["", "Bearer", "Bearer ", "Bearer red-key-", "Bearer red-key-11", "Basic red-key-1", "red-key-1"])
def test_anything_else_is_nobody(key: str) -> None:
    with pytest.raises(UnauthorizedError):
        Auth(KEYED).caller(headers(authorization=key), client_host="127.0.0.1")


@pytest.mark.parametrize(
    ("client_host", "host", "served"),
    [
        pytest.param("127.0.0.1", "127.0.0.1:8000", True, id="loopback"),
        pytest.param("::1", "[::1]:8000", True, id="loopback-v6"),
        pytest.param("127.0.0.1", "localhost", True, id="localhost"),
        pytest.param("127.0.0.1", "evil.example:8000", False, id="rebound-name"),
        pytest.param("192.168.0.2", "127.0.0.1:8000", False, id="from-elsewhere"),
    ],
)
def test_without_keys_only_loopback(client_host: str, host: str, served: bool) -> None:
    auth = Auth(Settings())
    if served:
        assert auth.caller(headers(host=host), client_host=client_host).tenant == "local"
        return
    with pytest.raises(UnauthorizedError):
        auth.caller(headers(host=host), client_host=client_host)


@pytest.mark.parametrize(
    ("host", "expected"), [("127.0.0.2", True), ("::1", True), ("0.0.0.0", False), ("::", False), ("example.com", False)]
)
def test_loopback(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected
