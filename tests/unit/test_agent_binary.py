"""The programs that are shipped."""

import struct

import pytest

from sandboxes import agent_binary
from sandboxes.base import SandboxError


@pytest.mark.parametrize(("machine", "number"), [("x86_64", 62), ("amd64", 62), ("aarch64", 183), ("arm64", 183)])
def test_there_is_one_for_each_machine(machine: str, number: int) -> None:
    head = agent_binary.path(machine).read_bytes()[:20]
    assert head[:5] == b"\x7fELF\x02"
    assert struct.unpack_from("<H", head, 18) == (number,)
    assert len(agent_binary.digest(machine)) == 64


def test_an_unknown_machine_is_said_so() -> None:
    with pytest.raises(SandboxError, match="riscv64"):
        agent_binary.path("riscv64")
