"""inspect_ai's own suite for sandboxes, all 44 checks of it twice, against ours through a thin adapter.

It is laid over the virtual environment, not installed into it: `deploy/test` puts what deploy/requirements-inspect.lock lists into
.venv-inspect and names that in PYTHONPATH.
"""

import os
from collections.abc import AsyncIterator
from errno import EACCES
from pathlib import PurePosixPath

import pytest
import pytest_asyncio

from sandboxes.base import ExecResult as OurResult
from sandboxes.base import Sandbox, SandboxContentError, SandboxUserError
from sandboxes.docker import DockerBackend
from tests.sandbox_backends import DEPLOYMENT, IMAGE, docker_host, has_engine, named, spec

pytest.importorskip("inspect_ai", reason="not laid over this environment: deploy/test does it")

from inspect_ai.util import ExecResult, OutputLimitExceededError, SandboxEnvironment, SandboxEnvironmentLimits
from inspect_ai.util._sandbox.self_check import *  # noqa: F403

pytestmark = [
    pytest.mark.docker,
    pytest.mark.skipif(not has_engine(), reason=f"no engine that has {IMAGE}"),
    pytest.mark.asyncio(loop_scope="module"),
]

WORKDIR = "/work"
PIECE_BYTES = 1 << 20
HARDENED = {
    "test_exec_as_user": "adduser gives files away (CAP_CHOWN), and nothing that runs in a sandbox holds a capability, root included",
}
"""What cannot pass in a sandbox as it is made by default, and why."""

KINDS: dict[str, dict[str, object]] = {"hardened": {}, "plain": {"capabilities": "root", "user": "1000:1000"}}
"""As it is by default; and with a root that is one, beside a user that is not."""


class AdaptedSandbox(SandboxEnvironment):
    """Our contract in inspect_ai's words. It adds one thing: what the sandbox's own user may not read or write is refused.

    Ours reads and writes whatever the mode bits say, so that a model cannot lock a verifier out of its files.
    """

    def __init__(self, sandbox: Sandbox) -> None:
        super().__init__()
        self._sandbox = sandbox

    async def exec(
        self,
        cmd: list[str],
        input: str | bytes | None = None,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        user: str | None = None,
        timeout: int | None = None,
        timeout_retry: bool = True,
        concurrency: bool = True,
    ) -> ExecResult[str]:
        try:
            result = await self._sandbox.exec(
                cmd,
                timeout_s=timeout or 60,
                max_output_bytes=SandboxEnvironmentLimits.MAX_EXEC_OUTPUT_SIZE,
                stdin=input.encode() if isinstance(input, str) else input,
                env=env,
                workdir=absolute(cwd or "."),
                user=user,
            )
        except SandboxUserError as error:
            return ExecResult(success=False, returncode=126, stdout="", stderr=str(error))
        return adapted(cmd, result)

    async def write_file(self, file: str, contents: str | bytes) -> None:
        path, content = absolute(file), contents.encode() if isinstance(contents, str) else contents
        await self._check_allowed("-w", path)

        async def pieces() -> AsyncIterator[bytes]:
            for start in range(0, len(content), PIECE_BYTES):
                yield content[start : start + PIECE_BYTES]

        try:
            await self._sandbox.write_file(path, pieces())
        except SandboxContentError as error:
            raise os_error(error, file) from error

    async def read_file(self, file: str, text: bool = True) -> str | bytes:  # type: ignore[override]
        path, content = absolute(file), bytearray()
        await self._check_allowed("-r", path)
        try:
            async for piece in self._sandbox.read_file(path):
                content += piece
                if len(content) > SandboxEnvironmentLimits.MAX_READ_FILE_SIZE:
                    raise OutputLimitExceededError(SandboxEnvironmentLimits.MAX_READ_FILE_SIZE_STR, None)
        except SandboxContentError as error:
            raise os_error(error, file) from error
        return content.decode() if text else bytes(content)

    async def _check_allowed(self, how: str, path: str) -> None:
        result = await self._sandbox.exec(
            ["sh", "-c", f'[ ! -e "$1" ] || [ {how} "$1" ]', "sh", path], timeout_s=10, max_output_bytes=PIECE_BYTES
        )
        if result.exit_code != 0:
            raise PermissionError(EACCES, os.strerror(EACCES), path)

    @classmethod
    async def sample_cleanup(cls, *args: object) -> None:
        """The fixture destroys what it made."""


def absolute(path: str) -> str:
    return str(PurePosixPath(WORKDIR) / path)


def adapted(cmd: list[str], result: OurResult) -> ExecResult[str]:
    if result.timed_out:
        raise TimeoutError(f"{cmd[0]} ran out of time")
    if result.truncated:
        raise OutputLimitExceededError(SandboxEnvironmentLimits.MAX_EXEC_OUTPUT_SIZE_STR, result.stdout.decode(errors="replace"))
    if result.start_errno == EACCES:
        raise PermissionError(EACCES, os.strerror(EACCES), cmd[0])
    assert result.exit_code is not None
    return ExecResult(
        success=result.exit_code == 0,
        returncode=result.exit_code,
        stdout=result.stdout.decode(errors="replace"),
        stderr=result.stderr.decode(errors="replace"),
    )


def os_error(error: SandboxContentError, file: str) -> OSError:
    """FileNotFoundError, IsADirectoryError and so on: Python picks the class by the number."""
    assert error.errno is not None, error
    return OSError(error.errno, os.strerror(error.errno), file)


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def sandbox(kind: str) -> AsyncIterator[Sandbox]:
    async with DockerBackend(deployment_id=DEPLOYMENT, docker_host=docker_host()) as backend:
        made = await backend.create(spec(disk_mib=256, workdir=WORKDIR, **KINDS[kind]), name=named())
        yield made
        await made.destroy()


@pytest.fixture
def sandbox_env(request: pytest.FixtureRequest, kind: str, sandbox: Sandbox) -> AdaptedSandbox:
    if kind == "hardened" and (reason := HARDENED.get(request.node.originalname)):
        request.node.add_marker(pytest.mark.xfail(strict=True, reason=reason))
    return AdaptedSandbox(sandbox)
