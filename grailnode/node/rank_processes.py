"""How the ranks of a trainer on several GPUs meet, and what those other than rank 0 do.

The ranks of one host meet through a file, and talk over the loopback interface alone: torch.distributed knows no
passwords. Ranks on several hosts meet at an address of rank 0's host, and need a network that nobody else is on. Only
rank 0 has the key and the run's state, so that a rank that is lost, or joins twice, can publish nothing. When one is
lost, the ranks of all hosts end, meet again, and go on from the checkpoint.

Where they meet is a store in rank 0's process. From its arrival there, each rank counts beats in it. One that ends by a
fault of its own notes the cause; of one that falls silent, before all have met or later, rank 0 notes that. The others
read the cause with each beat, name it and end; if the store falls silent, they name rank 0.
"""

import json
import os
import time
import traceback
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Any, Final

import torch
import trio
from torch import distributed as dist

from grailnode import UserError
from grailnode.engine.compute import Compute
from grailnode.node.process_launch import LostRankError, Seat
from grailnode.node.supervisor import EXIT_TRANSIENT
from grailnode.node.user_errors import explain, fault_in
from grailnode.ranks.rank_group import RankGroup
from grailnode.ranks.sharded_learner import ShardedLearner
from protocol.digest import Weights
from protocol.quantization import Precision
from roles.ports import Telemetry
from roles.trainer.learn.learner import LearnerSettings

_JOIN: Final = timedelta(minutes=5)
_BEAT_SECONDS: Final = 2.0
_SILENCE_SECONDS: Final = 30.0
_NOTE_SECONDS: Final = 5.0
"""In which a rank that ends notes the cause and others read it, and one that goes on counts two beats."""
_POLL_SECONDS: Final = 0.2


class Meeting:
    """Where a rank meets the others.

    Args:
        patience: how long a rank waits until all others have come.
        silence: seconds without a beat after which a rank counts as lost: a link that is cut closes no connection.
    """

    def __init__(self, seat: Seat, patience: timedelta = _JOIN, silence: float = _SILENCE_SECONDS) -> None:
        self.seat = seat
        self._patience = patience
        self._silence = silence
        self._store: Any = None  # a TCPStore, once rank 0 has been reached
        self._is_seated = False  # as the only one of its rank
        self._has_ended = False  # what this rank does
        self._has_broken = False  # a connection between ranks, so that a short silence tells which rank has ended
        self._cause = ""  # which rank has ended first, and why
        self._has_cause = trio.Event()

    def join(self, device: str, terms: Mapping[str, str]) -> RankGroup:
        """Return the group of all ranks, when all of them have called this. The terms, by their names, must be equal on
        all hosts. LostRankError if ranks of other hosts have not called it within some minutes, have ended, or have
        other terms; UserError if rank 0 has others than this one.
        """
        seat, backend = self.seat, "gloo" if device == "cpu" else "nccl"
        if not seat.has_other_hosts:
            dist.init_process_group(backend, init_method=seat.meeting, rank=seat.rank, world_size=seat.count)
            return RankGroup.of(torch.device(device))
        try:
            self._open(self._patience)
        except dist.DistError as error:
            reason = str(error).partition("\n")[0]
            text = f"trainer.hosts: the {seat.count} ranks have not met at {seat.meeting}: {reason}"
            raise LostRankError(text) from error
        self._compare(terms)
        # A client of the store that waits is locked: with another one, this rank goes on to beat.
        dist.init_process_group(backend, store=self._store.clone(), rank=seat.rank, world_size=seat.count)
        return RankGroup.of(torch.device(device))

    def _open(self, timeout: timedelta) -> None:
        """Open the store, which is in rank 0's process."""
        if self._store is None:
            seat, new_store = self.seat, dist.TCPStore  # type: ignore[attr-defined]  # torch exports it by a star
            address, _, port = seat.meeting.rpartition(":")
            is_here = seat.rank == 0
            self._store = new_store(address, int(port), seat.count, is_here, timeout, wait_for_workers=False)

    def _compare(self, terms: Mapping[str, str]) -> None:
        """Wait for all ranks, and compare the terms of rank 0 with those of each other rank, on all of them."""
        seat, store = self.seat, self._store
        if store.add(f"seat/{seat.rank}", 1) > 1:
            raise LostRankError(f"trainer.hosts: rank {seat.rank} has joined at {seat.meeting} already")
        store.add(f"beat/{seat.rank}", 1)
        self._is_seated = True
        store.set(f"terms/{seat.rank}", json.dumps(dict(terms)))
        end = time.monotonic() + self._patience.total_seconds()
        while absent := [rank for rank in range(seat.count) if not store.check([f"terms/{rank}"])]:
            if self._read_cause():
                raise LostRankError(f"trainer.hosts: {self._cause}")
            if time.monotonic() > end:
                titles = ", ".join(map(self._title, absent))
                seconds = self._patience.total_seconds()
                raise LostRankError(f"trainer.hosts: after {seconds:.0f} s, not yet at {seat.meeting}: {titles}")
            time.sleep(_POLL_SECONDS)
        first = json.loads(store.get("terms/0"))
        for rank in sorted(range(seat.count), key=lambda rank: rank != seat.rank):  # this one's first
            others = json.loads(store.get(f"terms/{rank}"))
            different = [name for name, value in first.items() if others.get(name) != value]
            if different:
                text = f"trainer.hosts: rank 0 and rank {rank} differ in {' and '.join(different)}"
                raise UserError(text) if rank == seat.rank else LostRankError(text)

    def make_learner(
        self,
        compute: Compute,
        settings: LearnerSettings,
        precision: Precision,
        terms: Mapping[str, str],
        weights: Weights | None = None,
    ) -> ShardedLearner:
        """Join the others, and return this rank's learner.

        Args:
            weights: with which training begins; for rank 0.
        """
        group = self.join(compute.device, terms)
        return ShardedLearner(compute.model, weights, settings, group, compute.dtype, precision, self.seat.local)

    async def run(self, work: Callable[[], Awaitable[None]], telemetry: Telemetry) -> None:
        """Carry out a rank's work, from its preparation on; LostRankError if a rank of another host has ended, or does
        not answer.
        """
        if not self.seat.has_other_hosts:
            return await work()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._watch, telemetry)
            broken: BaseException | None = None
            try:
                await work()
            except Exception as error:
                self._has_ended = True
                broken, faults = ExceptionGroup("", [error]).split(_is_of_ranks)
                if faults is not None:
                    line = explain(faults)
                    await self._note(repr(fault_in(faults)) if line is None else line)
                    await self._wait_for_readers()
                    raise
            self._has_ended = self._has_broken = True
            await self._note("")
            with trio.move_on_after(self._silence):
                await self._has_cause.wait()
            await self._wait_for_readers()
            line = str(fault_in(broken)).partition("\n")[0] if broken else "it is closed"
            cause = self._cause or f"{self._title(self.seat.rank)} has lost a connection: {line}"
            raise LostRankError(f"trainer.hosts: {cause}") from broken

    async def _note(self, cause: str) -> None:
        """Note that this rank ends, and the cause; none if another one has ended."""
        title = self._title(self.seat.rank)

        def write() -> None:
            self._open(timedelta(seconds=_NOTE_SECONDS))
            if not self._is_seated and self._store.add(f"seat/{self.seat.rank}", 0):
                return  # another process is this rank
            if cause:
                self._blame(f"{title} has ended: {cause.removeprefix('trainer.hosts: ')}")
            else:
                self._store.set("broken", "")

        with trio.move_on_after(_NOTE_SECONDS), suppress(RuntimeError):  # of a store that is gone
            await trio.to_thread.run_sync(write, abandon_on_cancel=True)

    async def _wait_for_readers(self) -> None:
        """Wait until the others have read the cause, on the host of rank 0, with which the store ends."""
        if self._cause and self.seat.rank < self.seat.local:
            await trio.sleep(_NOTE_SECONDS)

    def _blame(self, cause: str) -> None:
        """Note which rank has ended first and why, unless this has been noted."""
        self._store.compare_set("cause", "", cause)  # sets it if no rank has
        self._read_cause()

    def _read_cause(self) -> str:
        """Return which rank has ended first and why; empty if this has not been noted."""
        if not self._cause and self._store.check(["cause"]):
            self._cause = self._store.get("cause").decode()
        return self._cause

    def _title(self, rank: int) -> str:
        return f"rank {rank} on host {rank // self.seat.local}"

    async def _watch(self, telemetry: Telemetry) -> None:
        """Count this rank's beats until the store, or its silence, says which rank is lost. Rank 0, whose store it is,
        compares the beats of all. End this process if its work goes on: its threads may wait for a rank for ever.
        """
        while not self._is_seated:
            await trio.sleep(_POLL_SECONDS)
        watched = 1 if self.seat.rank else self.seat.count
        beats, heard = [0] * watched, [trio.current_time()] * watched
        while not self._cause:
            await trio.sleep(_BEAT_SECONDS)
            with trio.move_on_after(_NOTE_SECONDS), suppress(RuntimeError):  # of a store that is gone
                before, beats = beats, await trio.to_thread.run_sync(self._beat, abandon_on_cancel=True)
                is_silent = [new == old > 0 for old, new in zip(before, beats, strict=True)]  # 0: it has not come
                now = trio.current_time()
                heard = [then if silent else now for silent, then in zip(is_silent, heard, strict=True)]
            limit = _NOTE_SECONDS if self._has_broken else self._silence
            if min(heard) < trio.current_time() - limit:
                cause = "its process or its host was killed, or its link is cut; its host's log may say more"
                cause = f"{self._title(heard.index(min(heard)))} has been silent for {limit:.0f} s: {cause}"
                if self.seat.rank == 0:
                    await trio.to_thread.run_sync(self._blame, cause)
                self._cause = self._cause or cause
        self._has_cause.set()
        await trio.sleep(_NOTE_SECONDS)  # in which work that has broken ends, and others read the cause
        if not self._has_ended:
            telemetry.event("failed", error=f"trainer.hosts: {self._cause}")
            os._exit(EXIT_TRANSIENT)

    def _beat(self) -> list[int]:
        """Count a beat, and read the cause; return the counts of the ranks that this one watches."""
        store, seat = self._store, self.seat
        own = store.add(f"beat/{seat.rank}", 1)
        self._has_broken = self._has_broken or store.check(["broken"])
        self._read_cause()
        return [own] if seat.rank else [store.add(f"beat/{rank}", 0) for rank in range(seat.count)]


def _is_of_ranks(error: BaseException) -> bool:
    """Return whether an error comes from the connections of ranks. gloo has no errors of its own: what tells them from
    mistakes of this process is the module that was left with them.
    """
    if isinstance(error, dist.DistError):
        return True
    modules = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)]
    is_of_torch = bool(modules) and modules[-1].startswith("torch.distributed")
    return isinstance(error, RuntimeError) and is_of_torch and not isinstance(error, torch.OutOfMemoryError)
