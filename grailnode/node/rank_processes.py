"""How the ranks of a trainer on several GPUs meet, and what those other than rank 0 do.

The ranks of one host meet through a file, and talk over the loopback interface alone: torch.distributed knows no
passwords. Ranks on several hosts meet at an address of rank 0's host, and need a network that nobody else is on. Only
rank 0 has the key and the run's state, so that a rank that is lost, or joins twice, can publish nothing. When one is
lost, the ranks of all hosts end, meet again, and go on from the checkpoint. One that ends by a fault of its own notes
the cause where they have met, and the others name it.
"""

import json
import os
import traceback
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from functools import partial
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
"""In which a rank that ends notes the cause, and one that goes on counts a beat."""


class OtherTermsError(UserError):
    """This host would compute something else than host 0."""


class Meeting:
    """Where a rank meets the others.

    Args:
        terms: what must be equal on all hosts, by its name.
    """

    def __init__(self, seat: Seat, device: str, terms: Mapping[str, str]) -> None:
        self._seat = seat
        self._device = device
        self._terms = dict(terms)
        self._store: Any = None  # a TCPStore, once all have met

    def join(self) -> RankGroup:
        """Return the group of all ranks, when all of them have called this.

        Raises:
            LostRankError: those of other hosts have not within some minutes, or have other terms.
            OtherTermsError: rank 0 has other terms.
        """
        seat, backend = self._seat, "gloo" if self._device == "cpu" else "nccl"
        if not seat.has_other_hosts:
            dist.init_process_group(backend, init_method=seat.meeting, rank=seat.rank, world_size=seat.count)
            return RankGroup.of(torch.device(self._device))
        address, _, port = seat.meeting.rpartition(":")
        try:
            new_store = dist.TCPStore  # type: ignore[attr-defined]  # torch exports it by a star
            store = new_store(address, int(port), seat.count, seat.rank == 0, timeout=_JOIN)
            self._compare(store)
            dist.init_process_group(backend, store=store, rank=seat.rank, world_size=seat.count)
            group = RankGroup.of(torch.device(self._device))
        except RuntimeError as error:  # torch has no narrower one
            reason = str(error).partition("\n")[0]
            text = f"trainer.hosts: the {seat.count} ranks have not met at {seat.meeting}: {reason}"
            raise LostRankError(text) from error
        self._store = store
        return group

    def _compare(self, store: Any) -> None:
        """Compare the terms of rank 0 with those of each other rank, on both."""
        seat = self._seat
        if store.add(f"seat/{seat.rank}", 1) > 1:
            raise LostRankError(f"trainer.hosts: rank {seat.rank} has joined at {seat.meeting} already")
        store.set(f"terms/{seat.rank}", json.dumps(self._terms))
        for rank in range(seat.count) if seat.rank == 0 else (0,):
            others = json.loads(store.get(f"terms/{rank}"))
            different = [name for name, value in self._terms.items() if others.get(name) != value]
            if different:
                names = " and ".join(different)
                text = f"trainer.hosts: rank {seat.rank} and rank {rank} differ in {names}"
                raise LostRankError(text) if seat.rank == 0 else OtherTermsError(text)

    def make_learner(
        self, compute: Compute, settings: LearnerSettings, precision: Precision, weights: Weights | None = None
    ) -> ShardedLearner:
        """Join the others, and return this rank's learner.

        Args:
            weights: with which training begins; for rank 0.
        """
        model, dtype, local = compute.model, compute.dtype, self._seat.local
        return ShardedLearner(model, weights, settings, self.join(), dtype, precision, local)

    async def run(self, work: Callable[[], Awaitable[None]], telemetry: Telemetry) -> None:
        """Carry out a rank's work.

        Raises:
            LostRankError: a rank of another host has ended, or does not answer.
        """
        if not self._seat.has_other_hosts:
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
                    raise
            await self._note("")
            raise LostRankError(f"trainer.hosts: {await self._ended_rank()}") from cause

    async def _note(self, cause: str) -> None:
        """Note that this rank ends, and the cause; none if another one has ended."""
        with trio.move_on_after(_NOTE_SECONDS), suppress(RuntimeError, AttributeError):  # of a store that is gone
            note = partial(self._store.set, f"end/{self._seat.rank}", cause)
            await trio.to_thread.run_sync(note, abandon_on_cancel=True)

    async def _ended_rank(self) -> str:
        """Say which rank has ended first, and by which cause: what it has noted, or that it has not and is silent."""
        notes, beats = dict[int, str](), list[dict[int, int]]()
        with trio.move_on_after(_NOTE_SECONDS), suppress(RuntimeError):
            while True:
                notes, counts = await trio.to_thread.run_sync(self._ends, abandon_on_cancel=True)
                beats.append(counts)
                for rank, cause in notes.items():
                    if cause:
                        return f"{self._title(rank)} has ended: {cause}"
                await trio.sleep(_BEAT_SECONDS / 10)
        silent = [rank for rank, count in beats[0].items() if count == beats[-1][rank]] if beats else [0]
        ended = ", ".join(self._title(rank) for rank in silent if rank not in notes) or "a rank"
        return f"{ended} has ended: its process or its host was killed, or its link is cut; its host's log may say more"

    def _ends(self) -> tuple[dict[int, str], dict[int, int]]:
        """Return what ranks that end have noted, and how many beats each rank has counted."""
        store, ranks = self._store, range(self._seat.count)
        notes = {rank: store.get(f"end/{rank}").decode() for rank in ranks if store.check([f"end/{rank}"])}
        return notes, {rank: store.add(f"beat/{rank}", 0) for rank in ranks}

    def _title(self, rank: int) -> str:
        return f"rank {rank} on host {rank // self._seat.local}"

    async def _watch(self, telemetry: Telemetry) -> None:
        """Count this rank's beats in the store of rank 0, which also compares those of the others. End this process
        when one stops: its threads may wait for the other rank for ever.
        """
        while self._store is None:
            await trio.sleep(_BEAT_SECONDS)
        watched = 1 if self._seat.rank else self._seat.count
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
                telemetry.event("failed", error=error)
                os._exit(EXIT_TRANSIENT)
            await trio.sleep(_BEAT_SECONDS)

    def _beat(self) -> list[int]:
        """Count a beat; return the counts of the ranks that this one watches."""
        store, seat = self._store, self._seat
        own = store.add(f"beat/{seat.rank}", 1)
        return [own] if seat.rank else [store.add(f"beat/{rank}", 0) for rank in range(seat.count)]


def _is_of_ranks(error: BaseException) -> bool:
    """Return whether an error comes from the connections of ranks. gloo has no errors of its own: what tells them from
    mistakes of this process is the module that was left with them.
    """
    modules = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)]
    is_of_torch = bool(modules) and modules[-1].startswith("torch.distributed")
    return isinstance(error, RuntimeError) and is_of_torch and not isinstance(error, torch.OutOfMemoryError)
