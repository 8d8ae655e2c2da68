"""CachedStore: downloads that are interrupted, resumed, shared or damaged, and what is cached."""

import multiprocessing
import os
import random
import resource
from collections.abc import Callable
from pathlib import Path

import pytest
import trio

from grailnode.store.decorators.caching import CachedStore, DiskCache
from grailnode.store.memory import MemoryStore
from protocol import paths
from protocol.encoding import content_digest
from roles.ports import NotFoundError, StoreError, TooLargeError
from tests.support.faults.decorated_store import Link

PIECE = 1000
KEY = b"k" * 32


def blob(size: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(size)


def path_of(data: bytes) -> str:
    return paths.patch(KEY, content_digest(data))


async def add(source: Link, size: int, seed: int = 0) -> bytes:
    """Put random bytes to the path of their digest, and return them."""
    data = blob(size, seed)
    await source.put(path_of(data), data)
    return data


@pytest.fixture
def source() -> Link:
    return Link(MemoryStore())


@pytest.fixture
def cache(tmp_path: Path) -> DiskCache:
    return DiskCache(tmp_path / "cache", 1 << 20)


@pytest.fixture
def store(source: Link, cache: DiskCache) -> CachedStore:
    return CachedStore(source, cache, piece_bytes=PIECE)


def files(cache_root: Path) -> list[str]:
    return sorted(str(path.relative_to(cache_root)) for path in cache_root.rglob("*") if path.is_file())


@pytest.mark.parametrize("size", [0, 1, PIECE - 1, PIECE, PIECE + 1, 10 * PIECE, 10 * PIECE + 7])
async def test_an_object_is_fetched_once(store: CachedStore, source: Link, tmp_path: Path, size: int):
    data = await add(source, size)
    for _ in range(3):
        assert await store.get(path_of(data), size) == data
    assert source.sent_bytes.total() == size
    assert [name for name in files(tmp_path / "cache") if name != ".lock"] == [f"objects/{content_digest(data).hex()}"]
    assert await store.get(path_of(data), size, offset=3, size=5) == data[3:8]
    if size:
        with pytest.raises(TooLargeError):
            await store.get(path_of(data), size - 1)
    assert source.sent_bytes.total() == size


async def test_an_interrupted_download_is_resumed(source: Link, cache: DiskCache):
    data = await add(source, 20 * PIECE + 1)
    reports: list[tuple[str, int, int]] = []
    for cut in (5 * PIECE, 11 * PIECE):
        source.cut_after = cut
        store = CachedStore(source, cache, lambda *report: reports.append(report), piece_bytes=PIECE)
        with pytest.raises(StoreError, match="reset"):
            await store.get(path_of(data), len(data))
    source.cut_after = None
    assert await CachedStore(source, cache, piece_bytes=PIECE).get(path_of(data), len(data)) == data
    assert source.sent_bytes.total() == len(data)  # no byte was fetched twice
    arrived_bytes = [byte_count for _, byte_count, _ in reports]
    assert arrived_bytes == sorted(arrived_bytes)
    assert {total for *_, total in reports} == {len(data)}


async def _download(root: Path, dies_after: int | None = None) -> int:
    """Download an object, and return how many bytes were sent; or end the process abruptly after some bytes."""
    source = Link(MemoryStore())
    data = await add(source, 20 * PIECE)

    def progress(path: str, arrived_bytes: int, total_bytes: int) -> None:
        if dies_after is not None and arrived_bytes >= dies_after:
            os._exit(9)

    store = CachedStore(source, DiskCache(root, 1 << 20), progress, piece_bytes=PIECE)
    assert await store.get(path_of(data), len(data)) == data
    return source.sent_bytes.total()


def test_a_killed_process_leaves_its_pieces_to_the_next(tmp_path: Path):
    fork = multiprocessing.get_context("fork")
    process = fork.Process(target=trio.run, args=(_download, tmp_path / "cache", 8 * PIECE))
    process.start()
    process.join(30)
    assert process.exitcode == 9
    assert trio.run(_download, tmp_path / "cache") <= 12 * PIECE


async def test_one_of_several_readers_fetches_an_object(source: Link, cache: DiskCache, tmp_path: Path):
    data = await add(source, 5 * PIECE)
    source.seconds = 0.05
    others = [CachedStore(source, DiskCache(tmp_path / "cache", 1 << 20), piece_bytes=PIECE) for _ in range(4)]

    async def fetch(store: CachedStore) -> None:
        assert await store.get(path_of(data), len(data)) == data

    async with trio.open_nursery() as nursery:
        for store in others:
            nursery.start_soon(fetch, store)
    assert source.sent_bytes.total() == len(data)


def replace_by_link(file: Path) -> None:
    """Put a link to a file with another digest in the place of a cached object."""
    file.unlink()
    file.symlink_to(file.parents[2] / "secret")


@pytest.mark.parametrize(
    "damage",
    [
        lambda file: file.write_bytes(file.read_bytes()[:-1]),
        lambda file: file.write_bytes(b""),
        lambda file: file.write_bytes(bytes([file.read_bytes()[0] ^ 1]) + file.read_bytes()[1:]),
        lambda file: file.write_bytes(file.read_bytes() + b"x"),
        replace_by_link,
    ],
    ids=["cut", "empty", "a bent bit", "longer", "a link"],
)
async def test_a_damaged_object_is_fetched_again(store: CachedStore, source: Link, tmp_path: Path, damage):
    data = await add(source, 3 * PIECE)
    await store.get(path_of(data), len(data))
    file, secret = tmp_path / "cache" / "objects" / content_digest(data).hex(), tmp_path / "secret"
    secret.write_bytes(b"secret")
    damage(file)
    assert await store.get(path_of(data), len(data)) == data
    assert source.sent_bytes.total() == 2 * len(data)
    assert file.read_bytes() == data
    assert secret.read_bytes() == b"secret"


@pytest.mark.parametrize("size", [PIECE // 2, 5 * PIECE])
@pytest.mark.parametrize("falsify", [lambda data: b"\0" + data[1:], lambda data: data[: len(data) * 3 // 5]])
async def test_bytes_with_another_digest_are_returned_and_not_cached(
    store: CachedStore, source: Link, tmp_path: Path, size: int, falsify: Callable[[bytes], bytes]
):
    data = blob(size)
    await source.put(path_of(data), falsify(data))
    assert await store.get(path_of(data), size) == falsify(data)
    names = files(tmp_path / "cache")
    assert not [name for name in names if name.startswith("objects")]
    assert len(falsify(data)) < size or names in ([], [".lock"])
    await source.put(path_of(data), data)
    assert await store.get(path_of(data), size) == data


async def test_false_pieces_do_not_spoil_a_later_download(store: CachedStore, source: Link):
    """Storage serves false pieces before an interruption, and true ones afterwards."""
    data = blob(10 * PIECE)
    await source.put(path_of(data), blob(10 * PIECE, seed=1))
    source.cut_after = 3 * PIECE
    with pytest.raises(StoreError):
        await store.get(path_of(data), len(data))
    source.cut_after = None
    await source.put(path_of(data), data)
    assert await store.get(path_of(data), len(data)) == data


async def test_a_download_whose_pieces_were_evicted_starts_again(source: Link, tmp_path: Path):
    data, other = await add(source, 10 * PIECE), await add(source, PIECE // 2, seed=1)
    source.cut_after = 5 * PIECE
    large, small = DiskCache(tmp_path / "cache", 1 << 20), DiskCache(tmp_path / "cache", 2 * PIECE)
    with pytest.raises(StoreError):
        await CachedStore(source, large, piece_bytes=PIECE).get(path_of(data), len(data))
    source.cut_after = None
    await CachedStore(source, small, piece_bytes=PIECE).get(path_of(other), len(other))  # another node evicts it
    assert not [name for name in files(tmp_path / "cache") if name.startswith("partial")]
    assert await CachedStore(source, large, piece_bytes=PIECE).get(path_of(data), len(data)) == data


async def test_a_missing_object_leaves_no_files(store: CachedStore, tmp_path: Path):
    for seed in range(20):
        with pytest.raises(NotFoundError):
            await store.get(path_of(blob(10, seed=seed)), 5 * PIECE)
    assert not [name for name in files(tmp_path / "cache") if name.startswith("partial")]


async def test_the_cache_keeps_its_limit_and_the_most_recently_used_objects(source: Link, tmp_path: Path):
    root = tmp_path / "cache"
    limit = 64 * PIECE
    store = CachedStore(source, DiskCache(root, limit), piece_bytes=PIECE)
    objects = [await add(source, 8 * PIECE, seed) for seed in range(20)]
    for number, data in enumerate(objects):
        await store.get(path_of(data), len(data))
        os.utime(root / "objects" / content_digest(data).hex(), (number, number))
        if number >= 1:
            await store.get(path_of(objects[0]), len(data))  # used repeatedly
            os.utime(root / "objects" / content_digest(objects[0]).hex(), (100 + number, 100 + number))
        assert sum(path.stat().st_size for path in root.rglob("*") if path.is_file()) <= limit
    before = source.sent_bytes.total()
    await store.get(path_of(objects[0]), 8 * PIECE)
    await store.get(path_of(objects[-1]), 8 * PIECE)
    assert source.sent_bytes.total() == before
    await store.get(path_of(objects[1]), 8 * PIECE)
    assert source.sent_bytes.total() == before + 8 * PIECE


async def test_an_object_too_large_for_the_cache_is_not_cached(source: Link, tmp_path: Path):
    data = await add(source, 10 * PIECE)
    store = CachedStore(source, DiskCache(tmp_path / "cache", 15 * PIECE), piece_bytes=PIECE)
    assert await store.get(path_of(data), len(data)) == data
    assert files(tmp_path / "cache") == []


async def test_mutable_objects_are_not_cached(store: CachedStore, source: Link, tmp_path: Path):
    for path in (paths.head(KEY), paths.manifest(KEY, 1, KEY), paths.participant(KEY), paths.commitment(KEY, 1)):
        await source.put(path, b"one")
        assert await store.get(path, 10) == b"one"
        await source.put(path, b"two")
        assert await store.get(path, 10) == b"two"
    assert files(tmp_path / "cache") == []


async def test_objects_are_fetched_when_the_disk_of_the_cache_fails(store: CachedStore, source: Link, monkeypatch):
    data = await add(source, 5 * PIECE)

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    assert await store.get(path_of(data), len(data)) == data
    monkeypatch.undo()
    monkeypatch.setattr(os, "open", full)
    assert await store.get(path_of(data), len(data)) == data


async def test_a_disk_that_takes_a_part_of_a_piece_changes_no_byte_of_the_object(store: CachedStore, source: Link):
    """Such bytes would look as if the storage had lied, and an honest site would be refused for them."""
    data, before = await add(source, 3 * PIECE), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5 * PIECE // 2, before[1]))
    try:
        assert await store.get(path_of(data), 3 * PIECE) == data
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
