"""The doors for signed records and objects: a record agrees in everything with where it was fetched, an object has
the digest and the size that were named, or they are refused.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from grailnode.store.memory import MemoryStore
from protocol import paths
from protocol.encoding import content_digest
from protocol.errors import MalformedError, ProtocolError, SignatureError
from protocol.identity.signing import PublishedRecord, SigningKey, sign
from protocol.objects import ObjectRef
from roles.node.identity import Node
from roles.ports import NotFoundError, TooLargeError
from roles.records import fetch_object, fetch_record, open_record
from tests.support.builders import samples
from tests.support.builders.chains import make_node
from tests.support.simulation.network import Log

RECORDS = [record for record in samples.every_record() if isinstance(record, PublishedRecord)]
KINDS = [record.kind for record in RECORDS]
KEYS = {key.public: key for key in (samples.MINER, samples.VALIDATOR, samples.TRAINER)}
OTHER = samples.key("another participant")


def writer(record: PublishedRecord) -> SigningKey:
    return KEYS[paths.writer(record.path)]


def node(store: MemoryStore) -> Node:
    return make_node(samples.RUN_ID, samples.run_manifest(), store, MemoryStore(), Log("reader"))


async def fetch(record: PublishedRecord, data: bytes | None, path: str = "", **options: Any) -> PublishedRecord:
    """Return what `fetch_record` gives for these bytes at the record's path, or at another one."""
    store = MemoryStore()
    if data is not None:
        await store.put(path or record.path, data)
    signed = await fetch_record(node(store), type(record), path or record.path, **options)
    assert signed.signers == (paths.writer(record.path),)
    assert signed.data == data
    return signed.record


every_kind = pytest.mark.parametrize("record", RECORDS, ids=KINDS)


@every_kind
async def test_a_record_at_its_own_path_comes_in(record: PublishedRecord) -> None:
    assert await fetch(record, sign(record, writer(record))) == record


@every_kind
async def test_a_record_that_is_missing_is_not_found(record: PublishedRecord) -> None:
    with pytest.raises(NotFoundError):
        await fetch(record, None)


def of_another_run(record: PublishedRecord) -> bytes:
    return sign(record.model_copy(update={"run": samples.digest("another run")}), writer(record))


FALSE_BYTES: dict[str, tuple[Callable[[PublishedRecord], bytes], type[Exception], str | None]] = {
    "signed by somebody else": (lambda record: sign(record, OTHER), SignatureError, None),
    "signed by somebody else too": (lambda record: sign(record, writer(record), OTHER), SignatureError, None),
    "of another run": (of_another_run, MalformedError, "is of another run"),
    "too large": (lambda record: bytes(type(record).max_signed_bytes() + 1), TooLargeError, None),
}


@every_kind
@pytest.mark.parametrize(("false_bytes", "error", "words"), FALSE_BYTES.values(), ids=FALSE_BYTES)
async def test_false_bytes_at_the_path_of_a_record_are_refused(
    record: PublishedRecord, false_bytes: Callable[[PublishedRecord], bytes], error: type[Exception], words: str | None
) -> None:
    with pytest.raises(error, match=words):
        await fetch(record, false_bytes(record))


@every_kind
async def test_a_true_record_of_another_window_or_a_verdict_on_another_miner_is_refused(
    record: PublishedRecord,
) -> None:
    other_places: dict[str, dict[str, Any]] = {"window": {"window": 6}, "judgements": {"miner": OTHER.public}}
    for field in other_places.keys() & type(record).model_fields:
        other = record.model_copy(update=other_places[field])
        with pytest.raises(MalformedError, match="belongs at"):
            await fetch(record, sign(other, writer(record)))


@every_kind
async def test_a_record_of_another_kind_is_refused(record: PublishedRecord) -> None:
    for other in RECORDS:
        if other.kind != record.kind:
            with pytest.raises((ProtocolError, TooLargeError)):
                await fetch(record, sign(other, writer(record)))


@every_kind
async def test_the_path_of_another_participant_is_refused(record: PublishedRecord) -> None:
    path = record.path.replace(paths.writer(record.path).hex(), OTHER.public.hex(), 1)
    with pytest.raises(SignatureError):
        await fetch(record, sign(record, writer(record)), path)


@every_kind
async def test_more_bytes_than_the_type_allows_are_not_opened(record: PublishedRecord) -> None:
    with pytest.raises(MalformedError, match="too many"):
        open_record(node(MemoryStore()), type(record), record.path, bytes(type(record).max_signed_bytes() + 1))


async def test_a_lower_ceiling_of_the_run_holds_too() -> None:
    record = samples.verdict(samples.judgement(0))
    data = sign(record, samples.VALIDATOR)
    assert await fetch(record, data, max_bytes=len(data)) == record
    with pytest.raises(TooLargeError):
        await fetch(record, data + bytes(1 << 13), max_bytes=len(data))


@pytest.mark.parametrize("size", [0, 100, 1 << 20], ids=["empty", "small", "large"])
async def test_an_object_comes_in_and_a_large_one_is_hashed_off_the_event_loop(size: int) -> None:
    data, store = bytes(size), MemoryStore()
    in_threads: list[Any] = []

    async def run_sync(function: Any, *arguments: Any) -> Any:
        in_threads.append(function)
        return function(*arguments)

    await store.put("object", data)
    reader = replace(node(store), run_sync=run_sync, shared_revisions=None)
    assert await fetch_object(reader, "object", ObjectRef(digest=content_digest(data), size=size)) == data
    assert in_threads == ([content_digest] if size > 1 << 16 else [])


@pytest.mark.parametrize(
    ("shown", "size", "error", "message"),
    [
        (None, 3, NotFoundError, "object"),
        (b"abd", 3, MalformedError, "^object: not the bytes of this digest$"),
        (b"ab", 3, MalformedError, "^object: not the bytes of this digest$"),
        (b"abcd", 3, MalformedError, "^object: larger than the 3 bytes that were named$"),
        (b"abc", 4, MalformedError, "^object: not the bytes of this digest$"),
    ],
    ids=["none", "other bytes", "fewer bytes", "more bytes", "another size than was named"],
)
async def test_another_object_is_refused(shown: bytes | None, size: int, error: type[Exception], message: str) -> None:
    store = MemoryStore()
    if shown is not None:
        await store.put("object", shown)
    with pytest.raises(error, match=message):
        await fetch_object(node(store), "object", ObjectRef(digest=content_digest(b"abc"), size=size))
