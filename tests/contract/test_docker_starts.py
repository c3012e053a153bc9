"""Starts, claims and snapshots on a real engine: nothing is left behind, whatever is cancelled, lost or removed meanwhile."""

import asyncio
import platform
import random
import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
import pytest_asyncio

from sandboxes import agent_binary
from sandboxes.base import SandboxFencedError, SandboxLostError, SandboxSpecError, SandboxStartError, SandboxUserError
from sandboxes.docker import DockerBackend
from sandboxes.docker_agent import LABEL, PROBE_NAME, EngineAgent
from sandboxes.docker_engine import EngineError
from tests.docker_images import changed_image, image_of, own_engine, tiny_program
from tests.sandbox_backends import IMAGE, bash, docker_host, has_engine, named, spec

pytestmark = [
    pytest.mark.docker,
    pytest.mark.skipif(not has_engine(), reason=f"no engine that has {IMAGE}"),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(90),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def backend() -> AsyncIterator[DockerBackend]:
    async with DockerBackend(deployment_id="test-starts", docker_host=docker_host()) as made:
        yield made
        await made.sweep(keep=frozenset(), older_than_s=0)


async def test_a_start_that_is_cancelled_anywhere_leaves_nothing(backend: DockerBackend) -> None:
    began = time.monotonic()
    await (await backend.create(spec(), name=named())).destroy()
    whole_s = time.monotonic() - began
    spread = random.Random(7)
    names = [named() for _ in range(24)]

    async def cancelled(name: str) -> None:
        task = asyncio.create_task(backend.create(spec(setup=["true"]), name=name))
        await asyncio.sleep(spread.uniform(0, 2 * whole_s))
        task.cancel()
        (result,) = await asyncio.gather(task, return_exceptions=True)
        if not isinstance(result, BaseException):
            await result.destroy()

    for start in range(0, len(names), 4):
        await asyncio.gather(*(cancelled(name) for name in names[start : start + 4]))
    assert not set(names) & {info.name for info in await backend.list()}
    assert backend.limits.counts.starting == backend.limits.counts.waiting == 0


async def test_a_start_past_its_budget_leaves_nothing(backend: DockerBackend) -> None:
    name = named()
    with pytest.raises(SandboxStartError, match="within 1 s"):
        await backend.create(spec(setup=["sleep 30"], start_s=1.0), name=name)
    assert name not in [info.name for info in await backend.list()]


@pytest.mark.parametrize("what", ["containers", "all"])
async def test_what_is_shared_is_made_again(backend: DockerBackend, what: str) -> None:
    """Another operator's clean-up, while we believe that all is there."""
    await (await backend.create(spec(), name=named())).destroy()
    async with own_engine() as engine:
        found = await engine.call("list", "GET", "containers/json", params={"all": "1", "filters": f'{{"label": ["{LABEL}"]}}'})
        for each in found:
            await engine.call("remove", "DELETE", f"containers/{each['Id']}", params={"force": "1"})
    if what == "all":
        async with DockerBackend(deployment_id="test-operator", docker_host=docker_host()) as other:
            await other.remove_shared()
    sandbox = await backend.create(spec(), name=named())
    assert (await bash(sandbox, "echo well")).stdout == b"well\n"
    await sandbox.destroy()


async def test_workers_that_start_at_once_make_the_shared_parts_once(backend: DockerBackend) -> None:
    await backend.remove_shared()
    workers = [DockerBackend(deployment_id="test-starts", docker_host=docker_host()) for _ in range(4)]
    made = await asyncio.gather(*(worker.create(spec(), name=named()) for worker in workers))
    await asyncio.gather(*(sandbox.destroy() for sandbox in made))
    await asyncio.gather(*(worker.aclose() for worker in workers))
    async with own_engine() as engine:
        ours = f"{LABEL}={agent_binary.digest(platform.machine())[:12]}"  # another version of us may use this engine too
        found = await engine.call("list", "GET", "containers/json", params={"filters": f'{{"label": ["{ours}"]}}'})
        assert len(found) == 1


async def test_shared_parts_in_use_stay(backend: DockerBackend) -> None:
    sandbox = await backend.create(spec(), name=named())
    async with DockerBackend(deployment_id="test-operator", docker_host=docker_host()) as operator:
        await operator.remove_shared()
    assert (await bash(sandbox, "echo well")).stdout == b"well\n"
    retried = backend.limits.counts.retried
    other = await backend.create(spec(), name=named())
    assert backend.limits.counts.retried == retried, "another deployment's clean-up costs a start nothing"
    await asyncio.gather(sandbox.destroy(), other.destroy())


async def test_a_probe_whose_worker_died_goes(backend: DockerBackend) -> None:
    async with own_engine() as engine:
        body = {"Image": IMAGE, "Cmd": ["none"], "Labels": {LABEL: "probe"}}
        probe = f"{PROBE_NAME}-{named()}"
        await engine.call("create", "POST", "containers/create", params={"name": probe}, body=body)
        await backend.remove_shared()
        filters = f'{{"name": ["{probe}"]}}'
        assert await engine.call("list", "GET", "containers/json", params={"all": "1", "filters": filters}) == []


async def test_what_an_older_version_left_goes_and_what_is_used_stays(backend: DockerBackend) -> None:
    sandbox = await backend.create(spec(), name=named())
    digest = uuid.uuid4().hex[:12]
    async with own_engine() as engine, changed_image(f"LABEL {LABEL}={digest}") as image:
        agent = EngineAgent(engine)
        ours = await agent.ensure()
        pause = {"Image": image, "HostConfig": {"Mounts": [{"Type": "volume", "Source": f"rollway-agent-{digest}", "Target": "/x"}]}}
        await engine.call("create", "POST", "containers/create", params={"name": f"rollway-pause-{digest}"}, body=pause)
        await agent.remove_older(older_than_s=600)
        await engine.call("inspect", "GET", f"containers/rollway-pause-{digest}/json")
        await agent.remove_older(older_than_s=0)
        for path in (f"containers/rollway-pause-{digest}/json", f"volumes/rollway-agent-{digest}", f"images/{image}/json"):
            with pytest.raises(EngineError) as gone:
                await engine.call("inspect", "GET", path)
            assert gone.value.status == 404, path
        await engine.call("inspect", "GET", f"containers/{ours.pause}/json")
        await engine.call("tag again", "POST", f"images/{IMAGE}/tag", params={"repo": image.partition(":")[0], "tag": "1"})  # it is removed
    await sandbox.destroy()


async def test_a_claim_gives_a_bare_sandbox_its_owner(backend: DockerBackend) -> None:
    pooled, name = await backend.create(spec(labels={"pool": "w1"}), name=f"pool-{named()}"), named()
    owned = spec(files={"/work/in": b"given\n"}, setup=["cp in out"], env={"COLOUR": "green"})
    await pooled.detach()
    claimed = await backend.adopt(pooled, owned, name=name, fence=3)
    assert claimed.id == pooled.id
    assert (await bash(claimed, "cat out; echo $COLOUR")).stdout == b"given\ngreen\n"
    assert [info.name for info in await backend.list() if info.id == claimed.id] == [name]
    with pytest.raises(SandboxFencedError):
        await backend.attach(claimed.id, fence=2)
    again = await backend.attach(name, fence=3, boot_id=claimed.boot_id)
    assert (await bash(again, "cat out")).stdout == b"given\n"
    successor = await backend.create(spec(), name=name)
    assert successor.id != claimed.id, "whoever holds the name now owns what a claim gave it"
    with pytest.raises(SandboxLostError):
        await bash(again, "true")
    await successor.destroy()


async def test_a_claim_of_a_dead_sandbox(backend: DockerBackend) -> None:
    pooled = await backend.create(spec(), name=f"pool-{named()}")
    async with own_engine() as engine:
        await engine.call("kill", "POST", f"containers/{pooled.id}/kill")
    await pooled.detach()
    with pytest.raises(SandboxLostError):
        await backend.adopt(pooled, spec(), name=named(), fence=1)
    assert pooled.id not in [info.id for info in await backend.list()]
    await pooled.destroy()


async def test_a_name_of_another_owner_is_left_alone(backend: DockerBackend) -> None:
    theirs = await backend.create(spec(labels={"owner": "b"}), name=named())
    name = next(info.name for info in await backend.list() if info.id == theirs.id)
    with pytest.raises(SandboxStartError, match="another owner"):
        await backend.create(spec(labels={"owner": "a"}), name=name)
    assert (await bash(theirs, "echo well")).stdout == b"well\n"
    pooled = await backend.create(spec(labels={"pool": "w"}), name=f"pool-{named()}")
    await pooled.detach()
    with pytest.raises(SandboxStartError, match="another owner"):
        await backend.adopt(pooled, spec(labels={"owner": "a"}), name=name)
    assert await theirs.poll()
    assert pooled.id not in [info.id for info in await backend.list()]
    await theirs.destroy()


async def test_a_snapshot_keeps_the_images_user_and_no_labels(backend: DockerBackend) -> None:
    async with changed_image("USER nobody", "ENV COLOUR=red") as image:
        theirs = spec(image=image, labels={"rollout": "r1"}, env={"SHAPE": "round"}, workdir="/srv/own")
        first = await backend.create(theirs, name=named())
        await bash(first, "echo kept > file")
        snapshot = await first.snapshot(ttl_s=60)
        await first.destroy()
        second = await backend.restore(snapshot, replace(theirs, labels={"rollout": "r2"}, env={}), name=named())
        assert (await bash(second, "id -un; cat file; echo $COLOUR$SHAPE")).stdout == b"nobody\nkept\nred\n"
        (info,) = [each for each in await backend.list() if each.id == second.id]
        assert info.labels == {"rollout": "r2"}
        await backend.forget_snapshot(snapshot)
        await second.destroy()
        await backend.sweep(keep=frozenset(), older_than_s=3600)
        assert not [name for name in await backend.images() if name.startswith("rollway-snapshot:")]


async def test_a_snapshot_ends_in_time(backend: DockerBackend) -> None:
    sandbox = await backend.create(spec(), name=named())
    short, long = await sandbox.snapshot(ttl_s=0), await sandbox.snapshot(ttl_s=600)
    await backend.sweep(keep=frozenset(), older_than_s=3600)
    assert short not in await backend.images()
    assert long in await backend.images()
    with pytest.raises(SandboxLostError, match="gone"):
        await backend.restore(short, spec(), name=named())
    async with DockerBackend(deployment_id="test-other", docker_host=docker_host()) as other:
        with pytest.raises(SandboxLostError):
            await other.restore(long, spec(), name=named())
        await other.forget_snapshot(long)
    assert long in await backend.images(), "another deployment's"
    await backend.forget_snapshot(long)
    await backend.forget_snapshot(long)
    assert long not in await backend.images()
    await sandbox.destroy()


async def test_a_snapshot_that_is_in_use_is_forgotten_and_goes_later(backend: DockerBackend) -> None:
    first = await backend.create(spec(), name=named())
    snapshot = await first.snapshot(ttl_s=600)
    second = await backend.restore(snapshot, spec(), name=named())
    await backend.forget_snapshot(snapshot)
    with pytest.raises(SandboxLostError):
        await backend.restore(snapshot, spec(), name=named())
    assert (await bash(second, "echo well")).stdout == b"well\n"
    await asyncio.gather(first.destroy(), second.destroy())
    await backend.sweep(keep=frozenset(), older_than_s=3600)
    assert not [name for name in await backend.images() if name.startswith("rollway-snapshot:")]


async def test_an_image_without_shell_or_libc(backend: DockerBackend) -> None:
    async with image_of({"bin/tiny": tiny_program(b"\xff\x00tiny\n", 3)}) as image:
        sandbox = await backend.create(spec(image=image, files={"/data/in": b"\x00\xff"}), name=named())
        try:
            ran = await sandbox.exec(["/bin/tiny"], timeout_s=10, max_output_bytes=100)
            assert (ran.exit_code, ran.stdout) == (3, b"\xff\x00tiny\n")
            assert (await sandbox.exec(["tiny"], timeout_s=10, max_output_bytes=100)).exit_code == 3, "found in PATH"
            assert (await bash(sandbox, "true")).exit_code == 127
            assert b"".join([piece async for piece in sandbox.read_file("/data/in")]) == b"\x00\xff"
            assert b"tiny" in await sandbox.get(["/bin/tiny"], max_bytes=100_000)
            await sandbox.put_tar(await sandbox.get(["/data"], max_bytes=100_000))
        finally:
            await sandbox.destroy()
        with pytest.raises(SandboxSpecError, match=r"setup\.0"):
            await backend.create(spec(image=image, setup=["true"]), name=named())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        pytest.param({"image": "Not A Name"}, "could not be pulled", id="image-name"),
        pytest.param({"user": "nobody-here"}, "nobody-here", id="user"),
        pytest.param({"network": "host"}, "'none' or 'open'", id="network"),
        pytest.param({"runtime": "no-such-runtime"}, "sandbox.runtime", id="runtime"),
        pytest.param({"cpus": 4096.0}, "sandbox.cpus", id="cpus"),
        pytest.param({"workdir": "relative"}, "absolute", id="workdir"),
        pytest.param({"files": {"relative": b""}}, "files", id="path"),
        pytest.param({"setup": ["echo why >&2; exit 3"]}, "why", id="setup"),
    ],
)
async def test_a_spec_that_can_never_start(backend: DockerBackend, changes: dict[str, object], words: str) -> None:
    name = named()
    with pytest.raises(SandboxSpecError, match=words):
        await backend.create(spec(**changes), name=name)
    assert name not in [info.name for info in await backend.list()]


async def test_an_image_that_nobody_has(backend: DockerBackend) -> None:
    """Can never start where a registry says so; where none answers, later perhaps."""
    with pytest.raises(SandboxStartError, match="docker pull rollway-no-such-image:1"):
        await backend.create(spec(image="rollway-no-such-image:1"), name=named())


async def test_users_of_calls(backend: DockerBackend) -> None:
    sandbox = await backend.create(spec(), name=named())
    assert (await bash(sandbox, "id -u", user="65534:65534")).stdout == b"65534\n"
    with pytest.raises(SandboxUserError):
        await bash(sandbox, "true", user="nobody-here")
    await sandbox.destroy()


async def test_network_is_open_only_where_it_is_asked_for(backend: DockerBackend) -> None:
    sandbox = await backend.create(spec(network="open"), name=named())
    assert (await bash(sandbox, "cut -d: -f1 /proc/net/dev | tail -n +3")).stdout.split() == [b"lo", b"eth0"]
    assert b"0000000000000000" in (await bash(sandbox, "grep CapBnd /proc/self/status")).stdout
    await sandbox.destroy()


async def test_preflight_is_told_how_disk_is_bounded(backend: DockerBackend) -> None:
    assert (await backend.disk_limits()).partition(":")[0] in ("quota", "watch")
