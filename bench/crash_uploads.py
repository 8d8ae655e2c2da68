"""Multipart uploads whose process is killed with SIGKILL: `python -m bench.crash_uploads --seeds 20`.

A process puts one object in three parts into a real `rclone serve s3`, and kills itself just before or just after it
creates the upload, sends a part (the seed says which) or completes the upload. A second process puts the same object
again, as a node does after a restart. The command checks that no reader ever gets an incomplete object, and that the
object is complete at the end. It prints a row for each point, and exits with 1 on a violation.
It takes about 2 seconds a kill, with six kills a seed, and needs rclone (the `test` extra).
"""

import argparse
import multiprocessing
import os
import random
import signal
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import trio

from grailnode.store.place import PlaceSection
from grailnode.store.s3.s3_session import S3Credentials, S3Session
from grailnode.store.s3.s3_store import S3Store
from protocol.limits import MIB
from roles.ports import NotFoundError
from tests.support.servers.rclone import serving

CREDENTIALS = S3Credentials("loopback-access", "loopback-secret")
OPERATIONS = ("CreateMultipartUpload", "UploadPart", "CompleteMultipartUpload")
PARTS = 3
PART_BYTES = 5 * MIB


@dataclass(frozen=True)
class Upload:
    """One object to put, and where its process is killed.

    Attributes:
        url: URL of the S3 service.
        path: path of the object.
        seed: seed of the object's bytes.
        operation: S3 operation at which the process is killed; empty if it is not killed.
        passes: how often the process calls the operation before.
        after: whether it is killed after the operation instead of before.
    """

    url: str
    path: str
    seed: int
    operation: str = ""
    passes: int = 0
    after: bool = False

    @property
    def data(self) -> bytes:
        """The bytes of the object: two full parts and a short one."""
        return random.Random(self.seed).randbytes((PARTS - 1) * PART_BYTES + 1 + self.seed)


def place(url: str) -> PlaceSection:
    """Return the bucket of this benchmark at an S3 service."""
    return PlaceSection(kind="s3", bucket="uploads", endpoint=url, addressing="path")


def put(upload: Upload) -> None:
    """Put an object in this process."""
    store = S3Store(place(upload.url), CREDENTIALS, PART_BYTES)
    events = store._session.client.meta.events
    remaining_passes = [upload.passes]

    def kill(**_: Any) -> None:
        remaining_passes[0] -= 1
        if remaining_passes[0] < 0:
            os.kill(os.getpid(), signal.SIGKILL)

    if upload.operation:
        timing = "after-call" if upload.after else "request-created"
        events.register(f"{timing}.s3.{upload.operation}", kill)
    trio.run(store.put, upload.path, upload.data)


def put_twice(upload: Upload) -> list[str]:
    """Put an object in a process that is killed and again in a second one; return a line for each violation."""
    context = multiprocessing.get_context("forkserver")
    violations = []
    store = S3Store(place(upload.url), CREDENTIALS, PART_BYTES)
    first_process = context.Process(target=put, args=(upload,))
    first_process.start()
    first_process.join()
    if first_process.exitcode != -9:
        violations.append(f"the first process was not killed but ended with exit code {first_process.exitcode}")
    try:
        if trio.run(store.get, upload.path, len(upload.data)) != upload.data:
            violations.append("the object was incomplete after the kill")
    except NotFoundError:
        pass
    second_process = context.Process(target=put, args=(Upload(upload.url, upload.path, upload.seed),))
    second_process.start()
    second_process.join()
    if second_process.exitcode or trio.run(store.get, upload.path, len(upload.data)) != upload.data:
        violations.append(f"no complete object from the second process, which ended with {second_process.exitcode}")
    trio.run(store.delete, upload.path)
    store.close()
    return violations


def main() -> None:
    """Kill, print, and exit with 1 on a violation."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=20, help="kills at each of the six points")
    arguments = parser.parse_args()
    multiprocessing.get_context("forkserver").set_forkserver_preload(["grailnode.store.s3.s3_store"])
    kills: Counter[str] = Counter()
    violation_count = 0
    with tempfile.TemporaryDirectory(prefix="grailnode-uploads-") as directory:
        buckets = Path(directory) / "buckets"
        buckets.mkdir()
        with serving(buckets, "--auth-key", f"{CREDENTIALS.access_key},{CREDENTIALS.secret_key}") as url:
            session = S3Session(place(url), CREDENTIALS)
            session.client.create_bucket(Bucket="uploads")
            session.client.put_object(Bucket="uploads", Key="keeper", Body=b"")  # the bucket is never empty
            session.close()
            for seed in range(arguments.seeds):
                for operation in OPERATIONS:
                    for after in (False, True):
                        passes = seed % PARTS if operation == "UploadPart" else 0
                        name = f"{'after' if after else 'before'} {operation}"
                        violations = put_twice(Upload(url, f"object-{seed}", seed, operation, passes, after))
                        kills[name] += 1
                        violation_count += len(violations)
                        for line in violations:
                            print(f"violation: {name}, seed {seed}: {line}", flush=True)
    print(f"{'point':34} {'kills':>5}")
    for name, count in kills.items():
        print(f"{name:34} {count:5}")
    print(f"{kills.total()} kills, {violation_count} violations")
    sys.exit(1 if violation_count else 0)


if __name__ == "__main__":
    main()
