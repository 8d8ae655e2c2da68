"""Multipart uploads: they arrive whole, are resumed after failures, and are aborted when nobody completes them."""

import os
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
import trio
from botocore.exceptions import ConnectionClosedError

from grailnode.config import Config, load
from grailnode.node.stores import sweep_orphans
from grailnode.run import workspace
from grailnode.store.place import PlaceSection
from grailnode.store.s3.s3_errors import UnsupportedError
from grailnode.store.s3.s3_session import S3Credentials
from grailnode.store.s3.s3_store import S3Store
from grailnode.store.s3.s3_upload import _part_size
from protocol.limits import GIB, MIB
from roles.ports import StoreError
from tests.store.s3_buckets import CREDENTIALS, Bucket
from tests.support.builders.recipes import demo_recipe
from tests.support.simulation.network import Log

OBJECT = os.urandom(17 * MIB + 5)
PARTS = 4


class RequestFaults:
    """Counts the requests of a store by operation, and makes some fail.

    Attributes:
        count: requests by operation.
        unsent: operations whose requests are not sent; a single part is 'UploadPart 3'.
        unanswered: operations that take effect, but whose response is lost.
    """

    def __init__(self, store: S3Store) -> None:
        self.count: Counter[str] = Counter()
        self.unsent: set[str] = set()
        self.unanswered: set[str] = set()
        events = store._session.client.meta.events
        events.register("request-created.s3", self._on_request)
        events.register_last("before-send.s3", self._on_answer)

    def _on_request(self, event_name: str, request: Any, **_: Any) -> None:
        operation = event_name.rpartition(".")[2]
        self.count[operation] += 1
        part = parse_qs(urlsplit(request.url).query).get("partNumber", [""])[0]
        if operation in self.unsent or f"{operation} {part}" in self.unsent:
            raise ConnectionClosedError(endpoint_url="the wire")

    def _on_answer(self, event_name: str, **_: Any) -> None:
        if event_name.rpartition(".")[2] in self.unanswered:
            raise ConnectionClosedError(endpoint_url="the wire")


@pytest.fixture(params=["rclone", "moto"])
def bucket(request) -> tuple[PlaceSection, S3Credentials, int]:
    return *request.getfixturevalue(f"{request.param}_bucket"), 5 * MIB


@pytest.fixture
def store(bucket: Bucket) -> Iterator[S3Store]:
    with closing(S3Store(*bucket)) as store:
        yield store


@pytest.fixture
def successor(bucket: Bucket) -> Iterator[S3Store]:
    """Return the store as the next process opens it."""
    with closing(S3Store(*bucket)) as store:
        yield store


async def fail_at_part_2(store: S3Store) -> RequestFaults:
    """Put an object whose second part is not sent; return what makes requests fail."""
    faults = RequestFaults(store)
    faults.unsent = {"UploadPart 2"}
    with pytest.raises(StoreError):
        await store.put("a", OBJECT)
    return faults


async def test_a_large_object_arrives_whole(store):
    faults = RequestFaults(store)
    await store.put("large/object", OBJECT)
    assert faults.count["UploadPart"] == PARTS
    assert await store.get("large/object", len(OBJECT)) == OBJECT
    assert await store.get("large/object", 100, offset=10 * MIB - 3, size=9) == OBJECT[10 * MIB - 3 :][:9]


async def test_a_second_attempt_sends_only_what_is_missing(store):
    faults = RequestFaults(store)
    faults.unsent = {"UploadPart 3"}
    with pytest.raises(StoreError):
        await store.put("a", OBJECT)
    faults.unsent, faults.count = {"CompleteMultipartUpload"}, Counter()
    with pytest.raises(StoreError):
        await store.put("a", OBJECT)
    assert faults.count["UploadPart"] == 1
    faults.unsent, faults.count = set(), Counter()
    await store.put("a", OBJECT)
    assert faults.count["CreateMultipartUpload"] == faults.count["UploadPart"] == 0
    assert await store.get("a", len(OBJECT)) == OBJECT


async def test_a_put_can_be_repeated_after_the_response_to_its_completion_was_lost(store):
    faults = RequestFaults(store)
    faults.unanswered = {"CompleteMultipartUpload"}
    with pytest.raises(StoreError):
        await store.put("a", OBJECT)
    faults.unanswered = set()
    assert await store.get("a", len(OBJECT)) == OBJECT
    await store.put("a", OBJECT)
    assert await store.get("a", len(OBJECT)) == OBJECT
    assert await store.abort_uploads("", time.time() + 60) == 0


async def test_a_new_process_adopts_the_parts_of_one_that_died(store, successor):
    await fail_at_part_2(store)
    faults = RequestFaults(successor)
    await successor.put("a", OBJECT)
    assert faults.count["CreateMultipartUpload"] == 0
    assert faults.count["UploadPart"] == 1
    assert await successor.get("a", len(OBJECT)) == OBJECT
    assert await successor.abort_uploads("", time.time() + 60) == 0


async def test_parts_of_other_bytes_are_not_adopted(store, successor):
    await fail_at_part_2(store)
    other = OBJECT[::-1]
    await successor.put("a", other)
    assert await successor.get("a", len(other)) == other
    assert await successor.abort_uploads("", time.time() + 60) == 0


async def test_all_parts_are_sent_again_when_the_service_lists_no_uploads(store, successor):
    await fail_at_part_2(store)
    RequestFaults(successor).unsent = {"ListMultipartUploads"}
    await successor.put("a", OBJECT)
    assert await successor.get("a", len(OBJECT)) == OBJECT


async def test_a_put_starts_again_after_its_upload_was_aborted(store, bucket):
    faults = await fail_at_part_2(store)
    faults.unsent = set()
    assert await store.abort_uploads("", time.time() + 60) == 1
    with pytest.raises(StoreError):
        await store.put("a", OBJECT)
    await store.put("a", OBJECT)
    assert await store.get("a", len(OBJECT)) == OBJECT


def test_parts_grow_when_there_would_be_too_many():
    assert _part_size(100 * GIB, 16 * MIB) == 16 * MIB
    assert _part_size(400 * GIB, 16 * MIB) == 41 * MIB
    assert 400 * GIB / _part_size(400 * GIB, 16 * MIB) <= 10_000


# sweep_orphans: a writer aborts its own old multipart uploads when it starts, and no others


MINE, THEIRS = b"m" * 32, b"t" * 32
DAY = 86_400.0


@pytest.fixture(params=["", "runs/one"], ids=["whole-bucket", "prefix"])
def config(request, rclone_bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    location, _ = rclone_bucket  # moto reports 2010 as the start of every upload
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", CREDENTIALS.access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", CREDENTIALS.secret_key)
    values = {"kind": "s3", "bucket": location.bucket, "endpoint": location.endpoint, "addressing": "path"}
    values |= {"prefix": request.param} if request.param else {}
    return load(workspace.create(tmp_path, demo_recipe()).config, [f"store.{k}={v}" for k, v in values.items()])


def sweep_events(config: Config, *seconds_later: float) -> list[tuple[str, dict[str, Any]]]:
    """Let the owner sweep at some times from now on, and return the events."""
    log = Log("miner")
    for seconds in seconds_later or (0.0,):
        trio.run(sweep_orphans, config, MINE, log, time.time() + seconds)
    return log.events


def test_a_writer_sweeps_its_own_uploads_when_they_are_a_day_old(config: Config, rclone_bucket: Bucket):
    store = S3Store(*rclone_bucket, 5 * MIB)
    RequestFaults(store).unsent = {"CompleteMultipartUpload"}
    under = f"{config.store.prefix}/" if config.store.prefix else ""
    for owner in (MINE, THEIRS):
        with pytest.raises(StoreError):
            trio.run(store.put, f"{under}{owner.hex()}/anchors/a", OBJECT)
    events = sweep_events(config, 0.0, DAY + 60, DAY + 60)
    assert events == [("orphans-swept", {"uploads": 1})]  # nothing at the first and the last sweep
    assert trio.run(store.abort_uploads, "", time.time() + 60) == 1  # the other owner's is still there
    store.close()


def test_a_service_that_refuses_causes_one_event_and_one_without_uploads_none(config: Config):
    assert sweep_events(config) == []
    misconfigured = config.model_copy(update={"store": config.store.model_copy(update={"bucket": "no-such-bucket"})})
    [(name, fields)] = sweep_events(misconfigured)
    assert name == "orphan-sweep-failed"
    assert "\n" not in fields["error"]


def test_a_service_that_lists_no_uploads_causes_no_event(config: Config, monkeypatch: pytest.MonkeyPatch):
    async def abort_uploads(self: S3Store, prefix: str, before: float) -> int:
        raise UnsupportedError("s3://bucket: the service does not implement this")

    monkeypatch.setattr(S3Store, "abort_uploads", abort_uploads)
    assert sweep_events(config) == []


def test_a_local_store_has_no_uploads_to_abort(tmp_path: Path):
    config = load(workspace.create(tmp_path, demo_recipe()).config, [])
    assert sweep_events(config) == []
