"""A node that cannot work says so at its start, and pledges nothing (grailnode/node/role_checks.py)."""

import errno
import os
import shutil
import tempfile
import time
from collections import namedtuple
from dataclasses import replace
from email.utils import formatdate
from pathlib import Path
from typing import Any, Literal

import pytest
import trio

from grailnode import UserError
from grailnode.beacon.relays import StoreBeacon
from grailnode.cli.actions.key_changes import admit
from grailnode.config import Config, EngineSection, load
from grailnode.engine.policy import PACKAGED_POLICY, Policy, load_weights
from grailnode.node.admission_credential import make_credential_source
from grailnode.node.disk_check import check_disk, follower_bytes, trainer_bytes
from grailnode.node.node_makers import make_canary
from grailnode.node.node_makers import make_node as make_configured_node
from grailnode.node.role_checks import check_admission, check_meeting_point, check_space, check_start
from grailnode.node.telemetry import NodeTelemetry
from grailnode.node.time_check import ClockError, clock_urls, date_reader, wait_for_time
from grailnode.run import workspace
from grailnode.run.joining import open_config
from grailnode.store.memory import MemoryStore
from protocol import paths
from protocol.encoding import content_digest
from protocol.identity.authority import Admission
from protocol.identity.signing import sign
from roles.authority_updates import refresh_authority
from roles.node.identity import Node
from roles.participants import find_participants
from roles.ports import Beacon, Clock
from tests.support.builders import samples
from tests.support.builders.chains import MINER, make_node, small_run
from tests.support.builders.recipes import demo_recipe, demo_rules
from tests.support.faults.decorated_store import UnreachableStore
from tests.support.servers.loopback import HttpRequest, Reply, serve
from tests.support.simulation.faulty_network import WrongClock
from tests.support.simulation.network import Log, Network
from tests.support.simulation.network import draft as simulated_draft
from tests.support.simulation.network_runs import RULES
from tests.support.simulation.virtual_clock import running, simulate, simulated

URL = "https://mine.example.org"


class AlteringStore(MemoryStore):
    """A store that shows zeros in place of every object, or of the first that is read."""

    def __init__(self, *, once: bool = False) -> None:
        super().__init__()
        self._remaining = 1 if once else 1 << 30

    async def get(self, path: str, max_bytes: int, *, offset: int = 0, size: int | None = None) -> bytes:
        data = await super().get(path, max_bytes, offset=offset, size=size)
        self._remaining -= 1
        return data if self._remaining < 0 else bytes(len(data))


def refusing(*operations: str) -> UnreachableStore:
    return UnreachableStore(MemoryStore(), "", operations=operations, seconds=0.0)


def miner(store: Any, **admission: object) -> Node:
    _, run = small_run(samples.digest("genesis"))
    rules = Admission(**{**run.authority.admission.model_dump(), **admission})
    authority = run.authority.model_copy(update={"admission": rules})
    run = run.model_copy(update={"authority": authority})
    node = make_node(content_digest(run.to_bytes()), run, store, MemoryStore(), Log("miner"), MINER)
    return replace(node, space=URL)


@pytest.mark.parametrize("store", [MemoryStore(), AlteringStore(once=True)], ids=["works", "answers wrongly once"])
@simulated
async def test_a_space_that_works_is_left_as_it_was(store: MemoryStore):
    for others_see in (None, store):
        await check_space(miner(store), others_see)
    assert [info async for info in store.list("")] == []


HIDDEN = f"store.url {URL}: others cannot read there .*"


@pytest.mark.parametrize(
    ("store", "others_see", "message"),
    [
        (refusing("put"), None, "cannot write to its own space and read it: .*connection refused"),
        (refusing("get"), None, "cannot write to its own space and read it: .*connection refused"),
        (refusing("delete"), None, "cannot delete objects of its own space: .*connection refused"),
        (AlteringStore(), None, "storage shows other bytes than this node wrote"),
        (MemoryStore(), MemoryStore(), f"{HIDDEN} is it this bucket's public URL"),
        (MemoryStore(), refusing("get"), f"{HIDDEN}connection refused.* may everybody read"),
    ],
    ids=["put", "get", "delete", "other bytes", "another bucket", "a private bucket"],
)
@simulated
async def test_a_space_that_this_node_or_others_cannot_use_is_refused(
    store: Any, others_see: Any, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        await check_space(miner(store), others_see)
    assert others_see is None or [info async for info in store.list("")] == []


@simulated
async def test_a_meeting_point_that_cannot_be_listed_is_refused():
    await check_meeting_point(miner(MemoryStore()))
    message = r"cannot see the run's participants at the meeting point: .*connection refused"
    with pytest.raises(UserError, match=message):
        await check_meeting_point(miner(refusing("list")))


@simulated
async def test_a_miner_without_its_own_invitation_is_refused(tmp_path: Path) -> None:
    source = make_credential_source(tmp_path / "miner-1.invite")
    node = replace(miner(MemoryStore(), policy="invite"), credential=source)
    with pytest.raises(UserError, match=r"by invite, .*no invitation"):
        await check_admission(node)
    (tmp_path / "miner-1.invite").write_text("00" * 90)
    with pytest.raises(UserError, match="by invite, and does not admit this one"):
        await check_admission(node)


def test_the_room_that_a_node_needs_follows_from_the_model(run_toml: Path):
    policy = Policy.load(PACKAGED_POLICY)
    parameters = sum(tensor.numel() for tensor in load_weights(PACKAGED_POLICY).values())
    small = trainer_bytes(policy) - 34 * parameters
    assert small == 64 << 20
    run = simulated_draft(demo_rules(), ("validator-0",), PACKAGED_POLICY)
    files = sum(file.size for file in run.model.files)
    config = load(run_toml)
    assert follower_bytes(run, config, policy) == small + files
    vllm = config.model_copy(update={"engine": EngineSection(kind="vllm", url="http://127.0.0.1:1")})
    assert follower_bytes(run, vllm, None) == small + files
    assert follower_bytes(run, vllm, policy) == small + files + 10 * parameters
    assert follower_bytes(run, vllm, policy, versions=7) == small + files + 22 * parameters


def test_a_disk_without_room_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = tmp_path / "state"
    check_disk(directory, 1 << 20)
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(1 << 40, 1 << 40, 5 << 20))
    (directory / "checkpoint").write_bytes(bytes(3 << 20))
    check_disk(directory, 8 << 20)  # what the node has already is a part of what it needs
    with pytest.raises(UserError, match=r"state: 5 MiB are free and 3 MiB are this node's, .* up to 9 MiB"):
        check_disk(directory, (8 << 20) + 1)


@pytest.mark.parametrize("number", [errno.EROFS, errno.ENOSPC, errno.EACCES], ids=errno.errorcode.get)
def test_a_disk_that_cannot_be_written_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def refuse(**_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    with pytest.raises(UserError, match=rf"state: .*cannot be written there \({os.strerror(number).lower()}\)"):
        check_disk(tmp_path / "state", 0)


# Canaries of runs that admit their miners: a trainer starts with an admitted one, or reports what is missing


def trainer(tmp_path: Path, policy: Literal["open", "allowlist", "invite"]) -> tuple[str, Config]:
    """Create a run with this admission, and return its run.toml and the configuration of a trainer with a canary."""
    run = str(workspace.create(tmp_path, demo_recipe(admission=policy)).config)
    return run, open_config(run, ("trainer.canaries=1",))


@pytest.mark.parametrize("policy", ["allowlist", "invite"])
def test_a_canary_is_refused_at_the_start_until_it_is_admitted(
    tmp_path: Path, policy: Literal["allowlist", "invite"], capsys: pytest.CaptureFixture[str]
):
    run, config = trainer(tmp_path, policy)
    canary = make_canary(config, "trainer", NodeTelemetry("test"))
    public = canary.key.public.hex()
    with pytest.raises(UserError, match=f"admits miners by {policy}.*`grailnode admit {public}`") as error_info:
        check_start(config, "trainer", "trainer", print)
    assert "\n" not in str(error_info.value)
    admit(public, run, days=30, inviter=None)
    if policy == "invite":
        token = capsys.readouterr().out.strip()
        (config.at(config.node.keys) / "trainer-canary-0.invite").write_text(token)
    check_start(config, "trainer", "trainer", print)

    async def announce() -> list[bytes]:
        reader = make_configured_node(config, "validator-1", NodeTelemetry("test"))
        await refresh_authority(reader)
        record = await canary.announcement("miner", canary.clock.now() + 60.0, 4, 0, "torch-float32")
        await canary.store.put(paths.participant(canary.key.public), sign(record, canary.key))
        return [item.key for item in await find_participants(reader, "miner")]

    assert trio.run(announce) == [canary.key.public]


# A node whose clock is wrong, or whose beacon is silent, waits at its start, says for what, and pledges nothing


def lines_of_start(
    error: float, date_error: float | None, *, begins: float = 0.0, ends: float = 60.0, own: bool = False
) -> list[str]:
    """Return what a node reports until it starts.

    Args:
        error: of its clock, in seconds, until `ends`; date_error: what the storage says about it.
        begins: seconds until the beacon begins to answer.
        own: whether it runs the beacon itself.
    """

    async def scenario() -> list[str]:
        network = Network(RULES)
        clock = WrongClock(network.clock)
        node = network.node("miner-1")
        log = Log("node")

        def make_beacon(clock: Clock) -> Beacon:
            return StoreBeacon(network.store, network.run.beacon, clock)

        async def read() -> ClockError | None:
            await trio.lowlevel.checkpoint()
            seconds = date_error if clock.error_seconds else 0.0
            return None if seconds is None else ClockError("https://storage.example", seconds)

        async def run_beacon() -> None:
            await trio.sleep(begins)
            await network.run_beacon()

        async def set_clock() -> None:
            await trio.sleep(ends)
            clock.error_seconds = 0.0

        await trio.sleep(30)  # the beacon has been at work for some time
        clock.error_seconds = error
        async with running(run_beacon) as nursery:
            nursery.start_soon(set_clock)
            await trio.sleep(1.0)
            object.__setattr__(node, "clock", clock)
            await wait_for_time(node, None if own else make_beacon, read, log)
            assert bool(log.events) == (trio.current_time() > 45)
        return [str(fields.get("error", name)) for name, fields in log.events]

    return simulate(scenario)


@pytest.mark.parametrize("error", [0.0, 0.2, -1.0])
def test_a_node_whose_clock_is_right_starts_at_once(error: float):
    assert lines_of_start(error, error) == []


@pytest.mark.parametrize("own", [False, True], ids=["joiner", "runs the beacon"])
@pytest.mark.parametrize(
    ("error", "words"),
    [(20.0, "at least 20 s ahead of"), (3600.0, "at least 3600 s ahead of"), (-20.0, "at least 20 s behind")],
)
def test_a_wrong_clock_is_waited_for(error: float, words: str, own: bool):
    waiting, right = lines_of_start(error, error, own=own)
    assert f"this machine's clock is {words} https://storage.example: set it right (NTP); waiting" in waiting
    assert "nothing is pledged" in waiting
    assert right == "waited"


def test_a_clock_that_is_behind_is_noticed_by_the_beacon_alone():
    waiting, _ = lines_of_start(-20.0, None)
    assert "this machine's clock is at least 3 s behind the beacon" in waiting


@pytest.mark.parametrize(
    ("date_error", "words"), [(0.0, "(https://storage.example agrees with this machine's clock)"), (None, "answer: ")]
)
def test_a_beacon_that_does_not_answer_is_waited_for(date_error: float | None, words: str):
    waiting, _ = lines_of_start(1e-6, date_error, begins=60.0)
    assert "the beacon does not answer" in waiting
    assert words in waiting
    assert "waiting, and nothing is pledged" in waiting


@pytest.mark.parametrize("offset", [-100.0, 0.0, 100.0])
async def test_the_date_of_a_server_tells_the_time(offset: float):
    def answer(request: HttpRequest) -> Reply:
        return Reply(403, b"", {"Date": formatdate(time.time() - offset, usegmt=True)})

    async with trio.open_nursery() as nursery:
        url = await nursery.start(serve, answer)
        error = await date_reader(["http://127.0.0.1:1", url])()
        nursery.cancel_scope.cancel()
    assert error is not None
    assert offset - 60 < error.seconds < offset + 60  # whole seconds, and a machine that may be slow
    assert bool(error.seconds) == bool(offset)


def test_servers_that_do_not_answer_tell_nothing():
    assert trio.run(date_reader(["http://127.0.0.1:1"])) is None


def test_the_time_is_asked_of_the_storage(run_toml: Path):
    assert clock_urls(load(run_toml)) == []
    places = ["store.kind=s3", "store.bucket=mine", "store.url=https://mine.example", "store.region=eu-west-1"]
    square = ["store.meeting.kind=s3", "store.meeting.bucket=square", "store.meeting.endpoint=https://s3.example"]
    assert clock_urls(load(run_toml, [*places, *square])) == [
        "https://s3.eu-west-1.amazonaws.com",
        "https://s3.example",
    ]
