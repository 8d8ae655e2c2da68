"""kill -9 of a process that uploads in parts: `python -m bench.crash_uploads --seeds 20`.

A process puts one object in three parts into a real `rclone serve s3`, and dies just before or just after it creates
the upload, sends a part (the seed says which) or completes it. Another process, as after a restart, puts the same
object again. Then the object is whole, nobody ever saw half of one, and a sweep finds no upload left over. Prints a row
for each point, with the parts
that the second process sent: those that had arrived are not sent again. Exits with 1 if anything was violated.
"""

import argparse
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import trio

from grailnode.store.s3.s3_session import S3Credentials, S3Location, S3Session
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
    """One object to put, and where its process dies; nowhere where `operation` is empty."""

    url: str
    path: str
    seed: int
    operation: str = ""
    passes: int = 0
    after: bool = False

    @property
    def data(self) -> bytes:
        """What is put."""
        return random.Random(self.seed).randbytes((PARTS - 1) * PART_BYTES + 1 + self.seed)


def location(url: str) -> S3Location:
    """The bucket of this bench."""
    return S3Location("uploads", url, addressing="path", part_bytes=PART_BYTES)


def put(upload: Upload, sent: Any) -> None:
    """A process that puts an object, and counts the parts that it sends."""
    store = S3Store(location(upload.url), CREDENTIALS)
    events = store._session.client.meta.events
    left = [upload.passes]

    def strike(**_: Any) -> None:
        left[0] -= 1
        if left[0] < 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def count(**_: Any) -> None:
        with sent.get_lock():
            sent.value += 1

    events.register("request-created.s3.UploadPart", count)
    if upload.operation:
        moment = "after-call" if upload.after else "request-created"
        events.register(f"{moment}.s3.{upload.operation}", strike)
    trio.run(store.put, upload.path, upload.data)


def lived(upload: Upload) -> tuple[int, list[str]]:
    """Die, come back, and look: the parts that were sent the second time, and what must not be."""
    context = multiprocessing.get_context("forkserver")
    found = []
    store = S3Store(location(upload.url), CREDENTIALS)
    sent = context.Value("i", 0)
    first = context.Process(target=put, args=(upload, sent))
    first.start()
    first.join()
    if first.exitcode != -9:
        found.append(f"not killed, but ended with {first.exitcode}")
    try:
        if trio.run(store.get, upload.path, len(upload.data)) != upload.data:
            found.append("a torn object")
    except NotFoundError:
        pass
    sent.value = 0
    second = context.Process(target=put, args=(Upload(upload.url, upload.path, upload.seed), sent))
    second.start()
    second.join()
    if second.exitcode or trio.run(store.get, upload.path, len(upload.data)) != upload.data:
        found.append(f"not whole after the restart, which ended with {second.exitcode}")
    if left := trio.run(store.abort_uploads, upload.path, time.time() + 60.0):
        found.append(f"{left} uploads were left over")
    trio.run(store.delete, upload.path)
    store.close()
    return sent.value, found


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=20)
    arguments = parser.parse_args()
    multiprocessing.get_context("forkserver").set_forkserver_preload(["grailnode.store.s3.s3_store"])
    resent: dict[str, list[int]] = defaultdict(list)
    violated = 0
    with tempfile.TemporaryDirectory(prefix="grailnode-uploads-") as directory:
        buckets = Path(directory) / "buckets"
        buckets.mkdir()
        with serving(buckets, "--auth-key", f"{CREDENTIALS.access_key},{CREDENTIALS.secret_key}") as url:
            session = S3Session(location(url), CREDENTIALS)
            session.client.create_bucket(Bucket="uploads")
            session.client.put_object(Bucket="uploads", Key="keeper", Body=b"")  # a bucket that is never empty
            session.close()
            for seed in range(arguments.seeds):
                for operation in OPERATIONS:
                    for after in (False, True):
                        passes = seed % PARTS if operation == "UploadPart" else 0
                        name = f"{'after' if after else 'before'} {operation}"
                        parts, found = lived(Upload(url, f"object-{seed}", seed, operation, passes, after))
                        resent[name].append(parts)
                        violated += len(found)
                        for line in found:
                            print(f"violated: {name}, seed {seed}: {line}", flush=True)
    print(f"{'point':34} {'kills':>5}  parts sent again, of {PARTS}")
    for name, counts in resent.items():
        print(f"{name:34} {len(counts):5}  {min(counts)} to {max(counts)}")
    print(f"{sum(map(len, resent.values()))} kills, {violated} violations")
    sys.exit(1 if violated else 0)


if __name__ == "__main__":
    main()
