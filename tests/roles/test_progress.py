"""Followers far behind, on links that break: what they fetch, what they keep, what they say meanwhile."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import trio

from grailnode.store.decorators.caching import CachedStore
from grailnode.store.decorators.disk_cache import DiskCache
from grailnode.store.memory import MemoryStore
from protocol import paths
from roles.ports import ObjectInfo, StoreError
from tests.roles.test_follower import Site, equal, simulated
from tests.support.builders.chains import TRAINER


class Link:
    """A store over a link: it counts what it gave of each path, takes its time, and may be cut."""

    def __init__(self, inner: MemoryStore, seconds: float = 0.0) -> None:
        self.inner = inner
        self.seconds = seconds
        self.given: dict[str, int] = {}
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
            self.given[path] = self.given.get(path, 0) + len(data)
            await trio.sleep(self.seconds)
        return data

    @property
    def objects(self) -> int:
        return len(self.given)


def run(scenario, folder: Path) -> None:
    simulated(lambda: scenario(folder))()


async def cold_start(folder: Path) -> None:
    site = Site()
    await site.publish(7)
    link = Link(site.store)
    follower = await site.follower(CachedStore(link, DiskCache(folder, 1 << 24), piece_bytes=64, inline=True))
    await follower.refresh()
    assert equal((await follower.rebuild(7)).weights, site.chain.weights[7])
    assert site.log.named("caught-up")
    before = dict(link.given)
    again = await site.follower(CachedStore(link, DiskCache(folder, 1 << 24), piece_bytes=64, inline=True))
    await again.refresh()
    assert equal((await again.rebuild(7)).weights, site.chain.weights[7])
    assert link.given == before  # another node of this machine, or the same one after a restart, fetches nothing


async def a_late_join_starts_from_the_newest_anchor(folder: Path) -> None:
    site = Site()
    await site.publish(20)
    await site.publish(1, anchor=True)
    await site.publish(3)
    link = Link(site.store)
    follower = await site.follower(link)
    await follower.refresh()
    assert equal((await follower.rebuild(24)).weights, site.chain.weights[24])
    assert sum("/patches/" in path for path in link.given) == 3
    assert sum("/anchors/" in path for path in link.given) == 1


async def a_hundred_versions_away(folder: Path) -> None:
    site = Site()
    await site.publish(1)
    link = Link(site.store, seconds=1.0)
    follower = await site.follower(link)
    await follower.refresh()
    await follower.rebuild(1)
    await site.publish(100)
    await follower.refresh()
    assert equal((await follower.rebuild(101)).weights, site.chain.weights[101])
    assert sum("/patches/" in path for path in link.given) == 101
    told = site.log.named("catching-up")
    assert told
    assert [event["step"] for event in told] == sorted(event["step"] for event in told)
    assert all(event["bytes_per_second"] > 0 and event["seconds_left"] >= 0 for event in told)
    assert len(told) <= 100  # a line every other second, not one for every patch


async def a_cut_in_mid_download_is_gone_on_from(folder: Path) -> None:
    site = Site()
    await site.publish(1)
    link = Link(site.store)
    store = CachedStore(link, DiskCache(folder, 1 << 24), piece_bytes=64, inline=True)
    follower = await site.follower(store)
    await follower.refresh()
    await follower.rebuild(1)
    await site.publish(60)
    link.cut_after = 40
    for _ in range(2):
        with pytest.raises(StoreError, match="reset"):
            await follower.refresh()
            await follower.rebuild(61)
    assert follower.newest is not None
    assert 1 < follower.newest.version < 61  # what verified before the cut is kept
    assert equal(follower.newest.weights, site.chain.weights[follower.newest.version])
    link.cut_after = None
    assert equal((await follower.rebuild(61)).weights, site.chain.weights[61])
    sizes = {info.path: info.size async for info in site.store.list(paths.patches(TRAINER.public))}
    fetched = {path: size for path, size in link.given.items() if "/patches/" in path}
    assert fetched == sizes  # every byte once


@pytest.mark.parametrize(
    "scenario",
    [
        cold_start,
        a_late_join_starts_from_the_newest_anchor,
        a_hundred_versions_away,
        a_cut_in_mid_download_is_gone_on_from,
    ],
    ids=lambda scenario: scenario.__name__,
)
def test_follower(scenario, tmp_path: Path):
    run(scenario, tmp_path / "cache")
