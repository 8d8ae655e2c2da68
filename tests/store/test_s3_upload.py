"""Multipart uploads: they arrive whole, and are resumed after failures."""

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, suppress
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from botocore.exceptions import ConnectionClosedError

from grailnode.store.place import PlaceSection
from grailnode.store.s3.s3_session import S3Credentials
from grailnode.store.s3.s3_store import S3Store, _part_size
from protocol.limits import GIB, MIB
from roles.ports import StoreError
from tests.store.s3_buckets import Bucket

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
    faults.unsent = set()
    await store.put("a", OBJECT)
    assert faults.count["UploadPart"] == 1
    assert await store.get("a", len(OBJECT)) == OBJECT


async def test_a_put_can_be_repeated_after_the_response_to_its_completion_was_lost(store):
    faults = RequestFaults(store)
    faults.unanswered = {"CompleteMultipartUpload"}
    with pytest.raises(StoreError):
        await store.put("a", OBJECT)
    faults.unanswered = set()
    assert await store.get("a", len(OBJECT)) == OBJECT
    with suppress(StoreError):  # some services have no such upload any more
        await store.put("a", OBJECT)
    await store.put("a", OBJECT)
    assert await store.get("a", len(OBJECT)) == OBJECT


async def test_parts_of_other_bytes_are_not_taken_over(store):
    faults = await fail_at_part_2(store)
    faults.unsent, other = set(), OBJECT[::-1]
    await store.put("a", other)
    assert await store.get("a", len(other)) == other


async def test_a_put_starts_again_after_its_upload_was_aborted(store):
    faults = await fail_at_part_2(store)
    faults.unsent = set()
    client, upload_id = store._session.client, store._uploads._unfinished["a"].upload_id
    client.abort_multipart_upload(Bucket=store._bucket, Key="a", UploadId=upload_id)
    with pytest.raises(StoreError):
        await store.put("a", OBJECT)
    await store.put("a", OBJECT)
    assert await store.get("a", len(OBJECT)) == OBJECT


def test_parts_grow_when_there_would_be_too_many():
    assert _part_size(100 * GIB, 16 * MIB) == 16 * MIB
    assert _part_size(400 * GIB, 16 * MIB) == 41 * MIB
    assert 400 * GIB / _part_size(400 * GIB, 16 * MIB) <= 10_000
