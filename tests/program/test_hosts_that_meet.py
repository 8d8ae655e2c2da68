"""Hosts that meet, and what they compare before they compute together."""

import errno
import multiprocessing
import os
import signal
import socket
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from pathlib import Path

import pytest
import torch
import trio
from torch import distributed as dist

from grailnode import UserError
from grailnode.config import load
from grailnode.node import processes
from grailnode.node.process_launch import Launch, LostRankError, Seat, prepare_rank
from grailnode.node.rank_processes import Meeting
from grailnode.node.supervisor import EXIT_PERMANENT, EXIT_TRANSIENT
from grailnode.node.telemetry import NodeTelemetry
from grailnode.node.user_errors import explain, is_transient

TERMS = {"the run": "0a", "the version of torch": "2"}
PATIENCE = timedelta(seconds=60)
HOSTS = 3

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload([__name__])


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


def refusal(rank: int, port: int, terms: Mapping[str, str] = TERMS) -> UserError:
    """Return with what one of the hosts refuses to join."""
    with pytest.raises(UserError) as caught:
        Meeting(Seat(rank, HOSTS, f"127.0.0.1:{port}", 1), PATIENCE).join("cpu", terms)
    return caught.value


def test_hosts_with_other_terms_do_not_compute_together_and_only_the_other_host_stops(listener: socket.socket) -> None:
    port = listener.getsockname()[1]
    listener.close()
    with ThreadPoolExecutor() as pool:
        tries = [pool.submit(refusal, rank, port, TERMS | {"the run": f"{rank % 2}"}) for rank in range(HOSTS)]
    errors = [each.result() for each in tries]
    assert {str(error) for error in errors} == {"trainer.hosts: rank 0 and rank 1 differ in the run"}
    assert [is_transient(error) for error in errors] == [True, False, True]


def test_a_rank_does_not_join_twice(listener: socket.socket) -> None:
    port = listener.getsockname()[1]
    listener.close()
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


def test_a_host_that_has_not_come_is_named(listener: socket.socket) -> None:
    port = listener.getsockname()[1]
    listener.close()
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


def compute(rank: int, port: int, end: End, start: Barrier, answers: "Connection[str | None, str | None]") -> None:
    """Compute as one of the hosts, of which one ends; answer with the line for the operator."""
    seat = Seat(rank, HOSTS, f"127.0.0.1:{port}", 1)
    prepare_rank(seat)
    meeting = Meeting(seat, PATIENCE)
    start.wait()

    async def work() -> None:
        if rank == end.rank and not end.joins:
            end.happen()
        group = await trio.to_thread.run_sync(meeting.join, "cpu", TERMS)
        if rank == end.rank:
            end.happen()
        await trio.to_thread.run_sync(group.wait)

    try:
        trio.run(meeting.run, work, NodeTelemetry("rank"))
    except Exception as error:  # noqa: BLE001 - whatever it is, a process would report it
        answers.send(explain(error))


MISTAKE = "inconsistent tensor size"
DISK = "weights: no space left on device"
KILLED = "its process or its host was killed"


@pytest.mark.parametrize(
    ("end", "expected", "own"),
    [
        (End(1, "mistake", joins=True), MISTAKE, None),
        (End(1, "killed", joins=True), KILLED, None),
        (End(0, "disk", joins=True), DISK, DISK),
        (End(0, "killed", joins=True), KILLED, None),
        (End(1, "disk", joins=False), DISK, DISK),
        (End(0, "mistake", joins=False), MISTAKE, None),
    ],
)
def test_the_end_of_a_rank_is_named_on_all_other_hosts_with_its_cause(
    listener: socket.socket, end: End, expected: str, own: str | None
) -> None:
    port = listener.getsockname()[1]
    listener.close()
    pipes, start = [_context.Pipe(duplex=False) for _ in range(HOSTS)], _context.Barrier(HOSTS)
    for number, (_, answers) in enumerate(pipes):
        _context.Process(target=compute, args=(number, port, end, start, answers), daemon=True).start()
        answers.close()
    for other in {*range(HOSTS)} - {end.rank}:
        lost = pipes[other][0].recv()
        assert lost.startswith(f"trainer.hosts: rank {end.rank} on host {end.rank} has ended: ")
        assert expected in lost
    if end.cause == "killed":
        with pytest.raises(EOFError):
            pipes[end.rank][0].recv()
    else:
        assert pipes[end.rank][0].recv() == own


async def test_a_rank_whose_fault_repeats_without_a_new_checkpoint_ends_and_one_whose_link_is_lost_does_not(
    run_toml: Path,
) -> None:
    config = load(run_toml)
    launch, title = Launch(config, "training", "trainer"), "trainer/training-1"
    telemetry = NodeTelemetry(title, config.at(config.node.logs) / "trainer-training-1.jsonl")

    async def exit_code(error: Exception) -> int:
        async def fail() -> None:
            raise error

        try:
            return await processes._report_failure(launch, title, telemetry, fail)
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
