"""Followers that are far behind and catch up: what they fetch, what stays after a cut, and the progress they report."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import trio

from grailnode.store.decorators.caching import CachedStore
from grailnode.store.decorators.disk_cache import DiskCache
from grailnode.store.memory import MemoryStore
from protocol import paths
from roles.ports import ObjectInfo, StoreError
from tests.roles.follower_testbed import FollowerTestbed
from tests.support.builders.chains import TRAINER, equal
from tests.support.simulation.virtual_clock import simulated


class Link:
    """A store over a slow link that may be cut; it counts the bytes of each object that it sent."""

    def __init__(self, inner: MemoryStore, seconds: float = 0.0) -> None:
        self.inner = inner
        self.seconds = seconds
        self.sent_bytes: dict[str, int] = {}
        self.cut_after: int | None = None
        self.log: list[tuple[str, float]] = []

    async def put(self, path: str, data: bytes) -> None:
        await self.inner.put(path, data)

    async def delete(self, path: str) -> None:
        await self.inner.delete(path)

    async def list(self, prefix: str, *, after: str = "") -> AsyncIterator[ObjectInfo]:
        async for info in self.inner.list(prefix, after=after):
            yield info

    async def get(self, path: str, max_bytes: int, *, offset: int = 0, size: int | None = None) -> bytes:
        self.log.append((path, trio.current_time()))
        large = paths.content_digest_in(path) is not None
        if large and self.cut_after is not None and self.objects >= self.cut_after:
            raise StoreError(f"{path}: connection reset")
        data = await self.inner.get(path, max_bytes, offset=offset, size=size)
        if large:
            self.sent_bytes[path] = self.sent_bytes.get(path, 0) + len(data)
            await trio.sleep(self.seconds)
        return data

    @property
    def objects(self) -> int:
        return len(self.sent_bytes)


async def cold_start(folder: Path) -> None:
    testbed = FollowerTestbed()
    await testbed.publish(7)
    link = Link(testbed.store)
    follower = await testbed.follower(CachedStore(link, DiskCache(folder, 1 << 24), piece_bytes=64, inline=True))
    await follower.refresh()
    assert equal((await follower.rebuild(7)).weights, testbed.chain.weights[7])
    assert testbed.log.named("caught-up")
    before = dict(link.sent_bytes)
    again = await testbed.follower(CachedStore(link, DiskCache(folder, 1 << 24), piece_bytes=64, inline=True))
    await again.refresh()
    assert equal((await again.rebuild(7)).weights, testbed.chain.weights[7])
    assert link.sent_bytes == before  # another node of this machine, or this one after a restart, fetches nothing


async def late_join_from_the_newest_anchor(folder: Path) -> None:
    testbed = FollowerTestbed()
    await testbed.publish(20)
    await testbed.publish(1, anchor=True)
    await testbed.publish(3)
    link = Link(testbed.store)
    follower = await testbed.follower(link)
    await follower.refresh()
    assert equal((await follower.rebuild(24)).weights, testbed.chain.weights[24])
    assert sum("/patches/" in path for path in link.sent_bytes) == 3
    assert sum("/anchors/" in path for path in link.sent_bytes) == 1


async def a_hundred_versions_behind(folder: Path) -> None:
    testbed = FollowerTestbed()
    await testbed.publish(1)
    link = Link(testbed.store, seconds=1.0)
    follower = await testbed.follower(link)
    await follower.refresh()
    await follower.rebuild(1)
    await testbed.publish(100)
    await follower.refresh()
    assert equal((await follower.rebuild(101)).weights, testbed.chain.weights[101])
    assert sum("/patches/" in path for path in link.sent_bytes) == 101
    reports = testbed.log.named("catching-up")
    assert reports
    assert [event["step"] for event in reports] == sorted(event["step"] for event in reports)
    assert all(event["bytes_per_second"] > 0 and event["seconds_left"] >= 0 for event in reports)
    assert len(reports) <= 100  # one every other second, not one for every patch


async def download_continued_after_a_cut(folder: Path) -> None:
    testbed = FollowerTestbed()
    await testbed.publish(1)
    link = Link(testbed.store)
    store = CachedStore(link, DiskCache(folder, 1 << 24), piece_bytes=64, inline=True)
    follower = await testbed.follower(store)
    await follower.refresh()
    await follower.rebuild(1)
    await testbed.publish(60)
    link.cut_after = 40
    for _ in range(2):
        with pytest.raises(StoreError, match="reset"):
            await follower.refresh()
            await follower.rebuild(61)
    assert follower.newest is not None
    assert 1 < follower.newest.version < 61  # the version that was verified before the cut
    assert equal(follower.newest.weights, testbed.chain.weights[follower.newest.version])
    link.cut_after = None
    assert equal((await follower.rebuild(61)).weights, testbed.chain.weights[61])
    sizes = {info.path: info.size async for info in testbed.store.list(paths.patches(TRAINER.public))}
    patch_bytes = {path: size for path, size in link.sent_bytes.items() if "/patches/" in path}
    assert patch_bytes == sizes  # every byte once


@pytest.mark.parametrize(
    "scenario",
    [
        cold_start,
        late_join_from_the_newest_anchor,
        a_hundred_versions_behind,
        download_continued_after_a_cut,
    ],
    ids=lambda scenario: scenario.__name__,
)
def test_catching_up(scenario, tmp_path: Path):
    simulated(lambda: scenario(tmp_path / "cache"))()
