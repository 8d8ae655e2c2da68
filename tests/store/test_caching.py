"""Downloads that are cut, resumed, shared and damaged: what is fetched, what is kept, what is believed."""

import multiprocessing
import os
import random
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import trio

from grailnode.store.decorators.caching import CachedStore
from grailnode.store.decorators.disk_cache import DiskCache
from grailnode.store.memory import MemoryStore
from protocol import paths
from protocol.digest import content_digest
from roles.ports import NotFoundError, ObjectInfo, StoreError, TooLargeError

PIECE = 1000
KEY = b"k" * 32


def blob(size: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(size)


def path_of(data: bytes) -> str:
    return paths.patch(KEY, content_digest(data))


class Wire:
    """A store that counts the bytes it gives, and may be cut."""

    def __init__(self) -> None:
        self.inner = MemoryStore()
        self.given = 0
        self.asked: list[tuple[str, int, int | None]] = []
        self.cut_after: int | None = None
        self.pause = 0.0

    async def put(self, path: str, data: bytes) -> None:
        await self.inner.put(path, data)

    async def delete(self, path: str) -> None:
        await self.inner.delete(path)

    async def list(self, prefix: str, *, after: str = "") -> AsyncIterator[ObjectInfo]:
        async for info in self.inner.list(prefix, after=after):
            yield info

    async def get(self, path: str, max_bytes: int, *, offset: int = 0, size: int | None = None) -> bytes:
        self.asked.append((path, offset, size))
        if self.cut_after is not None and self.given >= self.cut_after:
            raise StoreError(f"{path}: connection reset")
        data = await self.inner.get(path, max_bytes, offset=offset, size=size)
        self.given += len(data)
        await trio.sleep(self.pause)
        return data


@pytest.fixture
def wire() -> Wire:
    return Wire()


@pytest.fixture
def cache(tmp_path: Path) -> DiskCache:
    return DiskCache(tmp_path / "cache", 1 << 20)


@pytest.fixture
def store(wire: Wire, cache: DiskCache) -> CachedStore:
    return CachedStore(wire, cache, piece_bytes=PIECE)


def files(cache_root: Path) -> list[str]:
    return sorted(str(path.relative_to(cache_root)) for path in cache_root.rglob("*") if path.is_file())


@pytest.mark.trio
@pytest.mark.parametrize("size", [0, 1, PIECE - 1, PIECE, PIECE + 1, 10 * PIECE, 10 * PIECE + 7])
async def test_an_object_is_fetched_once(store: CachedStore, wire: Wire, tmp_path: Path, size: int):
    data = blob(size)
    await wire.put(path_of(data), data)
    for _ in range(3):
        assert await store.get(path_of(data), size) == data
    assert wire.given == size
    assert [name for name in files(tmp_path / "cache") if name != ".lock"] == [f"objects/{content_digest(data).hex()}"]
    assert await store.get(path_of(data), size, offset=3, size=5) == data[3:8]
    if size:
        with pytest.raises(TooLargeError):
            await store.get(path_of(data), size - 1)
    assert wire.given == size


@pytest.mark.trio
async def test_a_download_that_is_cut_goes_on_where_it_stopped(wire: Wire, cache: DiskCache):
    data = blob(20 * PIECE + 1)
    await wire.put(path_of(data), data)
    told: list[tuple[int, int]] = []
    for cut in (5 * PIECE, 11 * PIECE):
        wire.cut_after = cut
        store = CachedStore(wire, cache, lambda _, done, total: told.append((done, total)), piece_bytes=PIECE)
        with pytest.raises(StoreError, match="reset"):
            await store.get(path_of(data), len(data))
    wire.cut_after = None
    assert await CachedStore(wire, cache, piece_bytes=PIECE).get(path_of(data), len(data)) == data  # a new process
    assert wire.given == len(data)  # no byte twice
    done = [number for number, _ in told]
    assert done == sorted(done)
    assert {total for _, total in told} == {len(data)}


def _download_and_die(root: Path, data: bytes, after: int) -> None:
    """A process that is killed when it has fetched so many bytes."""
    wire = Wire()

    async def main() -> None:
        await wire.put(path_of(data), data)

        def progress(path: str, done: int, total: int) -> None:
            if done >= after:
                os._exit(9)

        await CachedStore(wire, DiskCache(root, 1 << 20), progress, piece_bytes=PIECE).get(path_of(data), len(data))

    trio.run(main)


def test_a_process_that_is_killed_leaves_its_pieces_to_the_next(wire: Wire, cache: DiskCache, tmp_path: Path):
    data = blob(20 * PIECE)
    process = multiprocessing.get_context("fork").Process(
        target=_download_and_die, args=(tmp_path / "cache", data, 8 * PIECE)
    )
    process.start()
    process.join(30)
    assert process.exitcode == 9

    async def go_on() -> None:
        await wire.put(path_of(data), data)
        assert await CachedStore(wire, cache, piece_bytes=PIECE).get(path_of(data), len(data)) == data

    trio.run(go_on)
    assert wire.given <= 12 * PIECE


@pytest.mark.trio
async def test_of_many_that_want_an_object_one_fetches_it(wire: Wire, cache: DiskCache, tmp_path: Path):
    data = blob(5 * PIECE)
    await wire.put(path_of(data), data)
    wire.pause = 0.05
    others = [CachedStore(wire, DiskCache(tmp_path / "cache", 1 << 20), piece_bytes=PIECE) for _ in range(4)]

    async def fetch(store: CachedStore) -> None:
        assert await store.get(path_of(data), len(data)) == data

    async with trio.open_nursery() as nursery:
        for store in others:
            nursery.start_soon(fetch, store)
    assert wire.given == len(data)


@pytest.mark.trio
@pytest.mark.parametrize(
    "bend", [lambda d: d[:-1], lambda d: b"", lambda d: bytes([d[0] ^ 1]) + d[1:], lambda d: d + b"x"]
)
async def test_a_damaged_object_is_fetched_again(store: CachedStore, wire: Wire, tmp_path: Path, bend):
    data = blob(3 * PIECE)
    await wire.put(path_of(data), data)
    await store.get(path_of(data), len(data))
    file = tmp_path / "cache" / "objects" / content_digest(data).hex()
    file.write_bytes(bend(data))
    assert await store.get(path_of(data), len(data)) == data
    assert wire.given == 2 * len(data)
    assert file.read_bytes() == data


@pytest.mark.trio
@pytest.mark.parametrize("size", [PIECE // 2, 5 * PIECE])
async def test_a_lie_is_handed_on_and_not_kept(store: CachedStore, wire: Wire, tmp_path: Path, size: int):
    data = blob(size)
    lie = b"\0" + data[1:]
    await wire.put(path_of(data), lie)
    assert await store.get(path_of(data), size) == lie
    assert files(tmp_path / "cache") in ([], [".lock"])
    await wire.put(path_of(data), data)
    assert await store.get(path_of(data), size) == data


@pytest.mark.trio
async def test_pieces_of_a_lie_are_forgotten_with_it(store: CachedStore, wire: Wire):
    """Storage that served false pieces before a cut: they do not make a liar of it when it tells the truth."""
    data = blob(10 * PIECE)
    await wire.put(path_of(data), blob(10 * PIECE, seed=1))
    wire.cut_after = 3 * PIECE
    with pytest.raises(StoreError):
        await store.get(path_of(data), len(data))
    wire.cut_after = None
    await wire.put(path_of(data), data)
    assert await store.get(path_of(data), len(data)) == data


@pytest.mark.trio
async def test_a_download_whose_bytes_were_evicted_begins_anew(wire: Wire, tmp_path: Path):
    data, other = blob(10 * PIECE), blob(PIECE // 2, seed=1)
    await wire.put(path_of(data), data)
    await wire.put(path_of(other), other)
    wire.cut_after = 5 * PIECE
    large, small = DiskCache(tmp_path / "cache", 1 << 20), DiskCache(tmp_path / "cache", 2 * PIECE)
    with pytest.raises(StoreError):
        await CachedStore(wire, large, piece_bytes=PIECE).get(path_of(data), len(data))
    wire.cut_after = None
    await CachedStore(wire, small, piece_bytes=PIECE).get(path_of(other), len(other))  # another node makes room
    assert not [name for name in files(tmp_path / "cache") if name.startswith("partial")]
    assert await CachedStore(wire, large, piece_bytes=PIECE).get(path_of(data), len(data)) == data


@pytest.mark.trio
async def test_what_is_not_there_leaves_nothing_behind(store: CachedStore, tmp_path: Path):
    for seed in range(20):
        with pytest.raises(NotFoundError):
            await store.get(path_of(blob(10, seed=seed)), 5 * PIECE)
    assert not [name for name in files(tmp_path / "cache") if name.startswith("partial")]


@pytest.mark.trio
async def test_an_object_that_is_shorter_or_missing(store: CachedStore, wire: Wire, tmp_path: Path):
    data = blob(5 * PIECE)
    with pytest.raises(NotFoundError):
        await store.get(path_of(data), len(data))
    await wire.put(path_of(data), data[: 3 * PIECE])
    assert await store.get(path_of(data), len(data)) == data[: 3 * PIECE]
    assert not [name for name in files(tmp_path / "cache") if name.startswith("objects")]


@pytest.mark.trio
async def test_the_limit_holds_and_what_was_used_last_stays(wire: Wire, tmp_path: Path):
    root = tmp_path / "cache"
    limit = 64 * PIECE
    store = CachedStore(wire, DiskCache(root, limit), piece_bytes=PIECE)
    objects = [blob(8 * PIECE, seed) for seed in range(20)]
    for number, data in enumerate(objects):
        await wire.put(path_of(data), data)
        await store.get(path_of(data), len(data))
        os.utime(root / "objects" / content_digest(data).hex(), (number, number))
        if number >= 1:
            await store.get(path_of(objects[0]), len(data))  # used again and again
            os.utime(root / "objects" / content_digest(objects[0]).hex(), (100 + number, 100 + number))
        assert sum(path.stat().st_size for path in root.rglob("*") if path.is_file()) <= limit
    before = wire.given
    await store.get(path_of(objects[0]), 8 * PIECE)
    await store.get(path_of(objects[-1]), 8 * PIECE)
    assert wire.given == before
    await store.get(path_of(objects[1]), 8 * PIECE)
    assert wire.given == before + 8 * PIECE


@pytest.mark.trio
async def test_what_is_too_large_for_the_cache_is_read_through(wire: Wire, tmp_path: Path):
    data = blob(10 * PIECE)
    await wire.put(path_of(data), data)
    store = CachedStore(wire, DiskCache(tmp_path / "cache", 15 * PIECE), piece_bytes=PIECE)
    assert await store.get(path_of(data), len(data)) == data
    assert files(tmp_path / "cache") == []


@pytest.mark.trio
async def test_nothing_that_may_change_is_kept(store: CachedStore, wire: Wire, tmp_path: Path):
    for path in (paths.head(KEY), paths.manifest(KEY, 1, KEY), paths.participant(KEY), paths.commitment(KEY, 1)):
        await wire.put(path, b"one")
        assert await store.get(path, 10) == b"one"
        await wire.put(path, b"two")
        assert await store.get(path, 10) == b"two"
    assert files(tmp_path / "cache") == []


@pytest.mark.trio
async def test_a_disk_that_fails_is_gone_around(wire: Wire, cache: DiskCache, tmp_path: Path, monkeypatch):
    data = blob(5 * PIECE)
    await wire.put(path_of(data), data)

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    store = CachedStore(wire, cache, piece_bytes=PIECE)
    assert await store.get(path_of(data), len(data)) == data
    monkeypatch.undo()
    monkeypatch.setattr(os, "open", full)
    assert await store.get(path_of(data), len(data)) == data


@pytest.mark.trio
async def test_reads_no_file_of_somebody_elses(cache: DiskCache, wire: Wire, tmp_path: Path):
    """A link in the cache leads nowhere that its digest does not prove."""
    data = blob(10)
    secret = tmp_path / "secret"
    secret.write_bytes(b"secret")
    (tmp_path / "cache" / "objects" / content_digest(data).hex()).symlink_to(secret)
    await wire.put(path_of(data), data)
    assert await CachedStore(wire, cache, piece_bytes=PIECE).get(path_of(data), 10) == data
    assert secret.read_bytes() == b"secret"
