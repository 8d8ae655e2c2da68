"""A store in memory, and real S3 services on loopback: rclone in a process of its own, moto in this process."""

from collections.abc import Iterator

import pytest

from grailnode.store.memory import MemoryStore
from tests.store.s3_buckets import CREDENTIALS, Bucket, new_bucket
from tests.support.servers.rclone import serving


@pytest.fixture
def memory() -> MemoryStore:
    return MemoryStore()


@pytest.fixture(scope="session")
def rclone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Yield the URL of a running `rclone serve s3`."""
    buckets = tmp_path_factory.mktemp("rclone") / "buckets"
    buckets.mkdir()
    with serving(buckets, "--auth-key", f"{CREDENTIALS.access_key},{CREDENTIALS.secret_key}") as url:
        yield url


@pytest.fixture
def rclone_bucket(rclone: str) -> Bucket:
    return new_bucket(rclone, connections=16)


@pytest.fixture(scope="session")
def moto() -> Iterator[str]:
    """Yield the URL of moto's S3 service."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def moto_bucket(moto: str) -> Bucket:
    # one connection, because moto's response to a put reads an object that a concurrent put to the key may have closed
    return new_bucket(moto, connections=1)
