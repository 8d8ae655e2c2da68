"""Hosts that meet, what they compare before they compute together, and `grailnode repair` on one that has no key."""

import errno
import os
import re
import signal
import socket
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.context import ForkServerProcess
from multiprocessing.synchronize import Barrier
from pathlib import Path

import pytest
import torch
import trio
from torch import distributed as dist

from grailnode import UserError
from grailnode.config import load
from grailnode.node import processes
from grailnode.node.node_makers import run_id_of, state_directory
from grailnode.node.process_launch import Launch, LostRankError, Seat, prepare_rank
from grailnode.node.rank_processes import Meeting
from grailnode.node.state_care import repair_node
from grailnode.node.supervisor import EXIT_PERMANENT, EXIT_TRANSIENT
from grailnode.node.telemetry import NodeTelemetry
from grailnode.node.user_errors import explain, is_transient
from grailnode.store.state.state_store import StateStore
from tests.support.processes.programs import logged_events
from tests.support.processes.ranks import context

TERMS = {"the run": "0a", "the version of torch": "2"}
PATIENCE = timedelta(seconds=60)
SILENCE = 10.0
HOSTS = 3


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


@pytest.fixture
def port(listener: socket.socket) -> int:
    """Return a port that is free again."""
    number: int = listener.getsockname()[1]
    listener.close()
    return number


def refusal(rank: int, port: int, terms: Mapping[str, str] = TERMS) -> UserError:
    """Return with what one of the hosts refuses to join."""
    with pytest.raises(UserError) as caught:
        Meeting(Seat(rank, HOSTS, f"127.0.0.1:{port}", 1), PATIENCE).join("cpu", terms)
    return caught.value


def test_hosts_with_other_terms_do_not_compute_together_and_only_the_other_host_stops(port: int) -> None:
    with ThreadPoolExecutor() as pool:
        tries = [pool.submit(refusal, rank, port, TERMS | {"the run": f"{rank % 2}"}) for rank in range(HOSTS)]
    errors = [each.result() for each in tries]
    assert {str(error) for error in errors} == {"trainer.hosts: rank 0 and rank 1 differ in the run"}
    assert [is_transient(error) for error in errors] == [True, False, True]


def test_a_rank_does_not_join_twice(port: int) -> None:
    with ThreadPoolExecutor() as pool:
        server = pool.submit(dist.TCPStore, "127.0.0.1", port, 2, True)  # type: ignore[attr-defined]
        client = dist.TCPStore("127.0.0.1", port, 2, False)  # type: ignore[attr-defined]
        client.add("seat/1", 1)
        assert "rank 1 has joined at" in str(refusal(1, port))
        del client
        server.result()


def test_a_port_that_is_taken_is_named(listener: socket.socket) -> None:
    error = refusal(0, listener.getsockname()[1])
    assert isinstance(error, LostRankError)
    assert "address already in use" in str(error).lower()


def test_a_host_that_has_not_come_is_named(port: int) -> None:
    with pytest.raises(LostRankError, match=r"not yet at 127\.0\.0\.1:\d+: rank 1 on host 1$"):
        Meeting(Seat(0, 2, f"127.0.0.1:{port}", 1), timedelta(seconds=1)).join("cpu", TERMS)


@dataclass(frozen=True)
class End:
    """How one of the hosts ends."""

    rank: int
    cause: str
    joins: bool

    def happen(self) -> None:
        if self.cause == "mistake":
            torch.ones(2) @ torch.ones(3)
        if self.cause == "disk":
            raise OSError(errno.ENOSPC, "No space left on device", "weights")
        os.kill(os.getpid(), signal.SIGKILL)


def compute(rank: int, port: int, end: End | None, start: Barrier, log: Path) -> None:
    """Compute as one of the hosts, of which one ends; log the line for the operator, if there is one."""
    seat = Seat(rank, HOSTS, f"127.0.0.1:{port}", 1)
    prepare_rank(seat)
    meeting = Meeting(seat, PATIENCE, SILENCE)
    telemetry = NodeTelemetry("rank", log)
    start.wait()

    async def work() -> None:
        if end and rank == end.rank and not end.joins:
            end.happen()
        group = await trio.to_thread.run_sync(meeting.join, "cpu", TERMS)
        if end and rank == end.rank:
            end.happen()
        await trio.to_thread.run_sync(group.wait)

    try:
        trio.run(meeting.run, work, telemetry)
    except Exception as error:  # noqa: BLE001 - whatever it is, a process would report it
        telemetry.event("failed", error=explain(error) or "a fault of this program")


class Hosts:
    """Hosts as processes, and what they log."""

    def __init__(self, directory: Path, port: int) -> None:
        self._directory = directory
        self._port = port
        self._processes: dict[int, ForkServerProcess] = {}
        self._starts: list[Barrier] = []  # the processes open them by name

    def start(self, *ranks: int, end: End | None = None) -> None:
        self._starts.append(context.Barrier(len(ranks)))
        for rank in ranks:
            arguments = rank, self._port, end, self._starts[-1], self._log(rank)
            self._processes[rank] = context.Process(target=compute, args=arguments, daemon=True)
            self._processes[rank].start()

    def kill(self, rank: int) -> None:
        self._processes[rank].kill()
        self._processes[rank].join()

    def line(self, rank: int) -> str:
        """Return the line for the operator with which a host has ended; empty if it had none."""
        self._processes[rank].join(2 * PATIENCE.total_seconds())
        assert self._processes[rank].exitcode is not None, f"rank {rank} still waits"
        lines = [event["error"] for event in logged_events(self._log(rank), "failed")]
        return lines[0] if lines else ""

    def _log(self, rank: int) -> Path:
        return self._directory / f"{rank}.jsonl"


@pytest.fixture
def hosts(tmp_path: Path, port: int) -> Hosts:
    return Hosts(tmp_path, port)


MISTAKE = " has ended: .*inconsistent tensor size"
DISK = " has ended: weights: no space left on device"
KILLED = r" has been silent for \d+ s: its process or its host was killed"


@pytest.mark.parametrize(
    ("end", "expected", "own"),
    [
        (End(1, "mistake", joins=True), MISTAKE, "a fault of this program"),
        (End(1, "killed", joins=True), KILLED, ""),
        (End(0, "disk", joins=True), DISK, "weights: no space left on device"),
        (End(0, "killed", joins=True), KILLED, ""),
        (End(1, "disk", joins=False), DISK, "weights: no space left on device"),
        (End(0, "mistake", joins=False), MISTAKE, "a fault of this program"),
    ],
)
def test_the_end_of_a_rank_is_named_on_all_other_hosts_with_its_cause(
    hosts: Hosts, end: End, expected: str, own: str
) -> None:
    hosts.start(*range(HOSTS), end=end)
    for other in {*range(HOSTS)} - {end.rank}:
        assert re.match(f"trainer.hosts: rank {end.rank} on host {end.rank}{expected}", hosts.line(other))
    assert hosts.line(end.rank) == own


@pytest.mark.parametrize(("killed", "late"), [(1, [2]), (0, [])])
def test_a_rank_that_is_killed_after_its_terms_is_named_by_those_that_wait_for_it(
    hosts: Hosts, port: int, killed: int, late: list[int]
) -> None:
    """A host that comes late has the terms of the killed rank, so that it and rank 0 wait to join it in gloo."""
    hosts.start(0, 1)
    terms = dist.TCPStore("127.0.0.1", port, None, False)  # type: ignore[attr-defined]
    terms.wait(["terms/0", "terms/1"], PATIENCE)
    hosts.kill(killed)
    hosts.start(*late)
    for other in {0, 1, *late} - {killed}:
        assert re.match(f"trainer.hosts: rank {killed} on host {killed}{KILLED}", hosts.line(other))


async def test_a_rank_whose_fault_repeats_without_a_new_checkpoint_ends_and_one_whose_link_is_lost_does_not(
    run_toml: Path,
) -> None:
    config = load(run_toml)
    launch = Launch(config, "training", "trainer")
    log = config.at(config.node.logs) / "trainer-training-1.jsonl"
    telemetry = NodeTelemetry("trainer/training-1", log)

    async def exit_code(error: Exception) -> int:
        async def fail() -> None:
            raise error

        try:
            return await processes._report_failure(launch, log, telemetry, fail)
        except ValueError:
            return 1  # of a process that an exception ends

    saved = config.at(config.node.state) / "trainer" / "objects" / "checkpoints"
    codes = []
    for step in (1, 2):
        (saved / f"{step:012d}-0000").mkdir(parents=True)
        codes.append([await exit_code(error) for _ in range(5) for error in (ValueError("w"), LostRankError("lost"))])
    assert codes == [[1, EXIT_TRANSIENT] * 5] * 2
    assert [await exit_code(error) for error in (LostRankError("lost"), ValueError("w"))] == [
        EXIT_TRANSIENT,
        EXIT_PERMANENT,
    ]
    assert (
        "ValueError, a fault of this program, 6 times at step 000000000002"
        in (config.at(config.node.logs) / "trainer-training-1.jsonl").read_text()
    )


TWO_HOSTS = '[trainer]\nhosts = { count = 2, number = 1, meeting = "10.0.0.1:29500" }\n'


@pytest.mark.parametrize(
    ("path", "line"),
    [
        (
            "checkpoints/000000000001-00000000000000/00001/00000",
            "checkpoints/: lost; remove training/ from the state of host 0, and run `grailnode repair` there",
        ),
        (
            "weights/0000000001/00003",
            "weights/: start this host again; if host 0 needs what is lost, its next line says so",
        ),
    ],
)
def test_what_another_host_has_lost_is_forgotten_and_what_to_do_is_said(run_toml: Path, path: str, line: str) -> None:
    run_toml.write_text(run_toml.read_text().replace("[trainer]\n", TWO_HOSTS))
    config, lines = load(run_toml), list[str]()
    objects = state_directory(config, "trainer") / "objects"
    trio.run(StateStore(objects, run_id_of(config)).put, path, b"rows")
    (objects / path).unlink()
    keys = {*config.at(config.node.keys).glob("*")}
    repair_node(config, "trainer", lines.append)
    assert lines[0].startswith(f"{path}: missing")
    assert lines[1:] == [line]
    repair_node(config, "trainer", lines.append)
    assert lines[2:] == ["the state of this host is whole"]
    assert {*config.at(config.node.keys).glob("*")} == keys
