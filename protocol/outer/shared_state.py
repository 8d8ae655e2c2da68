"""The FP32 state that all sites share, and the step from one round to the next (docs/spec/outer-round.md).

The arithmetic is that of protocol/pseudogradient/arithmetic.py, part by part, with the contributions in the order of
the round manifest. A step makes a new state, so a contribution that turns out to be broken leaves the old one whole.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, Final

import numpy as np
import torch

from protocol.digest import Weights, tensor_digest, weights_digest
from protocol.errors import ContributionError, MalformedError
from protocol.outer.round_records import OuterState, RoundRules
from protocol.pseudogradient import ContributionDecoder, Method, Part, Payload, parts_of, streams_of
from protocol.pseudogradient.arithmetic import Floats, add_contribution, divide

OrderedMap = Callable[[Callable[..., Any], Iterable[Any]], Iterator[Any]]
"""Computes a function of some values, and yields the results in the order of the values."""

_CHUNK: Final = 1 << 18
"""Elements of a part that one thread applies at a time."""


@contextmanager
def ordered_map(threads: int) -> Iterator[OrderedMap]:
    """Give a map that computes in so many threads."""
    if threads == 1:
        yield map
        return
    with ThreadPoolExecutor(threads) as pool:
        yield pool.map


@dataclass(frozen=True)
class SharedState:
    """The weights and the outer momentum between two rounds."""

    step: int  # number of rounds that changed the weights
    weights: Mapping[str, torch.Tensor]  # contiguous float32 tensors on the CPU, by name; nobody changes them in place
    momentum: Mapping[str, torch.Tensor] | None  # the same names and shapes; None if there is none
    digests: OuterState  # of all of it

    @classmethod
    def of(cls, step: int, weights: Weights, momentum: Weights | None, each: OrderedMap = map) -> "SharedState":
        """Return a state with its digests, which `each` computes tensor by tensor."""
        digests = [b"" if own is None else _digest(own, each) for own in (weights, momentum)]
        state = OuterState(step=step, weights=digests[0], momentum=digests[1])
        return cls(step, dict(weights), None if momentum is None else dict(momentum), state)

    @classmethod
    def begin(cls, weights: Weights, *, has_momentum: bool) -> "SharedState":
        """Return the state with which the first round begins, from weights of any floating-point dtype."""
        floats = {name: tensor.detach().to("cpu", torch.float32).contiguous() for name, tensor in weights.items()}
        return cls.of(0, floats, _zeros(floats) if has_momentum else None)

    @property
    def parts(self) -> tuple[Part, ...]:
        """The parts in which contributions and shards come."""
        return parts_of({name: tensor.shape for name, tensor in self.weights.items()})

    def stream_number(self, rules: RoundRules) -> int:
        """Return which of the streams the contributions to the next round have."""
        return self.step % len(streams_of(self.weights, rules.streams))

    def stream(self, rules: RoundRules) -> dict[str, torch.Tensor]:
        """Return the weights that the contributions to the next round can change."""
        names = streams_of(self.weights, rules.streams)[self.stream_number(rules)]
        return {name: self.weights[name] for name in names}

    def bf16_view(self) -> dict[str, torch.Tensor]:
        """Return the weights rounded to BF16, nearest, ties to even: the policy version of this state."""
        return {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in self.weights.items()}

    def with_momentum(self, rules: RoundRules) -> "SharedState":
        """Return this state, with a momentum of zeros if the rules of the next round need one and there is none."""
        if self.momentum is not None or rules.momentum == 0:
            return self
        return self.of(self.step, self.weights, _zeros(self.weights))

    def stream_parts(self, rules: RoundRules) -> tuple[Part, ...]:
        """Return the parts that contributions to the next round have."""
        return parts_of({name: tensor.shape for name, tensor in self.stream(rules).items()})

    def values_of(
        self,
        payloads: Sequence[Payload],
        rules: RoundRules,
        each: OrderedMap = map,
        at_once: int = 1,
        places: Collection[int] | None = None,
    ) -> Iterator[tuple[Part, Callable[[], Iterator[Floats]]]]:
        """Yield the parts of contributions to the next round, or some, and for each what decodes the values of each
        contribution: MalformedError, LimitError or ContributionError if one is broken; only all parts check the norms.
        Values stay as they are until `at_once` others, so many as `each` decodes at a time, were decoded.
        """
        stream, parts = self.stream(rules), self.stream_parts(rules)
        decoders = [ContributionDecoder(payload, stream, self.digests.weights) for payload in payloads]
        places = sorted(range(len(parts)) if places is None else places)
        largest = max((parts[place].elements for place in places), default=0)
        buffers = [np.empty(largest, np.float32) for _ in decoders[:at_once]]

        def rows(place: int) -> Iterator[Floats]:
            for begin in range(0, len(decoders), at_once):
                own = zip(decoders[begin : begin + at_once], buffers, strict=False)
                yield from each(lambda pair: pair[0].values(place, pair[1]), own)

        for place in places if payloads else ():
            yield parts[place], partial(rows, place)

    def after(
        self, payloads: Sequence[Payload], factors: Sequence[float], rules: RoundRules, threads: int = 1
    ) -> "SharedState":
        """Return the state after a round of these payloads, in the manifest's order, each with a factor; none changes
        nothing. Each thread has one contribution's part in memory. Their number changes no bit of the result.
        """
        if not payloads:
            return self
        weights, momentum = dict(self.weights), dict(self.momentum or {})
        with ordered_map(threads) as each:
            for part, decode in self.values_of(payloads, rules, each, threads):
                base = part.gather(self.weights).copy()
                own = np.zeros_like(base) if self.momentum is None else part.gather(self.momentum).copy()
                # A float32 sum depends on its order, and all sites must have the same weights: so the order is the
                # manifest's.
                mean, chunks = np.zeros_like(base), [*pairwise([*range(0, part.elements, _CHUNK), part.elements])]
                for factor, values in zip(factors, decode(), strict=True):
                    add = partial(_add_chunk, mean, values, factor)
                    list(each(add, chunks))
                step = partial(_step_chunk, rules.method, base, own, mean, len(payloads))
                list(each(step, chunks))
                weights |= part.scatter(base)
                momentum |= part.scatter(own)
            return self.of(self.step + 1, weights, None if self.momentum is None else momentum, each)

    def shards(self, shard_bytes: int) -> Iterator[bytes]:
        """Yield the state's bytes in shards of the same size; the last one may be smaller."""
        rest = bytearray()
        for part in self.parts:
            for tensors in (self.weights, self.momentum):
                if tensors is not None:
                    rest += part.gather(tensors).astype("<f4", copy=False).tobytes()
                while len(rest) >= shard_bytes:
                    yield bytes(rest[:shard_bytes])
                    del rest[:shard_bytes]
        if rest:
            yield bytes(rest)

    @classmethod
    def from_shards(cls, shards: Iterator[bytes], digests: OuterState, parts: Sequence[Part]) -> "SharedState":
        """Return the state of shards (hostile bytes, in order) that has these digests, in the parts of this run's
        weights: MalformedError for too few or too many bytes, ContributionError for other digests.
        """
        rest = bytearray()
        weights, momentum = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
        for part in parts:
            for tensors in (weights, momentum) if digests.momentum else (weights,):
                while len(rest) < 4 * part.elements:
                    shard = next(shards, b"")
                    if not shard:
                        raise MalformedError("fewer bytes than a state has", part.names[0])
                    rest += shard
                values = np.frombuffer(bytes(rest[: 4 * part.elements]), "<f4").astype(np.float32)
                del rest[: 4 * part.elements]
                tensors.update(part.scatter(values))
        if rest or next(shards, b""):
            raise MalformedError("more bytes than a state has", "shards")
        state = cls.of(digests.step, weights, momentum if digests.momentum else None)
        if state.digests != digests:
            raise ContributionError("the shards give another state than the round manifest", "shards")
        return state


def _digest(weights: Weights, each: OrderedMap) -> bytes:
    return weights_digest(dict(zip(weights, each(tensor_digest, weights.values()), strict=True)), weights)


def _zeros(weights: Weights) -> dict[str, torch.Tensor]:
    return {name: torch.zeros_like(tensor) for name, tensor in weights.items()}


def _add_chunk(total: Floats, values: Floats, factor: float, chunk: tuple[int, int]) -> None:
    begin, end = chunk
    add_contribution(total[begin:end], values[begin:end], factor)


def _step_chunk(
    method: Method, base: Floats, momentum: Floats, total: Floats, count: int, chunk: tuple[int, int]
) -> None:
    begin, end = chunk
    divide(total[begin:end], count)
    method.step(base[begin:end], momentum[begin:end], total[begin:end])
