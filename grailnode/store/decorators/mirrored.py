"""Reads trainers' public objects from mirrors, and from their origin what no mirror shows as it should.

A mirror is a read-only copy of the trainers' spaces, which the authority names by its URL and anybody may serve
(docs/spec/spaces.md). It is believed no more than the origin. An object is checked here first, so that a mirror that
lies, lags or hangs costs one request: it is left alone for a while, and the next one is asked, then the origin.

The mirror that was fastest so far is asked first, for small objects by its delay, for large ones by its rate; now and
then another is tried (epsilon-greedy). The origin is measured, too, and asked before a mirror that is much slower. It
is asked for the first head of a trainer, with which those of mirrors are compared, and seldom for later ones, so that
many followers do not load it. A mirror may hide a trainer's copy of a revision: each look asks a mirror by chance,
however fast it is, and the first look and one in ten minutes the origin. The meeting point and the validators' copies
are read from their origins, as are ranges and objects of other writers. An anchor that a mirror lacks is one that
it still computes.
"""

import random
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

import trio

from protocol import paths
from protocol.chain.manifest import Head, Manifest
from protocol.chain.verifier import is_taken_back
from protocol.encoding import content_digest
from protocol.errors import ForkError, ProtocolError
from protocol.identity.authority import Revisions
from protocol.identity.signing import open_signed
from roles.node.retries import Pause
from roles.ports import Clock, NotFoundError, ObjectStore, StoreError, Telemetry

_MIRRORED: Final = ("files", "patches", "anchors")  # of the kinds whose paths name their digest
_ORIGIN: Final = ""  # stands for the origin among the mirrors' URLs
_LARGE_BYTES: Final = 1 << 16
_SMALL_SECONDS: Final = 3.0  # that a mirror may take for a small object; the store's own limits bound the others
_MOST_TRIES: Final = 2  # mirrors, before the origin
_EXPLORED: Final = 0.05  # share of the reads that try the mirrors in a random order
_AT_ORIGIN: Final = 0.001  # share of the reads that ask the origin first: a follower looks 40 times in a window
_REVISION_SECONDS: Final = 600.0  # between two looks for a revision at the origin
_SPARED: Final = 2.0  # times its cost, which the origin counts as, so that mirrors take its load
_KEPT: Final = 0.7  # of the measured cost, at each new measurement
_FRESH: Final = 0.5  # of a head's life; a trainer renews it after a third
_BAN: Final = Pause(first=30.0, longest=3600.0)


@dataclass(eq=False)
class MirroredStore:
    """Decorates the store of a node that follows a run."""

    origin: ObjectStore
    revisions: Revisions  # the authority, with the mirrors' URLs and the trainers, read at each use
    key: bytes  # this node's, whose objects are its own store's
    head_ttl: float
    clock: Clock
    open_mirror: Callable[[str], ObjectStore]
    telemetry: Telemetry
    rng: random.Random
    run_sync: Callable[..., Awaitable[Any]] = trio.to_thread.run_sync  # for what computes for long
    _stores: dict[str, ObjectStore] = field(default_factory=dict, init=False)
    # by URL, and whether of large objects: seconds a byte
    _costs: dict[tuple[str, bool], float] = field(default_factory=dict, init=False)
    # by URL: trio's time of the end, and the length
    _bans: dict[str, tuple[float, float]] = field(default_factory=dict, init=False)
    # by path: epoch, version and expiry of the newest head seen, of trainers whose origin has shown one
    _heads: dict[str, tuple[int, int, int]] = field(default_factory=dict, init=False)
    # by path: trio's time of the last look at the origin
    _revision_looks: dict[str, float] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.put, self.delete, self.list = self.origin.put, self.origin.delete, self.origin.list

    async def get(self, path: str, max_bytes: int, *, offset: int = 0, size: int | None = None) -> bytes:
        kind = self._mirrored_kind(path) if not offset and size is None else ""
        if not kind:
            return await self.origin.get(path, max_bytes, offset=offset, size=size)
        is_large = kind in _MIRRORED and max_bytes > _LARGE_BYTES
        failure: Exception = StoreError(f"{path}: nobody was asked")
        for url in self._order(kind, is_large, origin_first=self._is_for_origin(kind, path)):
            try:
                return await self._read(url, path, kind, max_bytes, is_large)
            except (StoreError, ProtocolError) as error:
                is_missing = isinstance(error, NotFoundError)
                if url == _ORIGIN or (is_missing and kind == "revisions"):
                    failure = error
                    if is_missing:
                        break
                elif not (is_missing and kind in ("head", "anchors")):  # a trainer that stands by has no head
                    pause = _BAN.after(self._bans.get(url, (0.0, 0.0))[1])
                    self._bans[url] = trio.current_time() + pause, pause
                    self.telemetry.event("mirror-refused", mirror=url, path=path, error=str(error), seconds=pause)
        raise failure

    def _mirrored_kind(self, path: str) -> str:
        """Return the kind of an object of a trainer that mirrors have; empty for any other object."""
        authority = self.revisions.current
        writer, _, rest = path.partition("/")
        kind = rest.partition("/")[0]
        if not authority.mirrors or writer == self.key.hex() or writer not in {key.hex() for key in authority.trainers}:
            return ""
        is_content = kind in _MIRRORED and paths.content_digest_in(path) is not None
        return kind if is_content or kind in ("manifests", "head", "revisions") else ""

    def _is_for_origin(self, kind: str, path: str) -> bool:
        """Return whether the origin is asked first, and note the look for a revision."""
        if kind == "head" and path not in self._heads:
            return True
        now = trio.current_time()
        if kind == "revisions" and now >= self._revision_looks.get(path, -_REVISION_SECONDS) + _REVISION_SECONDS:
            self._revision_looks[path] = now
            return True
        return self.rng.random() < _AT_ORIGIN

    def _order(self, kind: str, is_large: bool, origin_first: bool) -> list[str]:
        """Return whom to ask: some mirrors and the origin, the fastest first; what was not measured yet precedes it."""

        def cost(url: str) -> float:
            return self._costs.get((url, is_large), 0.0)

        now = trio.current_time()
        urls = [url for url in self.revisions.current.mirrors if self._bans.get(url, (0.0, 0.0))[0] <= now]
        self.rng.shuffle(urls)
        is_sorted = kind != "revisions" and self.rng.random() >= _EXPLORED
        if is_sorted:
            urls.sort(key=cost)
        urls = urls[:_MOST_TRIES]
        faster = [url for url in urls if not origin_first and (cost(url) <= cost(_ORIGIN) or not is_sorted)]
        return [*faster, _ORIGIN, *urls[len(faster) :]]

    async def _read(self, url: str, path: str, kind: str, max_bytes: int, is_large: bool) -> bytes:
        """Read an object from the origin, or from a mirror and check it."""
        if url not in self._stores:
            self._stores[url] = self.origin if url == _ORIGIN else self.open_mirror(url)
        is_bounded = url != _ORIGIN and not is_large
        start, data, size = trio.current_time(), b"", 0
        try:
            with trio.move_on_after(_SMALL_SECONDS if is_bounded else float("inf")) as scope:
                data = await self._stores[url].get(path, max_bytes)
            size = len(data)
        except NotFoundError:
            size = max_bytes if is_large else 0  # a mirror that still computes an anchor is not slow
            raise
        finally:
            cost = (trio.current_time() - start) / max(size, _LARGE_BYTES)
            cost *= _SPARED if url == _ORIGIN else 1.0
            before = self._costs.get((url, is_large), cost)
            self._costs[url, is_large] = _KEPT * before + (1 - _KEPT) * cost
        if scope.cancelled_caught:
            raise StoreError(f"no answer within {_SMALL_SECONDS:g} s")
        if url != _ORIGIN:
            await self._check(path, kind, data)
            self._bans.pop(url, None)
        elif kind == "head":
            self._note_head(path, data)
        return data

    async def _check(self, path: str, kind: str, data: bytes) -> None:
        """Refuse what a mirror shows unless it is the object, as its reader checks it."""
        if kind == "manifests":
            signed = await self._computed(data, open_signed, data, Manifest, self.revisions.current.trainers)
            if signed.digest.hex() != path[-64:]:
                raise StoreError("another manifest")
        elif kind == "head":
            self._check_head(path, data)
        elif kind == "revisions":
            with suppress(ForkError):  # its reader raises the alarm
                self.revisions.check(int(path.rpartition("/")[2]), data)
        elif await self._computed(data, content_digest, data) != paths.content_digest_in(path):
            raise StoreError("other bytes than those of the digest")

    async def _computed(self, data: bytes, function: Callable[..., Any], *args: object) -> Any:
        """Return what a function of some bytes returns, which runs on another thread if they are many."""
        return function(*args) if len(data) < _LARGE_BYTES else await self.run_sync(function, *args)

    def _check_head(self, path: str, data: bytes) -> None:
        """Refuse a head that the trainer would have replaced by now, or that is older than one that was seen."""
        head = open_signed(data, Head, self.revisions.current.trainers).record
        if head.run != self.revisions.run_id or is_taken_back(head, self.revisions):
            raise StoreError("a head of another run, or one that was taken back")
        if (head.epoch, head.version, head.expires_ms) < self._heads.get(path, (0, 0, 0)):
            raise StoreError("an older head than one that was seen")
        if head.expires_ms / 1000 - self.clock.now() < _FRESH * self.head_ttl:
            raise StoreError("a head that its trainer would have renewed")
        if path in self._heads:
            self._note_head(path, data)

    def _note_head(self, path: str, data: bytes) -> None:
        try:
            head = open_signed(data, Head, self.revisions.current.trainers).record
        except ProtocolError:
            return  # the reader refuses it
        self._heads[path] = max(self._heads.get(path, (0, 0, 0)), (head.epoch, head.version, head.expires_ms))
