"""Reads through mirrors: what they show is checked, the fastest is asked first, and the origin is asked at last."""

import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import pytest
import trio

from grailnode.store.decorators.mirrored import MirroredStore
from protocol import paths
from protocol.encoding import content_digest
from protocol.identity.authority import ChainPoint, Revisions
from protocol.identity.signing import Envelope, Signature, SigningKey, sign
from roles.ports import NotFoundError, ObjectStore, StoreError
from tests.support.builders import samples
from tests.support.builders.samples import ROOT, RUN_ID, TRAINER, authority, digest, manifest, revision
from tests.support.faults.decorated_store import SlowStore
from tests.support.simulation.network import BEGIN, Log
from tests.support.simulation.virtual_clock import TrioClock, simulated

OWN = SigningKey(b"o" * 32)
URLS = ("https://a.example", "https://b.example")
TTL = 60.0
DATA = b"x" * 200_000
PATCH = paths.patch(TRAINER.public, content_digest(DATA))
HEAD = paths.head(TRAINER.public)


@dataclass
class Setting:
    """An origin with a patch, two mirrors without anything, and what reads them."""

    origin: SlowStore = field(default_factory=SlowStore)
    mirrors: dict[str, SlowStore] = field(default_factory=lambda: {url: SlowStore() for url in URLS})
    log: Log = field(default_factory=lambda: Log("node"))
    seed: int = 1

    def __post_init__(self) -> None:
        self.clock, self.revisions = TrioClock(BEGIN), Revisions(RUN_ID, authority(mirrors=URLS))
        opened: dict[str, ObjectStore] = dict(self.mirrors)
        rng = random.Random(self.seed)
        self.store = MirroredStore(
            self.origin, self.revisions, OWN.public, TTL, self.clock, opened.__getitem__, self.log, rng
        )

    async def put(self, path: str, data: bytes, *, in_mirrors: bytes | None = None) -> None:
        """Put an object into the origin, and into the mirrors, where it may be another one."""
        await self.origin.put(path, data)
        for mirror in self.mirrors.values():
            await mirror.put(path, data if in_mirrors is None else in_mirrors)

    @property
    def reads(self) -> int:
        return sum(mirror.reads for mirror in self.mirrors.values())

    def head(self, version: int, lifetime: float, signer: SigningKey = TRAINER, **changes: Any) -> bytes:
        """Return a signed head that expires so many seconds from now."""
        digests = tuple(digest(f"manifest {number}") for number in range(version + 1))
        expires_ms = int((self.clock.now() + lifetime) * 1000)
        return sign(samples.head(manifests=digests, expires_ms=expires_ms, **changes), signer)


@simulated
async def test_a_true_object_comes_from_a_mirror() -> None:
    setting = Setting()
    await setting.put(PATCH, DATA)
    assert await setting.store.get(PATCH, len(DATA)) == DATA
    assert (setting.origin.reads, setting.reads) == (0, 1)
    assert setting.log.events == []


@simulated
async def test_ranges_and_objects_of_others_come_from_the_origin() -> None:
    setting = Setting()
    of_others = paths.patch(b"v" * 32, content_digest(DATA))
    others = (of_others, paths.revision(RUN_ID, 1), paths.report(TRAINER.public, 3))
    for path in (PATCH, *others):
        await setting.put(path, DATA)
    await setting.store.get(PATCH, 10, offset=5, size=10)
    for path in others:
        await setting.store.get(path, len(DATA))
    assert (setting.origin.reads, setting.reads) == (4, 0)


@simulated
async def test_a_revision_is_read_from_a_mirror_which_is_not_believed_more_than_its_signatures() -> None:
    setting, path = Setting(), paths.revision_copy(TRAINER.public, 1)
    data = sign(revision(), ROOT)
    await setting.put(path, data)
    assert [await setting.store.get(path, 1 << 20) for _ in range(2)] == [data, data]
    assert (setting.origin.reads, setting.reads) == (1, 1)  # the first look is at the origin
    await setting.put(path, data, in_mirrors=sign(revision(), OWN))
    assert await setting.store.get(path, 1 << 20) == data
    assert {report["mirror"] for report in setting.log.named("mirror-refused")} == set(URLS)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("honest", "minutes"), [((), 10), (URLS[1:], 9)], ids=["all", "the fastest"])
@simulated
async def test_mirrors_hide_a_revision_for_ten_minutes_at_most(honest: Sequence[str], minutes: int, seed: int) -> None:
    """The fastest mirror alone does not hide it for as long."""
    mirrors = {url: SlowStore(0.2 if url == URLS[1] else 0.0) for url in URLS}
    setting, path = Setting(SlowStore(0.3), mirrors=mirrors, seed=seed), paths.revision_copy(TRAINER.public, 1)
    with pytest.raises(NotFoundError):  # there is none yet
        await setting.store.get(path, 1 << 20)
    for store in (setting.origin, *(setting.mirrors[url] for url in honest)):
        await store.put(path, sign(revision(), ROOT))
    for _ in range(minutes):
        await trio.sleep(60)
        with suppress(NotFoundError):
            assert await setting.store.get(path, 1 << 20)
            return
    pytest.fail("the revision stays hidden")


@simulated
async def test_a_mirror_that_lies_or_lacks_an_object_is_left_alone_for_a_while() -> None:
    setting = Setting()
    await setting.put(PATCH, DATA, in_mirrors=DATA[:-1] + b"y")
    await setting.mirrors[URLS[1]].delete(PATCH)
    assert await setting.store.get(PATCH, len(DATA)) == DATA
    assert {report["mirror"] for report in setting.log.named("mirror-refused")} == set(URLS)
    assert await setting.store.get(PATCH, len(DATA)) == DATA
    assert (setting.origin.reads, setting.reads) == (2, 2)
    await trio.sleep(31)
    assert await setting.store.get(PATCH, len(DATA)) == DATA
    assert setting.reads == 4
    await trio.sleep(31)  # they are left alone for twice as long now
    assert await setting.store.get(PATCH, len(DATA)) == DATA
    assert setting.reads == 4


@simulated
async def test_a_mirror_that_still_computes_an_anchor_is_asked_for_the_next_patch() -> None:
    setting = Setting(SlowStore(0.2), mirrors={url: SlowStore(0.2) for url in URLS})
    path = paths.anchor(TRAINER.public, content_digest(DATA))
    await setting.origin.put(path, DATA)
    await setting.put(PATCH, DATA)
    for place in (path, PATCH):
        await setting.store.get(place, len(DATA))
    assert setting.origin.reads == 1


@simulated
async def test_a_mirror_that_hangs_costs_three_seconds() -> None:
    setting = Setting(mirrors={url: SlowStore(1e6) for url in URLS})
    data = setting.head(3, 55)
    await setting.put(HEAD, data)
    await setting.store.get(HEAD, 1 << 20)
    began = trio.current_time()
    assert await setting.store.get(HEAD, 1 << 20) == data
    assert 5.9 <= trio.current_time() - began <= 6.1


def head_that_is_taken_back(setting: Setting) -> bytes:
    """Return a newer head, whose version the roots take back."""
    rewind = ChainPoint(version=3, digest=digest("manifest 3"))
    record = revision(authority=setting.revisions.current, rewind=rewind)
    setting.revisions.adopt(setting.revisions.check(1, sign(record, ROOT)))
    return setting.head(4, 58)


FALSE_HEADS: dict[str, tuple[Callable[[Setting], bytes], str]] = {
    "not renewed": (lambda setting: setting.head(4, 25), "its trainer would have renewed"),
    "older than one that was seen": (lambda setting: setting.head(2, 58), "an older head than one that was seen"),
    "signed by another key": (lambda setting: setting.head(9, 58, signer=OWN), "signed by"),
    "of another run": (lambda setting: setting.head(9, 58, run=bytes(32)), "another run"),
    "taken back": (head_that_is_taken_back, "taken back"),
}


@pytest.mark.parametrize(("false_head", "words"), FALSE_HEADS.values(), ids=FALSE_HEADS)
@simulated
async def test_an_old_or_false_head_is_not_believed(false_head: Callable[[Setting], bytes], words: str) -> None:
    setting = Setting()
    await setting.put(HEAD, setting.head(3, 55))
    await setting.store.get(HEAD, 1 << 20)
    newest = setting.head(3, 57)
    await setting.put(HEAD, newest, in_mirrors=false_head(setting))
    assert [await setting.store.get(HEAD, 1 << 20) for _ in range(2)] == [newest, newest]
    refusals = setting.log.named("mirror-refused")
    assert {report["mirror"] for report in refusals} == set(URLS)
    assert all(words in report["error"] for report in refusals)


@simulated
async def test_after_a_start_an_honest_mirror_that_lags_does_not_hide_the_newest_head() -> None:
    setting = Setting()
    newest = setting.head(4, 58)
    await setting.put(HEAD, newest, in_mirrors=setting.head(3, 55))
    assert [await setting.store.get(HEAD, 1 << 20) for _ in range(3)] == [newest] * 3


@simulated
async def test_a_trainer_without_a_head_gets_no_mirror_refused() -> None:
    setting = Setting()
    with pytest.raises(NotFoundError):
        await setting.store.get(HEAD, 1 << 20)
    setting.origin.silent_prefixes = ("",)
    with pytest.raises(StoreError, match="refused"):
        await setting.store.get(HEAD, 1 << 20)
    assert setting.log.events == []


@simulated
async def test_a_head_comes_from_a_mirror_while_the_origin_is_down_and_after_it_has_shown_one() -> None:
    setting = Setting()
    data = setting.head(3, 55)
    await setting.put(HEAD, data)
    setting.origin.silent_prefixes = ("",)
    assert await setting.store.get(HEAD, 1 << 20) == data
    setting.origin.silent_prefixes = ()
    assert [await setting.store.get(HEAD, 1 << 20) for _ in range(3)] == [data] * 3
    assert (setting.origin.reads, setting.reads) == (2, 3)


RECORD = manifest(3, bytes(32))
FORGED = Envelope(
    body=RECORD.to_bytes(), of=RECORD.kind, signatures=(Signature(key=TRAINER.public, value=bytes(64)),)
).to_bytes()


@pytest.mark.parametrize(
    "false_manifest", [sign(manifest(4, bytes(32)), TRAINER), FORGED], ids=["another", "without a valid signature"]
)
@simulated
async def test_a_false_manifest_is_not_believed(false_manifest: bytes) -> None:
    setting, data = Setting(), sign(RECORD, TRAINER)
    path = paths.manifest(TRAINER.public, 3, content_digest(RECORD.to_bytes()))
    await setting.put(path, data, in_mirrors=false_manifest)
    assert await setting.store.get(path, 1 << 20) == data
    assert {report["mirror"] for report in setting.log.named("mirror-refused")} == set(URLS)
    await setting.put(path, data)
    await trio.sleep(31)
    assert await setting.store.get(path, 1 << 20) == data
    assert setting.origin.reads == 1


@pytest.mark.parametrize("fast", [URLS[1], ""], ids=["a mirror", "the origin"])
@simulated
async def test_the_fastest_place_serves_most_reads(fast: str) -> None:
    setting = Setting(SlowStore(0.1), mirrors={url: SlowStore(0.1 if url == fast else 2.0) for url in URLS})
    await setting.put(PATCH, DATA)
    for _ in range(50):
        await setting.store.get(PATCH, len(DATA))
    assert (setting.mirrors[fast] if fast else setting.origin).reads >= 44
    assert setting.mirrors[URLS[0]].reads <= 6
    assert setting.log.events == []
