"""Payloads of several files: no object is larger than a file, and nothing counts unless all of them are right."""

from collections.abc import Callable
from dataclasses import replace
from typing import Final

import pytest
import trio

from grailnode.store.memory import MemoryStore
from protocol import limits, paths
from protocol.digest import digest_weights
from protocol.encoding import content_digest
from protocol.identity.signing import sign
from protocol.outer.round_checks import sender_digest
from protocol.outer.round_records import PayloadRef, RoundContribution, RoundManifest
from protocol.pseudogradient import DILOCO, PULSELOCO_EXACT, SPARSELOCO, decode, encode, in_memory, parts_of, read_head
from protocol.pseudogradient import parts as parts_module
from roles.ports import StoreError
from roles.trainer.outer import round_judging
from roles.trainer.outer.round_reader import HEAD_START, KEPT_ROUNDS, FetchedFiles, fetch_payloads
from tests.outer.methods import METHODS
from tests.support.faults.decorated_store import DecoratedStore
from tests.support.measuring.store_listing import names_below
from tests.support.simulation import outer_sites
from tests.support.simulation.network import Log, key
from tests.support.simulation.outer_crashes import RULES, kill, operations_of
from tests.support.simulation.outer_sites import SHAPES, SITE_SETTINGS, OuterTestbed, equal_states, first_weights
from tests.support.simulation.virtual_clock import running

DENSE: Final = METHODS["dense"].model_copy(update={"local_steps": 3, "quorum": 2})
FILE_BYTES: Final = 4096
LARGEST: Final = 11000
"""Bytes of an object that the stores of a test accept; a dense payload has 12,500."""


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the weights have three parts."""
    monkeypatch.setattr(parts_module, "PART_ELEMENTS", 400)
    monkeypatch.setattr(limits, "MIN_PAYLOAD_FILE_BYTES", 1)
    assert [part.elements for part in parts_of(SHAPES)] == [480, 2560, 40]


class CappedStore(DecoratedStore):
    """Accepts no object of more than so many bytes."""

    async def put(self, path: str, data: bytes) -> None:
        if len(data) > LARGEST:
            raise StoreError(f"{path}: {len(data)} bytes")
        await super().put(path, data)


async def test_payloads_larger_than_an_object_may_be_go_through_whole_rounds() -> None:
    testbed = OuterTestbed(2, DENSE)
    testbed.site_settings = replace(SITE_SETTINGS, file_bytes=FILE_BYTES)
    store, rounds = CappedStore(testbed.store), KEPT_ROUNDS + 3
    async with running(testbed.feed) as nursery:
        nursery.start_soon(testbed.run_coordinator, None, store)
        for name in testbed.names:
            nursery.start_soon(testbed.run_site, testbed.handles[name], None, store)
        for number in range(1, rounds + 1):
            manifest = await testbed.until_round(number)
            assert [item.payload.total > LARGEST for item in manifest.counted] == [True, True], number
        await testbed.until(lambda: all(rounds in testbed.applied(name) for name in testbed.names))
    equal_states(testbed, rounds)
    for name in testbed.names:  # of each contribution that is there, all files are, and of no other one
        folder = paths.kind_prefix(key(name).public, "contributions")
        numbers = [int(number) for number in await names_below(testbed.store, folder)]
        files = await names_below(testbed.store, paths.kind_prefix(key(name).public, "payloads"))
        assert sorted(int(file[:10]) for file in files) == sorted(3 * numbers)
        assert min(numbers) >= rounds - KEPT_ROUNDS


@pytest.mark.parametrize("method", [DILOCO, PULSELOCO_EXACT, SPARSELOCO], ids=["dense", "exact", "chunked"])
def test_values_of_every_kind_are_the_same_in_one_file_or_several(method: object) -> None:
    assert isinstance(method, type(DILOCO))
    base = {name: tensor.float() for name, tensor in first_weights().items()}
    digest, local = digest_weights(base), {name: tensor * 0.99 for name, tensor in base.items()}
    single = encode(base, local, None, method.coding, digest)
    contribution = encode(base, local, None, method.coding, digest, file_bytes=1)
    assert len(single.payload) == 1 and len(contribution.payload) == 3
    assert tuple(map(len, contribution.payload)) == contribution.head.file_sizes
    assert [content_digest(bytes(file[:])) for file in contribution.payload[1:]] == [*contribution.head.digests]
    assert read_head(contribution.payload[0], parts_of(SHAPES)) == contribution.head
    values = [[own.tobytes() for _, own in decode(item.payload, base, digest)] for item in (single, contribution)]
    assert values[0] == values[1]


Files = list[bytes]


def _altered(files: Files) -> Files:
    return [*files[:-1], files[-1][:-1] + bytes([files[-1][-1] ^ 1])]


def _extra(files: Files) -> Files:
    """Name the last file twice."""
    begin = len(files[0]) - 4 * 480  # where the first frame begins, behind the digests
    return [files[0][:begin] + content_digest(files[-1]) + files[0][begin:], *files[1:]]


@pytest.mark.parametrize(
    ("stored", "is_named", "reason", "event", "what"),
    [
        (lambda files: files[:-1], lambda files: files, "withheld", "payload-unread", "no such object"),
        (_altered, lambda files: files, "malformed", "contribution-refused", "not the bytes of"),
        (lambda files: [files[0], files[2], files[1]], lambda files: files, "malformed", "contribution-refused", ""),
        (_extra, _extra, "malformed", "contribution-refused", "another size"),
        (lambda files: files, lambda files: files, "", "", ""),
    ],
    ids=["missing", "wrong", "swapped", "extra", "another site's files under an own head"],
)
async def test_a_payload_counts_only_with_all_of_its_files(
    stored: Callable[[Files], Files], is_named: Callable[[Files], Files], reason: str, event: str, what: str
) -> None:
    testbed, attacker = OuterTestbed(3, DENSE), key("site-2")
    testbed.site_settings = replace(SITE_SETTINGS, file_bytes=FILE_BYTES)
    async with testbed.running(testbed.names[:2]):
        await testbed.until_round(1)
        files, record = await _under_own_head(testbed)
        named, kept = is_named(files), stored(files)
        total = sum(map(len, named))
        ref = PayloadRef(digest=content_digest(named[0]), size=len(named[0]), total=total)
        names = [content_digest(file) for file in named]
        for name, file in zip(names, kept, strict=False):
            await testbed.store.put(paths.payload(attacker.public, 2, name), file)
        record = record.model_copy(update={"payload": ref})
        await testbed.store.put(record.path, sign(record, attacker))
        manifest: RoundManifest = await testbed.until_round(2)
    assert testbed.reasons(manifest) == ({"site-2": reason} if reason else {})
    assert key("site-1").public in [item.worker for item in manifest.counted]
    if reason:
        lines = testbed.coordinator_log.named(event)
        assert len({line["error"] for line in lines}) == len(lines) > 0 and (len(lines) == 1 or not what)
        for line in lines:
            assert line["worker"] == attacker.public.hex()[:16] and what in line["error"]
            assert paths.kind_prefix(attacker.public, "payloads") in line["error"]


async def _under_own_head(testbed: OuterTestbed) -> tuple[Files, RoundContribution]:
    """Wait for the contribution of site-1 to round 2; return its files with a head that names site-2, and a record."""
    await testbed.until(lambda: any(e["number"] == 2 for e in testbed.handles["site-1"].log.named("contributed")))
    record, worker = (await testbed.contribution("site-1", 2)).record, key("site-2").public
    first = await testbed.store.get(paths.payload(record.worker, 2, record.payload.digest), 1 << 20)
    head = read_head(first, parts_of(SHAPES))
    others = [await testbed.store.get(paths.payload(record.worker, 2, digest), 1 << 20) for digest in head.digests]
    own = first.replace(head.sender, sender_digest(record.opening, worker))
    return [own, *others], record.model_copy(update={"worker": worker, "groups": ()})


def test_a_site_that_is_killed_between_two_files_loses_no_update(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outer_sites, "SITE_SETTINGS", replace(SITE_SETTINGS, file_bytes=1))
    operations = operations_of("site-0")
    for kind, count in (("outer/payload/0000000002/", 3), ("/payloads/0000000002", 3)):
        places = [place for place, (operation, path) in enumerate(operations) if operation == "put" and kind in path]
        assert len(places) == count, operations
        for place in places:
            kill("site-0", place, after=place == places[-1], rules=RULES)


async def test_a_payload_that_lacks_a_file_costs_the_coordinator_no_file_twice() -> None:
    testbed, attacker, reads = OuterTestbed(3, DENSE), key("site-2"), list[str]()
    testbed.site_settings = replace(SITE_SETTINGS, file_bytes=4096)

    class Counting(DecoratedStore):
        async def get(self, path: str, max_bytes: int, *, offset: int = 0, size: int | None = None) -> bytes:
            data = await super().get(path, max_bytes, offset=offset, size=size)
            if path.startswith(paths.kind_prefix(attacker.public, "payloads")):
                reads.append(path)
            return data

    async with testbed.running(testbed.names[:2], store=Counting(testbed.store)):
        await testbed.until_round(1)
        files, record = await _under_own_head(testbed)
        for file in files[:-1]:
            await testbed.store.put(paths.payload(attacker.public, 2, content_digest(file)), file)
        ref = PayloadRef(digest=content_digest(files[0]), size=len(files[0]), total=sum(map(len, files)))
        record = record.model_copy(update={"payload": ref})
        await testbed.store.put(record.path, sign(record, attacker))
        manifest = await testbed.until_round(2)
    assert testbed.reasons(manifest) == {"site-2": "withheld"}
    assert len(reads) == len(set(reads)) > 0, (len(reads), len(set(reads)))


async def test_a_coordinator_downloads_few_bytes_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(round_judging, "DOWNLOAD_BYTES", 6000)
    testbed, active, most = OuterTestbed(3, DENSE), list[int](), list[int]()
    own = tuple(paths.kind_prefix(key(name).public, "payloads") for name in testbed.names)  # not the trainer's copies
    testbed.site_settings = replace(SITE_SETTINGS, file_bytes=FILE_BYTES)

    class Slow(DecoratedStore):
        async def get(self, path: str, max_bytes: int, *, offset: int = 0, size: int | None = None) -> bytes:
            data = await super().get(path, max_bytes, offset=offset, size=size)
            if path.startswith(own):
                active.append(len(data))
                most.append(sum(active))
                try:
                    await trio.sleep(1.0)
                finally:
                    active.remove(len(data))
            return data

    async with running(testbed.feed) as nursery:
        nursery.start_soon(testbed.run_coordinator, None, Slow(testbed.store))
        for name in testbed.names:
            nursery.start_soon(testbed.run_site, testbed.handles[name])
        manifest = await testbed.until_round(1)
    assert len(manifest.counted) == 3
    assert 10240 <= max(most) <= 6000 + 10300  # the largest file, of more than a share, has about 10,300 bytes


def test_a_payload_without_bytes_is_no_payload() -> None:
    with pytest.raises(ValueError, match="greater than or equal to 1"):
        PayloadRef(digest=bytes(32), size=0, total=1)


async def test_a_worker_that_hangs_costs_one_head_start_and_not_one_for_each_file(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(parts_module, "PART_ELEMENTS", 1)
    testbed = OuterTestbed(2, DENSE)
    testbed.site_settings = replace(SITE_SETTINGS, file_bytes=1)

    class Hanging(DecoratedStore):
        async def get(self, path: str, max_bytes: int, *, offset: int = 0, size: int | None = None) -> bytes:
            if path.startswith(paths.kind_prefix(key("site-1").public, "payloads")):
                await trio.sleep_forever()
            return await super().get(path, max_bytes, offset=offset, size=size)

    async with testbed.running():
        manifest = await testbed.until_round(1)
    node = testbed.node(Log("reader"), MemoryStore(), key("reader"), Hanging(testbed.store))
    monkeypatch.setattr("roles.trainer.outer.round_reader._AT_ONCE", 1)
    begin = trio.current_time()
    counted = [item for item in manifest.counted if item.worker == key("site-1").public]
    (payload,) = await fetch_payloads(node, manifest.trainer, 1, counted, parts_of(SHAPES), FetchedFiles(in_memory))
    assert len(payload) == 3
    assert trio.current_time() - begin < HEAD_START + 1, trio.current_time() - begin
