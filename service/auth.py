"""Who is asking: bearer keys map to tenants. Keys are kept as digests and compared in constant time.

With no keys configured there is one tenant, `local`, and only loopback is served, under a loopback name (so that a web page whose name
was pointed at 127.0.0.1 gets nothing).
"""

import hashlib
import hmac
import ipaddress
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from service.errors import UnauthorizedError
from service.problems import answer_error
from service.settings import Settings

LOCAL_TENANT = "local"
OPEN_PATHS = frozenset({"/healthz"})
OPERATOR_PATHS = frozenset({"/metrics"})


def is_loopback(host: str) -> bool:
    """Whether `host` (a name or an address, as one would bind or connect to it) is this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Who sent a request. An operator without a tenant's key may ask for operator paths and readiness only."""

    tenant: str | None
    operator: bool


class Auth:
    """Checks one request's headers; holds digests only."""

    def __init__(self, settings: Settings) -> None:
        self._tenants = {tenant: _digest(key.get_secret_value()) for tenant, key in settings.api_keys.items()}
        self._operator = _digest(settings.operator_key.get_secret_value()) if settings.operator_key else None

    @property
    def keyless(self) -> bool:
        return not self._tenants

    def caller(self, headers: Headers, *, client_host: str) -> Caller:
        """Raises UnauthorizedError, which never says what was nearly right."""
        presented = self._presented(headers)
        operator = self._operator is not None and hmac.compare_digest(presented, self._operator)
        if self.keyless:
            self._check_local(headers, client_host)
            return Caller(tenant=LOCAL_TENANT, operator=operator or self._operator is None)
        matches = [tenant for tenant, key in self._tenants.items() if hmac.compare_digest(presented, key)]
        if not matches and not operator:
            raise UnauthorizedError("a valid key is needed: send the header 'Authorization: Bearer KEY'")
        return Caller(tenant=matches[0] if matches else None, operator=operator)

    @staticmethod
    def _presented(headers: Headers) -> bytes:
        scheme, _, key = headers.get("authorization", "").partition(" ")
        return _digest(key.strip() if scheme.lower() == "bearer" else "")

    @staticmethod
    def _check_local(headers: Headers, client_host: str) -> None:
        name = headers.get("host", "").rsplit(":", 1)[0] if not headers.get("host", "").endswith("]") else headers["host"]
        if not is_loopback(client_host) or (name and not is_loopback(name)):
            raise UnauthorizedError("no keys are configured, so only this machine is served, under a loopback name; set ROLLWAY_API_KEYS")


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


class AuthMiddleware:
    """Without a valid key nothing is answered but `/healthz`: not even whether a path exists."""

    def __init__(self, app: ASGIApp, *, auth: Auth) -> None:
        self.app = app
        self.auth = auth

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            try:
                caller = self.auth.caller(Headers(scope=scope), client_host=(scope.get("client") or ("127.0.0.1", 0))[0])
                _check_reach(caller, scope["path"])
            except UnauthorizedError as error:
                await answer_error(error)(scope, receive, send)
                return
            scope.setdefault("state", {})["caller"] = caller
        await self.app(scope, receive, send)


def _check_reach(caller: Caller, path: str) -> None:
    if path in OPERATOR_PATHS and not caller.operator:
        raise UnauthorizedError("the operator's key is needed here (ROLLWAY_OPERATOR_KEY)")
    if path.startswith("/v1/") and caller.tenant is None:
        raise UnauthorizedError("a tenant's key is needed here; the operator's key reaches /metrics and /readyz")
