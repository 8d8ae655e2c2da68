"""Large objects in parts: whole when they arrive, resumed where they broke, swept where nobody completes them."""

import os
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from botocore.exceptions import ConnectionClosedError

from grailnode.store.s3.s3_session import S3Credentials, S3Location
from grailnode.store.s3.s3_store import S3Store
from grailnode.store.s3.s3_upload import _part_size
from protocol.limits import GIB, MIB
from roles.ports import StoreError

OBJECT = os.urandom(17 * MIB + 5)
PARTS = 4


class Wire:
    """Counts a store's requests by operation, and breaks some.

    Attributes:
        unsent: operations whose requests never leave; for parts, 'UploadPart 3'.
        unanswered: operations that take effect, but whose answer is lost.
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
def bucket(request) -> tuple[S3Location, S3Credentials]:
    location, credentials = request.getfixturevalue(f"{request.param}_bucket")
    small = S3Location(location.bucket, location.endpoint, addressing="path", part_bytes=5 * MIB)
    return small, credentials


@pytest.fixture
def store(bucket: tuple[S3Location, S3Credentials]) -> Iterator[S3Store]:
    store = S3Store(*bucket)
    yield store
    store.close()


@pytest.mark.trio
async def test_a_large_object_arrives_whole(store):
    wire = Wire(store)
    await store.put("large/object", OBJECT)
    assert wire.count["UploadPart"] == PARTS
    assert await store.get("large/object", len(OBJECT)) == OBJECT
    assert await store.get("large/object", 100, offset=10 * MIB - 3, size=9) == OBJECT[10 * MIB - 3 :][:9]


@pytest.mark.trio
async def test_a_second_attempt_sends_only_what_is_missing(store):
    wire = Wire(store)
    wire.unsent = {"UploadPart 3"}
    with pytest.raises(StoreError):
        await store.put("a", OBJECT)
    wire.unsent, wire.count = {"CompleteMultipartUpload"}, Counter()
    with pytest.raises(StoreError):
        await store.put("a", OBJECT)
    assert wire.count["UploadPart"] == 1
    wire.unsent, wire.count = set(), Counter()
    await store.put("a", OBJECT)
    assert wire.count["CreateMultipartUpload"] == wire.count["UploadPart"] == 0
    assert await store.get("a", len(OBJECT)) == OBJECT


@pytest.mark.trio
async def test_a_completion_whose_answer_was_lost(store):
    wire = Wire(store)
    wire.unanswered = {"CompleteMultipartUpload"}
    with pytest.raises(StoreError):
        await store.put("a", OBJECT)
    wire.unanswered = set()
    assert await store.get("a", len(OBJECT)) == OBJECT
    await store.put("a", OBJECT)
    assert await store.get("a", len(OBJECT)) == OBJECT
    assert await store.abort_uploads("", time.time() + 60) == 0


@pytest.mark.trio
async def test_a_new_process_adopts_the_parts_of_one_that_died(store, bucket):
    Wire(store).unsent = {"UploadPart 2"}
    with pytest.raises(StoreError):
        await store.put("a", OBJECT)
    successor = S3Store(*bucket)
    wire = Wire(successor)
    await successor.put("a", OBJECT)
    assert wire.count["CreateMultipartUpload"] == 0
    assert wire.count["UploadPart"] == 1
    assert await successor.get("a", len(OBJECT)) == OBJECT
    assert await successor.abort_uploads("", time.time() + 60) == 0
    successor.close()


@pytest.mark.trio
async def test_parts_of_other_bytes_are_not_adopted(store, bucket):
    Wire(store).unsent = {"UploadPart 2"}
    with pytest.raises(StoreError):
        await store.put("a", OBJECT)
    successor, other = S3Store(*bucket), OBJECT[::-1]
    await successor.put("a", other)
    assert await successor.get("a", len(other)) == other
    assert await successor.abort_uploads("", time.time() + 60) == 0
    successor.close()


@pytest.mark.trio
async def test_a_service_that_lists_no_uploads_gets_everything_again(store, bucket):
    Wire(store).unsent = {"UploadPart 2"}
    with pytest.raises(StoreError):
        await store.put("a", OBJECT)
    successor = S3Store(*bucket)
    Wire(successor).unsent = {"ListMultipartUploads"}
    await successor.put("a", OBJECT)
    assert await successor.get("a", len(OBJECT)) == OBJECT
    successor.close()


@pytest.mark.trio
async def test_an_upload_that_was_aborted_meanwhile_starts_anew(store, bucket):
    wire = Wire(store)
    wire.unsent = {"UploadPart 2"}
    with pytest.raises(StoreError):
        await store.put("a", OBJECT)
    wire.unsent = set()
    assert await store.abort_uploads("", time.time() + 60) == 1
    with pytest.raises(StoreError):
        await store.put("a", OBJECT)
    await store.put("a", OBJECT)
    assert await store.get("a", len(OBJECT)) == OBJECT


@pytest.mark.trio
async def test_orphans_are_aborted_when_they_are_old_enough(store):
    Wire(store).unsent = {"CompleteMultipartUpload"}
    for path in ("mine/a", "theirs/a"):
        with pytest.raises(StoreError):
            await store.put(path, OBJECT)
    assert await store.abort_uploads("mine/", 0.0) == 0
    assert await store.abort_uploads("mine/", time.time() + 60) == 1
    assert await store.abort_uploads("mine/", time.time() + 60) == 0
    assert await store.abort_uploads("theirs/", time.time() + 60) == 1


def test_parts_grow_when_there_would_be_too_many():
    assert _part_size(100 * GIB, 16 * MIB) == 16 * MIB
    assert _part_size(400 * GIB, 16 * MIB) == 41 * MIB
    assert 400 * GIB / _part_size(400 * GIB, 16 * MIB) <= 10_000


def test_parts_smaller_than_s3_takes_are_refused():
    with pytest.raises(ValueError, match="5 MiB"):
        S3Location("bucket", part_bytes=MIB)
