"""How image references are compared."""

import pytest

from service.preflight import tagged


@pytest.mark.parametrize(
    ("given", "listed"),
    [
        pytest.param("python", "python:latest", id="no-tag"),
        pytest.param("python:3.12-slim", "python:3.12-slim", id="tag"),
        pytest.param("docker.io/library/python:3.12", "python:3.12", id="default-registry"),
        pytest.param("localhost:5000/tool", "localhost:5000/tool:latest", id="a-port-is-no-tag"),
        pytest.param("tool@sha256:abc", "tool@sha256:abc", id="digest"),
    ],
)
def test_tagged(given: str, listed: str) -> None:
    assert tagged(given) == listed
