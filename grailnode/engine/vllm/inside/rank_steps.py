"""Keeps the ranks of tensor parallelism in step while each of them stages a version.

A rank has a part of most tensors, so all ranks read a tensor together, by an all-reduce that waits for every rank. A
rank that left alone, because it was cancelled or failed, would leave the others waiting for ever, or would give them a
part of another tensor. So no rank leaves alone: it says in the next all-reduce that it has to, and then all of them
leave. This is one more element of the tensor that is reduced anyway.

The rule for whoever uses `RankSteps`: all ranks call `read` and `agree` in the same order, whatever happens on one of
them. What may fail on one rank alone is done within `local`; what decides whether there is another `read` is computed
from data that all ranks share.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from grailnode.engine.vllm.inside.served_weights import Gather, ServedWeights, ServedWeightsError, Signal

Cancelled = Callable[[], bool]


class CancelledError(Exception):
    """Another version is to be staged instead."""


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
            if self._weights.is_alone:
                raise
            self._failure = error

    def check(self) -> None:
        """End the work of this rank within `local` if the job was cancelled.

        Raises:
            CancelledError: it was.
        """
        if self._cancelled():
            raise CancelledError

    def read(self, name: str) -> Tensor:
        """Return a tensor of the checkpoint as it is served, on all ranks; valid until this thread reads the next one.

        Raises:
            CancelledError: on all ranks, if one of them was cancelled.
            Exception: on all ranks, if something failed on one of them; there it is that failure.
        """
        if not hasattr(self._memory, "buffer"):
            self._memory.buffer = self._weights.buffer()
        tensor, signal = self._weights.read(name, self._signal(), self._memory.buffer)
        self._leave(signal)
        return tensor

    def agree(self) -> None:
        """Return when all ranks have come here, and can go on; raises what `read` does."""
        self._leave(self._weights.agree(self._signal()))

    def _signal(self) -> Signal:
        if self._failure is not None and not isinstance(self._failure, CancelledError):
            return Signal.FAILED
        return Signal.CANCELLED if self._failure is not None or self._cancelled() else Signal.GO_ON

    def _leave(self, signal: Signal) -> None:
        """Raise what ends the job; `signal` is the largest of any rank."""
        if signal == Signal.CANCELLED:
            raise CancelledError
        if signal == Signal.FAILED:
            raise self._failure or ServedWeightsError("another rank of this server failed, and its error says why")


def rank_gather() -> Gather:
    """Return a function that completes a tensor with the parts of all ranks, over a group of its own.

    Threads take turns: ranks whose threads begin all-reduces in different orders would mix up their tensors.
    """
    from torch import distributed  # noqa: PLC0415 - only with tensor parallelism

    group = distributed.new_group(backend="gloo")

    def gather(bits: Tensor) -> None:
        # an element is 0 on the ranks that do not have it, and equal on all that do
        distributed.all_reduce(bits.view(-1).view(torch.uint8), distributed.ReduceOp.MAX, group)

    return gather
