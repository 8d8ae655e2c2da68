"""How a role reaches the world: storage, compute, time and public randomness, each a small Protocol.

Every implementation passes the contract suite of its port in tests/. Retry, limits and faults are decorators around any
store.
"""

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from protocol.digest import Weights
from protocol.rollout.sampling import SamplingParams


class StoreError(Exception):
    """The storage did not do what was asked (I/O, network, permission). Trying again may help."""


class NotFoundError(StoreError):
    """There is no object at this path, as far as the storage says."""


class TooLargeError(StoreError):
    """The object is larger than the ceiling that the caller gave."""


@dataclass(frozen=True)
class ObjectInfo:
    """A hint, never a proof: what a listing says of an object.

    Attributes:
        path: '/'-separated, relative to the store's root.
        size: bytes.
    """

    path: str
    size: int


class ObjectStore(Protocol):
    """Objects by path. Nothing that it says is trusted: digests and signatures decide."""

    async def put(self, path: str, data: bytes) -> None:
        """Store an object whole, replacing any other; a reader sees the old one, the new one, or none, never a mixture.

        Raises:
            StoreError: it may or may not have been stored.
        """

    async def get(self, path: str, max_bytes: int, *, offset: int = 0, size: int | None = None) -> bytes:
        """Read an object, or `size` bytes of it from `offset`; fewer where it ends sooner.

        Raises:
            NotFoundError: no object there.
            TooLargeError: the answer would be larger than `max_bytes`; no more than that was read.
            StoreError: it could not be read.
        """

    def list(self, prefix: str, *, after: str = "") -> AsyncIterator[ObjectInfo]:
        """Objects whose path begins with `prefix` and sorts behind `after`, in order of path, page by page.

        Raises:
            StoreError: the listing broke off.
        """

    async def delete(self, path: str) -> None:
        """Remove an object; no error where there is none.

        Raises:
            StoreError: it may or may not be gone.
        """


@dataclass(frozen=True)
class Request:
    """One completion to generate: prompt token ids, and the 16-byte seed of its noise."""

    prompt: tuple[int, ...]
    seed: bytes


@dataclass(frozen=True)
class Generation:
    """One completion.

    Attributes:
        tokens: the completion's token ids, its end-of-sequence token included where it ended with one.
        hidden: float32 [T, D], the final hidden state (after the last norm) from which each token was drawn.
        logprobs: the log-probability of each token under the sampled distribution, as this engine computed it: for the
            operator's eyes; what is trained on rests on the validators' values.
    """

    tokens: tuple[int, ...]
    hidden: Tensor
    logprobs: tuple[float, ...]


@dataclass(frozen=True)
class Forward:
    """What a prefill says of one completion.

    Attributes:
        hidden: float32 [T, D], the final hidden state from which each token is drawn.
        project: logits float32 [n, V] of any such states [n, D], by the policy that computed these: the same for all
            completions of a call. With a large vocabulary the logits of a group would be gigabytes, so nothing holds
            them all (roles/policy/prefill.py). Raises EngineError.
    """

    hidden: Tensor
    project: Callable[[Tensor], Tensor]

    @property
    def logits(self) -> Tensor:
        """float32 [T, V], row t being those from which token t is drawn; computed each time."""
        return self.project(self.hidden)


class EngineError(Exception):
    """The engine cannot serve: it crashed, ran out of memory, or holds no policy."""


class Engine(Protocol):
    """A policy that can be sampled and checked. Requests are served by one version from their first token to their
    last.
    """

    @property
    def version(self) -> int | None:
        """The policy version that requests are served by; None before the first commit."""

    async def stage(self, version: int, weights: Weights) -> None:
        """Prepare a policy beside the one being served, which goes on. Replaces anything staged before.

        Raises:
            EngineError: the weights do not fit the model; what is served is untouched.
        """

    async def commit(self) -> None:
        """Serve what was staged from the next request on.

        Raises:
            EngineError: nothing is staged, or the swap failed and the old policy is still served.
        """

    async def generate(self, requests: Sequence[Request], params: SamplingParams) -> list[Generation]:
        """Sample one completion for each request, in order, by seed-bound sampling.

        Raises:
            EngineError: no policy, or it broke.
        """

    async def greedy(self, prompts: Sequence[tuple[int, ...]], params: SamplingParams) -> list[tuple[int, ...]]:
        """The most likely completion of each prompt (no noise): token ids, in order.

        Raises:
            EngineError: no policy, or it broke.
        """

    async def forward(
        self, prompts: Sequence[tuple[int, ...]], completions: Sequence[tuple[int, ...]]
    ) -> list[Forward]:
        """One prefill over each prompt with its completion, in order.

        Raises:
            EngineError: no policy, or it broke.
            ValueError: a token id outside the vocabulary (callers check hostile ids first).
        """


class Clock(Protocol):
    """Time. Only deadlines are taken from it; order comes from versions and rounds."""

    def now(self) -> float:
        """Seconds since the Unix epoch."""

    async def sleep_until(self, moment: float) -> None:
        """Return at or after a moment (seconds since the Unix epoch)."""


class BeaconError(Exception):
    """The beacon's round could not be had; it is late, or no relay gave a true one. Windows are delayed, never
    weakened.
    """


class Beacon(Protocol):
    """Public randomness by round, verified before it is returned."""

    async def randomness(self, round_number: int) -> bytes:
        """The 32 bytes of a round; waits until it is out.

        Raises:
            BeaconError: no true answer within the adapter's deadline; trying again may help.
        """


class Telemetry(Protocol):
    """Where a node reports what happens, for people and for Prometheus. It never raises and never waits."""

    def event(self, name: str, **fields: str | int | float) -> None:
        """Log an event; its number and the numbers among its fields are metrics as well."""
