"""Work of a worker that takes seconds, in a thread beside the serving, in step with the other ranks.

With tensor parallelism a rank has a part of most tensors, so all ranks read a tensor together, by an all-reduce that
waits for every rank. A rank that left alone, because it was cancelled or failed, would leave the others waiting for
ever, or would give them a part of another tensor. So no rank leaves alone: after each tensor all of them agree whether
they go on.

The rule for whoever uses `RankSteps`: all ranks call `read` and `agree` in the same order, whatever happens on one of
them. What may fail on one rank alone is done within `local`; what decides whether there is another `read` is computed
from data that all ranks share.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, distributed

from grailnode.engine.vllm.inside.served_weights import (
    OTHER_RANK_FAILED,
    Gather,
    ServedWeights,
    ServedWeightsError,
    Signal,
)

Cancelled = Callable[[], bool]
Values = dict[str, Any]


class CancelledError(Exception):
    """Another version is to be staged instead."""


class Job:
    """Work in a thread, with its result when it is finished, or the error that ended it."""

    def __init__(self, work: Callable[[Cancelled], Values]) -> None:
        self._cancelled = threading.Event()
        self._result: Values = {"running": True}
        self._error: Exception | None = None
        self._work = work
        self._thread = threading.Thread(target=self._run, daemon=True, name="grailnode-job")
        self._thread.start()

    def _run(self) -> None:
        start = perf_counter()
        try:
            with torch.inference_mode():
                self._result = self._work(self._cancelled.is_set) | {"seconds": perf_counter() - start}
        except Exception as error:  # noqa: BLE001 - whatever it is, the node gets it as its answer
            self._error = error

    def stop(self) -> None:
        """End the work at its next tensor, on all ranks, and wait for that."""
        self._cancelled.set()
        self._thread.join()

    def state(self) -> Values:
        """Return the result, or that there is none yet."""
        if self._error is not None:
            raise self._error
        return self._result


class RankSteps:
    """The steps of one job, as this rank sees them; the same without tensor parallelism."""

    def __init__(self, engine_weights: ServedWeights, cancelled: Cancelled) -> None:
        self._weights = engine_weights
        self._cancelled = cancelled
        self._failure: Exception | None = None
        self._memory = threading.local()

    @contextmanager
    def local(self) -> Iterator[None]:
        """Keep what is raised within until the other ranks know of it: the next `read` or `agree` raises it."""
        try:
            yield
        except Exception as error:
            # Nobody waits for this rank.
            if self._weights.is_alone:
                raise
            self._failure = self._failure or error

    def check(self) -> None:
        """Raise CancelledError, within `local`, if the job was cancelled."""
        if self._cancelled():
            raise CancelledError

    def read(self, name: str) -> Tensor:
        """Agree, and return a tensor of the checkpoint as it is served; valid until this thread reads the next one."""
        # Threads use what they read side by side, so each has a buffer.
        if not hasattr(self._memory, "buffer"):
            self._memory.buffer = self._weights.buffer()
        tensor = torch.empty(0)
        with self.local():
            tensor = self._weights.read(name, self._memory.buffer)
        self.agree()
        return tensor

    def agree(self) -> None:
        """Return when all ranks have come here, and can go on.

        Raises CancelledError on all of them, if one was cancelled, or an error, if something failed on one.
        """
        with self.local():
            self.check()
        # What this rank says is decided before it meets the others, so that all hear the same.
        own = Signal.GO_ON if self._failure is None else Signal.FAILED
        largest = self._weights.agree(Signal.CANCELLED if isinstance(self._failure, CancelledError) else own)
        if largest == Signal.CANCELLED:
            raise CancelledError
        if largest == Signal.FAILED:
            raise self._failure or ServedWeightsError(OTHER_RANK_FAILED)


def rank_gather() -> Gather:
    """Return a function that completes a tensor with the parts of all ranks, over a group of its own.

    Threads take turns: ranks whose threads begin all-reduces in different orders would mix up their tensors.
    """
    group = distributed.new_group(backend="gloo")

    def gather(bits: Tensor) -> None:
        # an element is 0 on the ranks that do not have it, and equal on all that do
        distributed.all_reduce(bits.view(-1).view(torch.uint8), distributed.ReduceOp.MAX, group)

    return gather
