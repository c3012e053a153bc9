"""Whose a sandbox is follows from its name."""

import pytest

from workers.owners import Owner, Owners, sandbox_name

OWNERS = Owners(deployment_id="d-1", attempts={"j1-g1-r0": 2}, prefixes=("rw-d-1-pool-host-1-abc123-",))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        pytest.param("rw-d-1-j1-g1-r0-a2", Owner(kind="rollout", name="j1-g1-r0", live=True), id="live-rollout"),
        pytest.param("rw-d-1-j1-g1-r0-a2-v", Owner(kind="rollout", name="j1-g1-r0", live=True), id="its-verifier"),
        pytest.param("rw-d-1-j1-g1-r0-a1", Owner(kind="rollout", name="j1-g1-r0", live=False), id="an-earlier-attempt"),
        pytest.param("rw-d-1-j1-g1-r1-a2", Owner(kind="rollout", name="j1-g1-r1", live=False), id="an-ended-rollout"),
        pytest.param("rw-d-1-pool-host-1-abc123-7", Owner(kind="pool", name="host-1", live=True), id="a-live-workers-pool"),
        pytest.param("rw-d-1-pool-host-1-def456-7", Owner(kind="pool", name="host-1", live=False), id="a-dead-workers-pool"),
        pytest.param("something-else", Owner(kind="unknown", name="", live=False), id="no-name-of-ours"),
    ],
)
def test_owner_of(name: str, expected: Owner) -> None:
    assert OWNERS.of(name) == expected


def test_a_sweep_keeps_what_may_be_alive() -> None:
    assert OWNERS.names == {sandbox_name("d-1", "j1-g1-r0", 2), "rw-d-1-j1-g1-r0-a2-v"}
