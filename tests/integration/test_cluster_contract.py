"""What leases, batches and jobs promise on one Redis, they promise on a cluster: the same tests once more."""

from collections.abc import Iterator

import pytest

from tests.integration.test_batches import *  # noqa: F403
from tests.integration.test_jobs import *  # noqa: F403
from tests.integration.test_leases import *  # noqa: F403
from tests.redis_cluster import ClusterServers, running_cluster


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterServers]:
    with running_cluster(tmp_path_factory.mktemp("cluster")) as cluster:
        yield cluster


@pytest.fixture
def empty_redis_url(servers: ClusterServers) -> str:
    servers.flush()
    return servers.url
