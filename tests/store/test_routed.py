"""RoutedStore and SpaceDirectory: where each path is read, and what a meeting point that lies can do."""

import pytest
import trio

from grailnode.store.checks import PermanentError
from grailnode.store.decorators.routed import STATE_PREFIX, KnownStores, RoutedStore, SpaceDirectory
from grailnode.store.memory import MemoryStore
from protocol import paths
from protocol.identity.signing import SigningKey, sign
from roles.ports import NotFoundError, ObjectStore, StoreError
from tests.support.builders import samples
from tests.support.faults.decorated_store import HangingStore, UnreachableStore
from tests.support.simulation.virtual_clock import simulated

RUN = b"r" * 32
ME, TRAINER, MINER, OTHER = (SigningKey(letter * 32) for letter in (b"m", b"t", b"n", b"o"))
BEACON = "ab" * 32
HOUR = 3600.0


class ManualClock:
    """A clock that tests set."""

    moment = 1_000_000.0

    def now(self) -> float:
        return self.moment

    async def sleep_until(self, moment: float) -> None:
        raise AssertionError


UNREACHABLE = UnreachableStore(MemoryStore(), "", operations=("get", "list"), seconds=0.0)


class World:
    """A meeting point, spaces by URL, and the routed store of one node."""

    def __init__(self, peers: dict[bytes, ObjectStore] | None = None) -> None:
        self.clock = ManualClock()
        self.own, self.meeting, self.state = MemoryStore(), MemoryStore(), MemoryStore()
        self.spaces: dict[str, ObjectStore] = {}
        self.opened_spaces: list[tuple[str, bytes]] = []
        self.peers = peers or {}
        self.named = {TRAINER.public}
        self.store = self.restart()

    def restart(self, meeting: ObjectStore | None = None, capacity: int = 4) -> RoutedStore:
        meeting = meeting or self.meeting
        places = KnownStores(ME.public, self.own, meeting, BEACON, self.peers)
        directory = SpaceDirectory(meeting, self.state, self.clock, RUN, lambda: self.named, capacity)
        self.store = RoutedStore(places, directory, self.clock, self._open)
        return self.store

    def _open(self, url: str, owner: bytes) -> ObjectStore:
        self.opened_spaces.append((url, owner))
        return self.spaces[url]

    def announcement(self, key: SigningKey, space: str, seconds: float = HOUR, run: bytes = RUN) -> bytes:
        expires = int((self.clock.moment + seconds) * 1000)
        return sign(samples.announcement(run=run, key=key.public, space=space, expires_ms=expires), key)

    async def announce(self, key: SigningKey, space: str, seconds: float = HOUR) -> bytes:
        data = self.announcement(key, space, seconds)
        await self.meeting.put(paths.participant(key.public), data)
        return data

    async def space(self, url: str, key: SigningKey, data: bytes) -> None:
        store = MemoryStore()
        await store.put(paths.head(key.public), data)
        self.spaces[url] = store

    async def list_participants(self) -> list[str]:
        return [info.path async for info in self.store.list(paths.participants())]


@pytest.fixture
def world() -> World:
    return World()


async def test_every_path_is_read_from_its_writers_store(world: World):
    await world.announce(TRAINER, "https://t.example.org")
    await world.space("https://t.example.org", TRAINER, b"trainer's")
    await world.meeting.put(paths.head(OTHER.public), b"shared")
    await world.meeting.put(f"{BEACON}/public/7", b"round")
    await world.meeting.put(paths.run(RUN), b"rules")
    await world.own.put(paths.head(ME.public), b"mine")
    assert await world.store.get(paths.head(TRAINER.public), 100) == b"trainer's"
    assert await world.store.get(paths.head(OTHER.public), 100) == b"shared"  # it has no announcement
    assert await world.store.get(paths.head(ME.public), 100) == b"mine"
    assert await world.store.get(f"{BEACON}/public/7", 100) == b"round"
    assert await world.store.get(paths.run(RUN), 100) == b"rules"
    assert world.opened_spaces == [("https://t.example.org", TRAINER.public)]


async def test_a_node_writes_only_its_own_paths(world: World):
    await world.store.put(paths.commitment(ME.public, 3), b"mine")
    await world.store.put(paths.participant(ME.public), b"me")
    await world.store.put(f"{BEACON}/public/1", b"round")
    assert [info.path async for info in world.own.list("")] == [paths.commitment(ME.public, 3)]
    assert [info.path async for info in world.meeting.list("")] == [f"{BEACON}/public/1", paths.participant(ME.public)]
    for path in (paths.head(TRAINER.public), paths.participant(OTHER.public), "elsewhere/x"):
        with pytest.raises(PermanentError, match="belongs to another participant"):
            await world.store.put(path, b"x")
        with pytest.raises(PermanentError, match="belongs to another participant"):
            await world.store.delete(path)


async def test_a_configured_peer_takes_precedence_over_its_announcement():
    configured = MemoryStore()
    await configured.put(paths.head(TRAINER.public), b"configured")
    world = World({TRAINER.public: configured})
    await world.announce(TRAINER, "https://t.example.org")
    assert await world.store.get(paths.head(TRAINER.public), 100) == b"configured"
    assert world.opened_spaces == []


async def test_a_moved_space_is_followed(world: World):
    await world.announce(MINER, "https://a.example.org")
    await world.space("https://a.example.org", MINER, b"old")
    await world.space("https://b.example.org", MINER, b"new")
    assert await world.store.get(paths.head(MINER.public), 100) == b"old"
    world.clock.moment += 10
    await world.announce(MINER, "https://b.example.org")
    assert await world.store.get(paths.head(MINER.public), 100) == b"old"  # its lookup is still valid
    assert await world.store.get(paths.participant(MINER.public), 4096)  # a role reads the announcements
    assert await world.store.get(paths.head(MINER.public), 100) == b"new"


async def test_an_old_announcement_does_not_replace_a_newer_one(world: World):
    old = world.announcement(MINER, "https://a.example.org", HOUR)
    await world.announce(MINER, "https://b.example.org", 2 * HOUR)
    await world.space("https://a.example.org", MINER, b"old")
    await world.space("https://b.example.org", MINER, b"new")
    assert await world.store.get(paths.head(MINER.public), 100) == b"new"
    await world.meeting.put(paths.participant(MINER.public), old)
    world.clock.moment += 600
    world.restart()
    assert await world.store.get(paths.head(MINER.public), 100) == b"new"
    assert b"b.example.org" in await world.store.get(paths.participant(MINER.public), 4096)


@pytest.mark.parametrize("meeting", [MemoryStore(), UNREACHABLE], ids=["forgets", "is down"])
async def test_an_announcement_is_remembered_until_it_expires(world: World, meeting):
    await world.announce(MINER, "https://a.example.org", HOUR)
    await world.space("https://a.example.org", MINER, b"there")
    assert await world.list_participants() == [paths.participant(MINER.public)]
    data = await world.store.get(paths.participant(MINER.public), 4096)
    world.restart(meeting)
    assert await world.list_participants() == [paths.participant(MINER.public)]
    assert await world.store.get(paths.participant(MINER.public), 4096) == data
    assert await world.store.get(paths.head(MINER.public), 100) == b"there"
    world.clock.moment += HOUR
    with pytest.raises(StoreError):
        await world.store.get(paths.head(MINER.public), 100)
    with pytest.raises(StoreError):
        await world.store.get(paths.participant(MINER.public), 100)


@simulated
async def test_a_meeting_point_that_hangs_hides_a_remembered_space_for_seconds_only(world: World):
    await world.announce(MINER, "https://a.example.org")
    await world.space("https://a.example.org", MINER, b"there")
    await world.store.get(paths.participant(MINER.public), 4096)
    meeting = HangingStore()
    meeting.hangs = lambda path: True
    world.restart(meeting)
    with trio.fail_after(6.0):
        assert await world.store.get(paths.head(MINER.public), 100) == b"there"


async def test_a_nodes_own_announcement_is_as_the_meeting_point_shows_it(world: World):
    path = paths.participant(ME.public)
    for space, seconds in (("https://me.example.org", 2 * HOUR), ("https://twin.example.org", HOUR)):
        data = await world.announce(ME, space, seconds)
        assert await world.store.get(path, 4096) == data
    await world.meeting.delete(path)
    with pytest.raises(NotFoundError):
        await world.store.get(path, 4096)
    with pytest.raises(StoreError, match="refused"):  # and not an older announcement, as if another node had put it
        await world.restart(UNREACHABLE).get(path, 4096)


async def test_invalid_announcements_are_not_remembered(world: World):
    path = paths.participant(MINER.public)
    for data in (
        b"",
        b"rubbish",
        world.announcement(OTHER, "https://o.example.org"),
        world.announcement(MINER, "https://a.example.org", run=b"x" * 32),
        world.announcement(MINER, "https://a.example.org", -1.0),
        b"x" * 10_000,
    ):
        await world.meeting.put(path, data)
        answer = await world.store.get(path, 1 << 20)
        assert answer in {data, b""}
        assert [info.path async for info in world.state.list(STATE_PREFIX)] == []
    with pytest.raises(NotFoundError):
        await world.store.get("participants/nobody", 100)


async def test_a_full_directory_keeps_the_first_announcements_and_those_of_authority_keys(world: World):
    crowd = [SigningKey(bytes([65 + number]) * 32) for number in range(9)]
    for key in crowd:
        await world.announce(key, "https://crowd.example.org", HOUR)
        await world.store.get(paths.participant(key.public), 4096)
    await world.announce(TRAINER, "https://t.example.org")
    await world.store.get(paths.participant(TRAINER.public), 4096)
    remembered_keys = {paths.key_at_end(info.path) async for info in world.state.list(STATE_PREFIX)}
    assert remembered_keys == {TRAINER.public, *(key.public for key in crowd[:4])}
    world.named.add(OTHER.public)  # by a revision after the start
    await world.announce(OTHER, "https://o.example.org")
    await world.store.get(paths.participant(OTHER.public), 4096)
    assert [info.path async for info in world.state.list(STATE_PREFIX + OTHER.public.hex())]
    world.clock.moment += HOUR
    late = SigningKey(b"z" * 32)
    await world.announce(late, "https://z.example.org")
    await world.store.get(paths.participant(late.public), 4096)
    remembered_keys = {paths.key_at_end(info.path) async for info in world.state.list(STATE_PREFIX)}
    assert late.public in remembered_keys
    assert not remembered_keys & {key.public for key in crowd}


async def test_a_full_directory_does_not_hide_the_space_of_a_new_key(world: World):
    """Announcements that never expire cost their makers nothing, and must not keep newcomers out for ever."""
    for number in range(9):
        crowd_key = SigningKey(bytes([65 + number]) * 32)
        await world.announce(crowd_key, "https://crowd.example.org", 1e6 * HOUR)
        await world.store.get(paths.participant(crowd_key.public), 4096)
    await world.announce(MINER, "https://a.example.org")
    await world.space("https://a.example.org", MINER, b"there")
    for _ in range(2):  # the second time without a look at the meeting point
        assert await world.store.get(paths.head(MINER.public), 100) == b"there"
    world.clock.moment += HOUR
    with pytest.raises(NotFoundError):
        await world.store.get(paths.head(MINER.public), 100)


async def test_a_damaged_announcement_in_the_state_is_replaced(world: World):
    await world.state.put(STATE_PREFIX + MINER.public.hex(), b"rubbish")
    await world.announce(MINER, "https://a.example.org")
    assert await world.list_participants() == [paths.participant(MINER.public)]
    assert await world.store.get(paths.participant(MINER.public), 4096)
    assert await world.restart().get(paths.participant(MINER.public), 4096)


async def test_a_prefix_without_a_writer_cannot_be_listed(world: World):
    with pytest.raises(PermanentError, match="cannot be listed as one"):
        [info async for info in world.store.list("")]
