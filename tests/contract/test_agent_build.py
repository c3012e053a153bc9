"""The agent's programs that are shipped are what their source says, and run anywhere. That they are the source's very bytes is
`deploy/agent-build --check`, which needs a compiler."""

import hashlib
import struct
from pathlib import Path

import pytest

from sandboxes import agent_binary

REPOSITORY = Path(__file__).parents[2]
AGENT = REPOSITORY / "sandboxes" / "agent"
MACHINES = {"x86_64": 62, "aarch64": 183}
"""As in ELF's e_machine."""
PT_LOAD, PT_DYNAMIC, PT_INTERP, PT_NOTE = 1, 2, 3, 4
MAX_BYTES = 200_000


def source_digest() -> str:
    """As `deploy/agent-build` has it: sha256sum of the sources' own sha256sum lines, by name."""
    sources = sorted([*AGENT.glob("*.c"), *AGENT.glob("*.h")], key=lambda path: path.name.encode())
    lines = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in sources]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def test_the_programs_are_built_from_these_sources() -> None:
    written = dict(line.split() for line in (AGENT / "bin" / "SOURCE").read_text().splitlines())
    assert written["sources"] == source_digest(), "run deploy/agent-build"


@pytest.mark.parametrize("machine", MACHINES)
def test_a_program_needs_nothing_of_an_image(machine: str) -> None:
    path = agent_binary.path(machine)
    program = path.read_bytes()
    assert program[:6] == b"\x7fELF\x02\x01"  # 64 bits, little-endian
    assert struct.unpack_from("<H", program, 18)[0] == MACHINES[machine]
    table, size, count = struct.unpack_from("<Q", program, 32)[0], *struct.unpack_from("<HH", program, 54)
    segments = {struct.unpack_from("<I", program, table + size * i)[0] for i in range(count)}
    assert PT_LOAD in segments
    assert not segments & {PT_DYNAMIC, PT_INTERP, PT_NOTE}  # static, and without a build id
    assert str(REPOSITORY).encode() not in program
    assert len(program) < MAX_BYTES
    assert path.stat().st_mode & 0o111 == 0o111
