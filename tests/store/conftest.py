"""Real S3 services on loopback: rclone in a process of its own, moto in this process."""

import secrets
from collections.abc import Iterator

import pytest

from grailnode.store.s3.s3_session import S3Credentials, S3Location, S3Session
from tests.support.servers.rclone import serving

CREDENTIALS = S3Credentials("loopback-access", "loopback-secret")

Bucket = tuple[S3Location, S3Credentials]


@pytest.fixture(scope="session")
def rclone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a running `rclone serve s3`."""
    buckets = tmp_path_factory.mktemp("rclone") / "buckets"
    buckets.mkdir()
    with serving(buckets, "--auth-key", f"{CREDENTIALS.access_key},{CREDENTIALS.secret_key}") as url:
        yield url


@pytest.fixture
def rclone_bucket(rclone: str) -> Bucket:
    return _new_bucket(rclone, connections=16)


def _new_bucket(url: str, connections: int) -> Bucket:
    location = S3Location(f"b{secrets.token_hex(6)}", url, addressing="path", connections=connections)
    session = S3Session(location, CREDENTIALS)
    session.client.create_bucket(Bucket=location.bucket)
    session.close()
    return location, CREDENTIALS


@pytest.fixture(scope="session")
def moto() -> Iterator[str]:
    """The URL of moto's S3 service."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def moto_bucket(moto: str) -> Bucket:
    # one connection, because moto's response to a put reads an object that a concurrent put to the key may have closed
    return _new_bucket(moto, connections=1)
