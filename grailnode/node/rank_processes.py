"""How the ranks of a trainer on several GPUs meet, and what those other than rank 0 do.

The ranks of one host meet through a file, and talk over the loopback interface alone: torch.distributed knows no
passwords. Ranks on several hosts meet at an address of rank 0's host, and need a network that nobody else is on. Only
rank 0 has the key and the run's state, so that a rank that is lost, or joins twice, can publish nothing. When one is
lost, the ranks of all hosts end, meet again, and go on from the checkpoint. One that ends by a fault of its own, also
before it has joined, notes the cause where they meet, and the others name it.
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
"""After which a rank of another host counts as lost: a link that is cut closes no connection."""
_NOTE_SECONDS: Final = 5.0
"""In which a rank that ends notes the cause and others read it, and one that goes on counts two beats."""
_POLL_SECONDS: Final = 0.2


class Meeting:
    """Where a rank meets the others.

    Args:
        patience: how long a rank waits until all others have come.
    """

    def __init__(self, seat: Seat, patience: timedelta = _JOIN) -> None:
        self.seat = seat
        self._patience = patience
        self._store: Any = None  # a TCPStore, once rank 0 has been reached
        self._is_seated = False  # as the only one of its rank
        self._has_met = False
        self._cause = ""  # which rank has ended first, and why, if it could say so

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
            self._compare(terms)
            dist.init_process_group(backend, store=self._store, rank=seat.rank, world_size=seat.count)
            group = RankGroup.of(torch.device(device))
        except RuntimeError as error:  # torch has no narrower one
            reason = str(error).partition("\n")[0]
            text = f"trainer.hosts: the {seat.count} ranks have not met at {seat.meeting}: {reason}"
            raise LostRankError(text) from error
        self._has_met = True
        return group

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
            cause: BaseException | None = None
            try:
                await work()
            except Exception as error:
                cause, faults = ExceptionGroup("", [error]).split(_is_of_ranks)
                if faults is not None:
                    line = explain(faults)
                    await self._note(repr(fault_in(faults)) if line is None else line)
                    await self._wait_for_readers()
                    raise
            await self._note("")
            ended = await self._ended_rank()
            await self._wait_for_readers()
            raise LostRankError(f"trainer.hosts: {ended}") from cause

    async def _note(self, cause: str) -> None:
        """Note that this rank ends, and the cause; none if another one has ended."""
        title = self._title(self.seat.rank)
        text = f"{title} has ended: {cause.removeprefix('trainer.hosts: ')}" if cause and not self._cause else ""

        def write() -> None:
            self._open(timedelta(seconds=_NOTE_SECONDS))
            if self._is_seated or not self._store.add(f"seat/{self.seat.rank}", 0):  # else another process is this rank
                self._store.set(f"end/{self.seat.rank}", "")
                if text:
                    self._store.compare_set("cause", "", text)  # sets it if no rank has
                self._read_cause()

        with trio.move_on_after(_NOTE_SECONDS), suppress(RuntimeError):  # of a store that is gone
            await trio.to_thread.run_sync(write, abandon_on_cancel=True)

    async def _wait_for_readers(self) -> None:
        """Wait until all ranks have read the cause, on the host of rank 0, with which the store ends."""
        readers = [f"read/{rank}" for rank in range(self.seat.count)]
        with trio.move_on_after(_NOTE_SECONDS), suppress(RuntimeError):
            while self._cause and self.seat.rank < self.seat.local:
                if await trio.to_thread.run_sync(self._store.check, readers, abandon_on_cancel=True):
                    return
                await trio.sleep(_POLL_SECONDS)

    def _read_cause(self) -> str:
        """Return which rank has ended first and why, and note that this one has read it; empty if none has said it."""
        if not self._cause and self._store.check(["cause"]):
            self._cause = self._store.get("cause").decode()
            self._store.set(f"read/{self.seat.rank}", "")
        return self._cause

    async def _ended_rank(self) -> str:
        """Say which rank has ended first, and by which cause: what it has noted, or that it has not and is silent."""
        absent, first, began = [0], list[int](), trio.current_time()  # without a store, rank 0 has ended
        with trio.move_on_after(_NOTE_SECONDS), suppress(RuntimeError):
            while not self._cause:
                ended, beats = await trio.to_thread.run_sync(self._ends, abandon_on_cancel=True)
                first = first or beats
                pairs = enumerate(zip(first, beats, strict=True))
                silent = [rank for rank, (old, new) in pairs if old == new and rank not in ended]
                # A rank that goes on has counted a beat by then. If the store ends sooner, rank 0 has ended.
                absent = silent if trio.current_time() > began + 2 * _BEAT_SECONDS else [0] if 0 not in ended else []
                await trio.sleep(_POLL_SECONDS)
        ended_ranks = ", ".join(map(self._title, absent)) or "a rank"
        silence = "its process or its host was killed, or its link is cut; its host's log may say more"
        return self._cause or f"{ended_ranks} has ended: {silence}"

    def _ends(self) -> tuple[set[int], list[int]]:
        """Read the cause; return which ranks have noted their end, and how many beats each has counted."""
        store, ranks = self._store, range(self.seat.count)
        ended = {rank for rank in ranks if store.check([f"end/{rank}"])}
        self._read_cause()
        return ended, [store.add(f"beat/{rank}", 0) for rank in ranks]

    def _title(self, rank: int) -> str:
        return f"rank {rank} on host {rank // self.seat.local}"

    async def _watch(self, telemetry: Telemetry) -> None:
        """Count this rank's beats in the store of rank 0, which also compares those of the others, and read there why
        a rank has ended. End this process when one stops: its threads may wait for the other rank for ever.
        """
        while not self._has_met:
            await trio.sleep(_BEAT_SECONDS)
        watched = 1 if self.seat.rank else self.seat.count
        beats, heard = [0] * watched, [trio.current_time()] * watched
        while True:
            with trio.move_on_after(_SILENCE_SECONDS), suppress(RuntimeError):  # of a store that is gone
                before, beats = beats, await trio.to_thread.run_sync(self._beat, abandon_on_cancel=True)
                changed = [new != old for old, new in zip(before, beats, strict=True)]
                heard = [trio.current_time() if new else then for new, then in zip(changed, heard, strict=True)]
            silent = [rank for rank, moment in enumerate(heard) if moment < trio.current_time() - _SILENCE_SECONDS]
            if silent:
                title = self._title(silent[0])
                error = f"no answer from another host for {_SILENCE_SECONDS:.0f} s (of {title}, or to it)"
                telemetry.event("failed", error=self._cause or error)
                os._exit(EXIT_TRANSIENT)
            await trio.sleep(_BEAT_SECONDS)

    def _beat(self) -> list[int]:
        """Count a beat; return the counts of the ranks that this one watches."""
        store, seat = self._store, self.seat
        own = store.add(f"beat/{seat.rank}", 1)
        self._read_cause()
        return [own] if seat.rank else [store.add(f"beat/{rank}", 0) for rank in range(seat.count)]


def _is_of_ranks(error: BaseException) -> bool:
    """Return whether an error comes from the connections of ranks. gloo has no errors of its own: what tells them from
    mistakes of this process is the module that was left with them.
    """
    modules = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)]
    is_of_torch = bool(modules) and modules[-1].startswith("torch.distributed")
    return isinstance(error, RuntimeError) and is_of_torch and not isinstance(error, torch.OutOfMemoryError)
