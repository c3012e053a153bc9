"""What every backend does between a bare sandbox and a usable one: files, then setup."""

from sandboxes.base import SandboxContentError, SandboxSpec, SandboxSpecError
from sandboxes.commands import CommandSandbox

_SETUP_OUTPUT_BYTES = 4000


async def furnish(sandbox: CommandSandbox, spec: SandboxSpec) -> None:
    """Put `spec.files`, run `spec.setup` in order. The caller holds the start budget.

    Raises:
        SandboxSpecError: the first thing that failed, with the end of its output.
    """
    try:
        if spec.files:
            await sandbox.put(spec.files)
    except SandboxContentError as error:
        raise SandboxSpecError(f"sandbox.files could not be written: {error}") from error
    for number, line in enumerate(spec.setup):
        result = await sandbox.exec(["bash", "-c", line], timeout_s=spec.start_s, max_output_bytes=_SETUP_OUTPUT_BYTES)
        if result.exit_code != 0:
            said = (result.stdout + result.stderr).decode(errors="replace").strip()[-2000:]
            how = "ran out of time" if result.timed_out else f"ended with exit code {result.exit_code}"
            raise SandboxSpecError(f"sandbox.setup.{number} ({line[:80]!r}) {how}: {said or 'no output'}")
