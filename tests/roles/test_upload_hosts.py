"""Uploads of a trainer on several hosts: storage shows what one host would publish, whatever happens to the others."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
import trio
from trio.testing import memory_stream_pair

from grailnode import UserError
from grailnode.node.state_care import repair_state
from grailnode.node.upload_hosts import OtherHost, accept_host, answer_host_0, pack_encoded, unpack_encoded
from grailnode.store.memory import MemoryStore
from grailnode.store.state.draft import StateDraft
from grailnode.store.state.state_store import StateStore
from protocol.digest import digest_weights
from protocol.errors import PatchError
from protocol.identity.signing import SigningKey
from roles.authority_updates import refresh_authority
from roles.node.identity import Node
from roles.ports import ObjectStore, StateError, StoreError
from roles.trainer.learn.checkpoint_files import NOTES, put_checkpoint, whole_checkpoint
from roles.trainer.publish.chain_repair import ChainRepair
from roles.trainer.publish.history import History
from roles.trainer.publish.host_files import Base, HostFiles
from roles.trainer.publish.publisher import Publisher, PublisherSettings
from roles.trainer.spool import SnapshotName, note_snapshot, weights_folder
from roles.trainer.tensor_shards import WrittenWeights
from tests.roles.publisher_testbed import PublisherTestbed
from tests.support.builders.chains import small_run
from tests.support.builders.snapshots import put_snapshot
from tests.support.measuring.store_listing import copy_objects
from tests.support.simulation.network import Log
from tests.support.simulation.virtual_clock import simulate, simulated

SETTINGS = PublisherSettings(anchor_interval=2, keep_patches=3, keep_anchors=2, takeover_seconds=0.1, part_bytes=2000)
FILE_BYTES = 16_384  # of two tensors
NAMES = "abcdefgh"


class RecordingStore(MemoryStore):
    """A host's way to the storage, which others share; `refusal` tells which paths it does not take from this host."""

    def __init__(self, shared: MemoryStore) -> None:
        self._objects, self._paths = shared._objects, shared._paths
        self.paths: list[str] = []
        self.refusal: Callable[[str], bool] = lambda path: False
        self.put_seconds = 0.0

    async def put(self, path: str, data: bytes) -> None:
        if self.refusal(path):
            raise StoreError(f"{path}: forbidden")
        self.paths.append(path)
        await trio.sleep(self.put_seconds)
        await super().put(path, data)

    def kinds(self) -> set[str]:
        return {path.split("/")[1] for path in self.paths if path.count("/") > 1}


@dataclass
class Hosts:
    """Two hosts of a trainer; or one, that has all files."""

    count: int = 2
    is_away: bool = False  # the second host
    settings: PublisherSettings = SETTINGS
    testbed: PublisherTestbed = field(default_factory=PublisherTestbed)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        testbed, weights = self.testbed, {name: torch.randn(64, 64, generator=generator).bfloat16() for name in NAMES}
        testbed.weights = [weights]
        for _ in range(5):
            noise = {name: torch.rand(64, 64, generator=generator) < 0.3 for name in NAMES}
            weights = {name: torch.where(noise[name], tensor * 1.01, tensor) for name, tensor in weights.items()}
            testbed.weights.append(weights)
        testbed.run_id, testbed.run = small_run(digest_weights(testbed.weights[0]))
        self.shared = MemoryStore()
        self.stores = [RecordingStore(self.shared), RecordingStore(self.shared)]
        self.states = [testbed.state, MemoryStore()]
        self.logs = [testbed.log, Log("other")]

    async def snapshot(self, version: int, file_bytes: int = FILE_BYTES) -> None:
        """Put a version, of which the second host has the second half of the files."""
        weights, name = self.testbed.weights[version], SnapshotName(version, version)
        await put_snapshot(self.states[0], version, weights, shard_bytes=file_bytes)
        files = 4 * FILE_BYTES // file_bytes
        if self.count == 2 and version:
            parts = [{name: weights[name] for name in names} for names in (NAMES[:4], NAMES[4:])]
            await note_snapshot(self.states[0], name, WrittenWeights(files, tuple(map(digest_weights, parts))))
        for number in range(files // 2, files) if self.count == 2 and version else ():
            path = f"{weights_folder(version)}{number:05d}"
            await self.states[1].put(path, await self.states[0].get(path, 1 << 20))
            await self.states[0].delete(path)

    def other(self) -> Node:
        """Return the second host, which has no key of a trainer."""
        store: ObjectStore = self.stores[1]
        node = self.testbed.node(key=SigningKey(b"o" * 32), state=self.states[1], log=self.logs[1])
        return replace(node, store=store, shared_revisions=node.revisions)

    async def publish(self, *versions: int, seconds: float = 5.0) -> None:
        """Put snapshots of versions, and run the uploads of all hosts for some seconds."""
        for version in versions:
            await self.snapshot(version)
        self.testbed.store = self.stores[0]
        node = self.testbed.node()
        await refresh_authority(node)
        others = [OtherHost(node, 1, self.settings.profile)] if self.count == 2 else []
        with trio.move_on_after(seconds):
            async with trio.open_nursery() as nursery:
                for lane in range(2) if others and not self.is_away else ():
                    nursery.start_soon(self.connect, node, others, lane)
                await Publisher(node, await History.open(node.state), self.settings, others).run()

    async def assert_names(self, match: str) -> None:
        """Assert that the uploads end with one error of a state, which names what is wrong and what to do."""
        with pytest.raises(ExceptionGroup) as raised:
            await self.publish()
        assert raised.group_contains(StateError, match=match)

    async def connect(self, node: Node, others: list[OtherHost], lane: int) -> None:
        """Connect the second host, and again when it was killed."""
        while True:
            here, there = memory_stream_pair()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(accept_host, node, others, here)
                with trio.CancelScope() as self.process, suppress(trio.BrokenResourceError):
                    await answer_host_0(there, self.other(), 1, lane, 1)
                await trio.aclose_forcefully(there)
            await trio.sleep(0.1)


def published(count: int, prepare: Callable[[Hosts], None] = lambda hosts: None) -> Hosts:
    """Return a trainer on so many hosts that has published five versions, from one moment on."""

    async def publish() -> Hosts:
        hosts = Hosts(count)
        prepare(hosts)
        for version in range(5):
            await hosts.publish(version)
        await hosts.testbed.assert_followed(4)
        return hosts

    return simulate(publish)


def objects(hosts: Hosts) -> dict[str, bytes]:
    """Return what storage shows below the trainer's manifests, patches and anchors."""
    return {path: data for path, data in hosts.shared._objects.items() if path.count("/") == 2}


def names_of(hosts: Hosts) -> set[str]:
    """Return the paths of all patches and anchors in storage, which have the digests of their bytes."""
    return {path for path in objects(hosts) if "/manifests/" not in path}


@pytest.mark.parametrize("profile", ["compact", "fast"])
def test_two_hosts_publish_byte_for_byte_what_one_does(profile: str) -> None:
    def choose(hosts: Hosts) -> None:
        hosts.settings = replace(SETTINGS, profile=profile)

    two = published(2, choose)
    assert objects(two) == objects(published(1, choose))
    assert two.stores[1].kinds() == {"patches", "anchors"}
    for kind in ("patches", "anchors"):
        one, other = ({path for path in store.paths if f"/{kind}/" in path} for store in two.stores)
        assert one and other and not one & other
    for state, versions in zip(two.states, ({4}, {3, 4}), strict=True):  # what is not needed any more is deleted
        assert {int(path.split("/")[1]) for path in state._objects if path.startswith("weights/")} == versions


@pytest.mark.parametrize("kind", ["patches", "anchors"])
def test_a_host_that_is_killed_while_it_uploads_goes_on_when_it_comes_back(kind: str) -> None:
    kills: list[str] = []

    def kill_once(hosts: Hosts) -> None:
        def kills_at(path: str) -> bool:
            if kills or f"/{kind}/" not in path:
                return False
            kills.append(path)
            hosts.process.cancel()
            return True

        hosts.stores[1].refusal = kills_at

    assert names_of(published(2, kill_once)) == names_of(published(1))
    assert kills


def test_host_0_uploads_the_parts_that_storage_does_not_take_from_another_host() -> None:
    def refuse(hosts: Hosts) -> None:
        hosts.stores[1].refusal = lambda path: "/patches/" in path

    two = published(2, refuse)
    assert two.stores[1].kinds() == {"anchors"}
    assert two.logs[1].named("put-failed")
    assert names_of(two) == names_of(published(1))


@pytest.mark.parametrize(("newest", "refusals"), [(1, 1), (2, 0)], ids=["without an anchor", "with one"])
@simulated
async def test_a_host_that_has_lost_its_files_reads_them_from_the_anchor_and_without_one_makes_one(
    newest: int, refusals: int
) -> None:
    hosts = Hosts()
    for version in range(newest + 1):
        await hosts.publish(version)
    for path in [item.path async for item in hosts.states[1].list("weights/")]:
        await hosts.states[1].delete(path)
    await hosts.publish(newest + 1, newest + 2)
    await hosts.testbed.assert_followed(newest + 2)
    assert len(hosts.logs[0].named("patch-refused")) == refusals


@pytest.mark.parametrize("file_bytes", [FILE_BYTES // 2, FILE_BYTES * 2], ids=["smaller", "larger"])
@simulated
async def test_after_files_of_another_size_a_version_has_an_anchor_and_patches_follow_it(file_bytes: int) -> None:
    hosts = Hosts()
    for version in range(3):
        await hosts.publish(version)
    for version in (3, 4):
        await hosts.snapshot(version, file_bytes)
        await hosts.publish(seconds=15)
        await hosts.testbed.assert_followed(version)
    assert [event["version"] for event in hosts.logs[0].named("patch-refused")] in ([3], [])


@simulated
async def test_an_anchor_of_which_a_host_has_written_its_files_elsewhere_is_not_named() -> None:
    hosts = Hosts()
    hosts.stores[1] = RecordingStore(MemoryStore())
    await hosts.publish(0, 1)  # without the base's files that host has no patch
    assert hosts.logs[0].named("put-lost")
    await hosts.testbed.assert_followed(0)


@simulated
async def test_while_another_host_is_away_the_head_is_renewed_and_the_version_waits() -> None:
    hosts = Hosts()
    await hosts.publish(0, 1)
    hosts.is_away = True
    await hosts.publish(2, seconds=hosts.testbed.run.head_ttl * 2)
    (waits,) = {line["waits_for"] for line in hosts.logs[0].named("host-missing")}
    assert (waits, (await hosts.testbed.head()).version) == ("host 1", 1)
    await hosts.testbed.assert_followed(1)  # its head has not expired
    hosts.is_away = False
    await hosts.publish()
    await hosts.testbed.assert_followed(2)


@simulated
async def test_a_host_that_hangs_is_named_once_and_one_that_works_for_long_is_waited_for() -> None:
    hosts = Hosts()
    hosts.stores[1].put_seconds = 200
    await hosts.publish(0, 1, seconds=1500)
    assert not hosts.logs[0].named("host-missing")
    await hosts.testbed.assert_followed(1)
    node, (here, _) = hosts.testbed.node(), memory_stream_pair()
    other = OtherHost(node, 1)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(other.ask_by, 0, here, b"")
        nursery.start_soon(other.references, 1)
        await trio.sleep(500)
        nursery.cancel_scope.cancel()
    errors = [line["error"] for line in hosts.logs[0].named("host-missing")]
    assert errors == ["no connection", "the other host is connected and has sent nothing for 120 s"]


@pytest.mark.parametrize("greeting", [b"GET / HTTP/1.1\r\n\r\n", bytes(3) + b"\1" + bytes(8) + b"\7", b""], ids=repr)
@simulated
async def test_who_is_no_host_of_the_run_is_refused(greeting: bytes) -> None:
    hosts = Hosts()
    node, (here, there) = hosts.testbed.node(), memory_stream_pair()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(accept_host, node, [OtherHost(node, 1)], here)
        if greeting:
            await there.send_all(greeting)
            assert await there.receive_some() == b""
        else:
            stranger = replace(hosts.other(), run_id=bytes(32), shared_revisions=None)
            with pytest.raises(trio.BrokenResourceError):
                await answer_host_0(there, stranger, 1, 0, 1)
            assert hosts.logs[0].named("host-refused")


@simulated
async def test_the_answer_to_a_question_that_was_given_up_is_not_taken_for_the_next_one() -> None:
    hosts = Hosts()
    await hosts.publish(0, 1)
    node = hosts.testbed.node()
    other = OtherHost(node, 1)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(hosts.connect, node, [other], 0)
        await other.references(1)
        for checkpoints in range(8):
            with trio.CancelScope() as scope:
                nursery.start_soon(cancel_after, scope, checkpoints)
                await other.encode(1, None)
            assert {*await other.references(1)} == {2, 3}
        nursery.cancel_scope.cancel()


async def cancel_after(scope: trio.CancelScope, checkpoints: int) -> None:
    for _ in range(checkpoints):
        await trio.lowlevel.checkpoint()
    scope.cancel()


@simulated
async def test_after_a_repair_host_0_has_all_files_and_goes_on_alone_or_with_others() -> None:
    hosts = Hosts()
    await hosts.publish(0, 1, 2)
    node = hosts.testbed.node()
    await refresh_authority(node)
    repair = ChainRepair(node, set(), lambda line: None)
    assert await repair.is_needed()
    await repair.run()
    for hosts.count, version in ((1, 3), (2, 4), (1, 5)):
        if version == 5:
            await repair.run()
        await hosts.publish(version)
        await hosts.testbed.assert_followed(version)
    assert [event["version"] for event in hosts.logs[0].named("patch-refused")] == [4]  # version 3 had no anchor


@pytest.mark.parametrize(("host", "number"), [(0, 1), (1, 3)])
@simulated
async def test_weights_that_a_host_has_read_otherwise_than_they_were_written_are_not_signed(
    host: int, number: int
) -> None:
    """A file whose bits have changed where no digest of the state could tell, or one of an earlier attempt."""
    hosts = Hosts()
    await hosts.publish(0, 1)
    await hosts.snapshot(2)
    path = f"{weights_folder(2)}{number:05d}"
    data = bytearray(await hosts.states[host].get(path, 1 << 20))
    data[-1] ^= 1
    await hosts.states[host].put(path, bytes(data))
    await hosts.assert_names(
        f"weights/0+2/ of this node's state: host {host} has read other weights than its rank has written; start "
        r"it again, and if that repeats remove outbox/0+2-\* from the state of host 0; run `grailnode repair`"
    )
    await hosts.testbed.assert_followed(1)
    assert 2 not in (await History.open(hosts.states[0])).manifests


@pytest.mark.parametrize("digests", [1, 0, 3])
@simulated
async def test_a_snapshot_of_other_hosts_is_published_and_one_without_digests_is_named(digests: int) -> None:
    hosts = Hosts(count=1)
    await hosts.publish(0, 1)
    await hosts.snapshot(2)
    of_hosts = (digest_weights(hosts.testbed.weights[2]), digest_weights({}), digest_weights({}))  # two had no files
    await note_snapshot(hosts.states[0], SnapshotName(2, 2), WrittenWeights(4, of_hosts[:digests]))
    if digests:
        await hosts.publish()
        await hosts.testbed.assert_followed(2)
    else:
        await hosts.assert_names(r"by another version of the program; remove outbox/0+2-\* from")


@simulated
async def test_frames_that_have_changed_on_their_way_to_host_0_are_no_patch() -> None:
    hosts = Hosts()
    await hosts.publish(0, 1)
    files = HostFiles(hosts.other(), hosts.testbed.node().key.public)
    await hosts.snapshot(2)
    value, data = pack_encoded(await files.encode(2, Base(1, 4, ())))
    unpack_encoded((value, data))
    with pytest.raises(PatchError, match="the answer of another host has changed on its way"):
        unpack_encoded((value, data[:-1] + bytes([data[-1] ^ 1])))


@simulated
async def test_a_repair_keeps_the_snapshots_of_which_other_hosts_have_files(tmp_path: Path) -> None:
    hosts = await with_checkpoint(4)
    before = [dict(state._objects) for state in hosts.states]
    assert not [line for line in await repair(hosts, tmp_path) if "dropped" in line]
    assert [dict(state._objects) for state in hosts.states] == before
    await hosts.publish()
    await hosts.testbed.assert_followed(4)


@simulated
async def test_without_its_checkpoint_host_0_begins_with_the_published_weights_and_has_all_files(
    tmp_path: Path,
) -> None:
    hosts = await with_checkpoint(4)
    lines = await repair(hosts, tmp_path, NOTES)
    assert [line.partition(":")[0] for line in lines if "dropped" in line] == [
        f"outbox/{version:010d}-{version:012d}" for version in (3, 4)
    ]
    assert "training/: made from version 2; moments and waiting groups are lost, the warm-up starts again" in lines
    note = await whole_checkpoint(hosts.states[0])
    assert note is not None
    assert (note.version, note.parts) == (2, (1,))
    await hosts.publish(3, 4)
    await hosts.testbed.assert_followed(4)


@simulated
async def test_a_snapshot_of_which_another_host_has_lost_a_file_is_named_with_what_to_do(tmp_path: Path) -> None:
    hosts = await with_checkpoint(4)
    await hosts.states[1].delete(f"{weights_folder(3)}00003")
    await hosts.assert_names(
        r"weights/0+3/ of this node's state: 3 of 4 files are there \(2 on host 0, 1 on host 1\); "
        r"remove outbox/0+3-\* from the state of host 0; run `grailnode repair`"
    )
    lines = await repair(hosts, tmp_path, "outbox/0000000003-")
    assert [line for line in lines if "dropped" in line] == [
        "outbox/0000000004-000000000004: dropped, since the version before it is lost; it is trained again"
    ]
    assert not [line for line in lines if "moments" in line]
    await hosts.publish(3, 4)
    await hosts.testbed.assert_followed(4)


@pytest.mark.parametrize("newest", [2, 3], ids=["the newest version", "an earlier version"])
@simulated
async def test_an_anchor_of_which_another_host_has_lost_a_file_is_given_up_and_the_moments_stay(
    tmp_path: Path, newest: int
) -> None:
    hosts = await with_checkpoint(newest + 1, *range(3, newest + 1), refusal=lambda path: "/anchors/" in path)
    hosts.stores[1].refusal = lambda path: False
    await hosts.states[1].delete(f"{weights_folder(2)}00003")
    await hosts.assert_names(
        r"weights/0+2/ of this node's state: files of it are lost; "
        r"remove weights/0+2/ from the state of host 0; run `grailnode repair`"
    )
    assert not [line for line in await repair(hosts, tmp_path, weights_folder(2)) if "moments" in line]
    await hosts.publish()
    await hosts.testbed.assert_followed(newest + 1)
    assert 2 not in (await hosts.testbed.head()).anchors


async def with_checkpoint(step: int, *published: int, refusal: Callable[[str], bool] = lambda path: False) -> Hosts:
    """Return hosts that have published versions 0 to 2 and others. Their checkpoint is of a later step, of which the
    snapshots wait; `refusal` tells what storage does not take from host 1 after version 1.
    """
    hosts = Hosts()
    await hosts.publish(0, 1)
    hosts.stores[1].refusal = refusal
    await hosts.publish(2, *published)

    async def save(folder: str, _previous: str) -> tuple[Sequence[int], int]:
        await hosts.states[0].put(f"{folder}00000/00000", b"rows of rank 0")
        return (1, 1), 1

    await put_checkpoint(hosts.states[0], (step, step), save, b"")
    for version in range(max((2, *published)) + 1, step + 1):
        await hosts.snapshot(version)
    return hosts


async def repair(hosts: Hosts, directory: Path, lost: str = "") -> list[str]:
    """Repair the state of host 0, which has lost all objects below a path, if one is given; return the lines."""
    lines: list[str] = []
    memory, node = hosts.states[0], hosts.testbed.node()
    state = StateStore(directory, node.run_id, inline=True)
    for path, data in [*memory._objects.items()]:
        await state.put(path, data)
        await memory.delete(path)
        if lost and path.startswith(lost):
            (directory / path).unlink()
    draft = StateDraft(StateStore(directory, node.run_id, inline=True, repairing=True))
    await repair_state(replace(node, state=draft, shared_revisions=None), lines.append, hosts=2)
    await copy_objects(state, memory)
    return lines


@simulated
async def test_of_two_upload_processes_with_one_number_the_one_that_connected_last_stays_and_the_other_ends() -> None:
    hosts = Hosts()
    await hosts.publish(0, 1)
    node = hosts.testbed.node()
    other = OtherHost(node, 1)
    accepted, refusals = list[str](), dict[str, str]()

    async def connect(name: str, process: bytes, lane: int) -> None:
        with suppress(trio.BrokenResourceError):
            while True:
                here, there = memory_stream_pair()
                nursery.start_soon(accept_host, node, [other], here)
                try:
                    await answer_host_0(there, hosts.other(), 1, lane, 1, process, lambda: accepted.append(name))
                except UserError as error:
                    refusals[name] = str(error)
                    return
                except trio.BrokenResourceError:
                    await trio.sleep(0.1)

    async with trio.open_nursery() as nursery:
        for name, process in (("old", b"b"), ("new", b"a"), ("newest", b"c")):
            for lane in range(2):
                nursery.start_soon(connect, name, process, lane)
            await trio.sleep(1)
            assert {*await other.references(1)} == {2, 3}
        nursery.start_soon(connect, "old again", b"b", 0)
        await trio.sleep(100)
        nursery.cancel_scope.cancel()
    assert accepted == ["old", "old", "new", "new", "newest", "newest"]
    assert refusals.keys() == {"old", "new", "old again"}
    assert refusals["old"] == (
        "trainer.hosts: another upload process with the number 1 has connected since; end it, "
        "or give each host a number of its own"
    )
