"""How image references are compared, and what is said of a sandbox's limits."""

import pytest

from service.preflight import limit_findings, tagged
from service.records import SandboxFields


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


QUOTA, WATCH = {"disk": {"docker": "quota: by the storage"}}, {"disk": {"docker": "watch: the agent kills"}}


@pytest.mark.parametrize(
    ("workers", "sandbox", "fields"),
    [
        pytest.param([QUOTA], SandboxFields(), [], id="quota"),
        pytest.param([QUOTA, WATCH], SandboxFields(), ["sandbox.disk_mib"], id="one-worker-only-watches"),
        pytest.param([WATCH], SandboxFields(backend="process"), [], id="of-another-backend"),
        pytest.param([{"images": {}}], SandboxFields(), [], id="an-older-worker-says-nothing"),
        pytest.param([QUOTA], SandboxFields(network="open"), ["sandbox.network"], id="case-080-open-network"),
    ],
)
def test_limits_that_may_surprise(workers: list[dict[str, dict[str, str]]], sandbox: SandboxFields, fields: list[str]) -> None:
    found = limit_findings(workers, sandbox)
    assert [finding.field for finding in found] == fields
    assert {finding.severity for finding in found} <= {"warning"}
