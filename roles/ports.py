"""The ports by which a role reaches the world: storage, compute, time and public randomness, each a small Protocol.

Every implementation passes the contract suite of its port in tests/. Retry, limits and faults are decorators around any
store.
"""

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:  # these import torch, which takes a second, and who needs a store or an error does without
    from torch import Tensor

    from protocol.chain.manifest import Manifest
    from protocol.digest import Weights
    from protocol.proof import Arithmetic
    from protocol.rollout.checking import Check, CheckRules
    from protocol.rollout.sampling import SamplingParams
    from protocol.rollout.sketch import SketchKey

LineReporter = Callable[[str], None]
"""Takes a line for the operator."""


class StoreError(Exception):
    """A request to the storage failed (I/O, network, permission). Trying again may help."""


class NotFoundError(StoreError):
    """The storage says that there is no object at this path."""


class TooLargeError(StoreError):
    """The object is larger than the ceiling that the caller gave."""


class StateError(Exception):
    """This node's own state is damaged, or not the one that it must go on with; another start cannot mend that.

    It is no StoreError: nobody may wait for it to pass, or go on without the object. `place` is the file, or the
    object's path in the state.
    """

    def __init__(self, place: object, what: str) -> None:
        super().__init__(place, what)
        self.place = str(place)
        self.what = what

    def __str__(self) -> str:
        return f"{self.place}: {self.what}; run `grailnode repair` (docs/guide/operate.md)"


class FencedError(Exception):
    """Another trainer or validator works with this node's key, so this node must stop."""


class RepairError(Exception):
    """What a node's state has lost cannot be rebuilt; the text says why, and what the operator can do."""


@dataclass(frozen=True)
class ObjectInfo:
    """One entry of a listing: a hint, never a proof, that an object exists. The size is in bytes."""

    path: str
    size: int


class ObjectStore(Protocol):
    """Objects by path. No answer of a store is trusted: digests and signatures decide.

    After a StoreError of `put` or `delete`, the object may or may not be stored; one of `list` breaks the listing off.
    """

    async def put(self, path: str, data: bytes) -> None:
        """Store an object whole, replacing any other; a reader sees the old one, the new one, or none, never a mixture.

        After a StoreError the object may or may not be stored.
        """

    async def get(self, path: str, max_bytes: int, *, offset: int = 0, size: int | None = None) -> bytes:
        """Read an object, or `size` bytes of it from `offset`; fewer if it ends sooner.

        Raises:
            NotFoundError: there is no such object.
            TooLargeError: the answer would be larger than `max_bytes`; no more than that was read.
            StoreError: the object could not be read.
        """

    def list(self, prefix: str, *, after: str = "") -> AsyncIterator[ObjectInfo]:
        """Yield the objects whose path begins with `prefix` and sorts after `after`, in order of path, page by page."""

    async def delete(self, path: str) -> None:
        """Remove an object; it is no error if there is none."""


@dataclass(eq=False)
class TurnCache:
    """What an engine may keep of a turn for the next one of the same episode; the content is the engine's own."""

    content: object = None


@dataclass(frozen=True)
class Request:
    """One completion to generate.

    Attributes:
        prompt: token ids.
        seed: 16 bytes, of its noise; empty for the most likely tokens, whose states nobody needs.
        sketch: of the window, if only the sketch of the hidden states is needed; an engine that computes it where it
            samples returns it in their place.
        offset: position of its first token, for the noise: how many tokens the policy drew in earlier turns.
        turn_cache: of its episode, if another turn may follow; what it has changes the costs alone.
    """

    prompt: tuple[int, ...]
    seed: bytes
    sketch: "SketchKey | None" = None
    offset: int = 0
    turn_cache: TurnCache | None = None


@dataclass(frozen=True)
class Generation:
    """One completion.

    Attributes:
        tokens: token ids, with the stop token if the completion ended with one.
        hidden: float32 [T, D], the final hidden state (after the last norm) from which each token was drawn; [T, 0] if
            there is a sketch in its place.
        logprobs: of each token under the sampled distribution; for the operator, as training uses the validators'.
        sketch: 4 bytes a token (protocol/rollout/sketch.py), if it was requested and computed here.
    """

    tokens: tuple[int, ...]
    hidden: "Tensor"
    logprobs: tuple[float, ...]
    sketch: bytes = b""


@dataclass(frozen=True)
class CheckRequest:
    """One completion to check.

    Attributes:
        prompt, completion: token ids.
        seed: 16 bytes, of its noise.
        sketch: of the window.
        drawn: for each token of the completion whether the policy drew it, so that it is checked; None if it drew all.
            The noise of the n-th token that it drew is that of position n.
    """

    prompt: tuple[int, ...]
    completion: tuple[int, ...]
    seed: bytes
    sketch: "SketchKey"
    drawn: tuple[bool, ...] | None = None

    @property
    def drawn_tokens(self) -> tuple[int, ...]:
        """The tokens that are checked."""
        return self.completion if self.drawn is None else tuple(compress(self.completion, self.drawn))


class EngineError(Exception):
    """The engine cannot serve: it crashed, ran out of memory, or has no policy."""


class Engine(Protocol):
    """A policy that can be sampled and checked. One version serves a request from its first token to its last.

    Every request raises EngineError if the engine has no policy, or broke.
    """

    @property
    def version(self) -> int | None:
        """The policy version that requests are served by; None before the first commit."""

    @property
    def takes_patches(self) -> bool:
        """Whether patches lead from the version that is served to newer ones. An engine that takes none computes with
        the very tensors that it stages, or converts them, for less than a patch costs it, or does not have them any
        more, or has taken so many patches that whole weights make its next restart shorter.
        """

    @property
    def arithmetic(self) -> "Arithmetic":
        """How the engine computes the completions that it samples, and those that it checks."""

    async def stage(self, version: int, weights: "Weights") -> None:
        """Prepare a policy while the current one goes on serving. Replaces a policy that was staged before.

        The tensors never change afterwards, but equal ones may take their places in `weights`, so that they are in
        memory once. If they do not fit the model (EngineError), the current one still serves.
        """

    async def stage_patch(self, version: int, patch: bytes, manifest: "Manifest") -> None:
        """Prepare the version that a patch leads to from the served one, while that goes on serving.

        Args:
            patch: bytes with the digest that the verified manifest names.

        Raises:
            EngineError: the patch is for other weights than those that serve, or does not lead to those of the
                manifest; the current policy still serves.
        """

    async def commit(self) -> None:
        """Serve the staged policy from the next request on.

        Raises:
            EngineError: no policy is staged, or the swap failed: the old policy still serves, or none does.
        """

    async def generate(self, requests: Sequence[Request], params: "SamplingParams") -> list[Generation]:
        """Sample one completion for each request, in order, by seed-bound sampling.

        Either all requests of a call have a seed, or none has.
        """

    async def check(self, requests: Sequence[CheckRequest], rules: "CheckRules") -> "list[Check]":
        """Check completions by one prefill over each; return the results of the tokens that are checked, in order.

        The states and logits stay where they are computed, so that a policy on several GPUs can be judged.

        Raises:
            ValueError: a token id outside the vocabulary (callers check hostile ids first).
        """


class Clock(Protocol):
    """Time. Only deadlines are taken from it; order comes from versions and rounds."""

    def now(self) -> float:
        """Return the seconds since the Unix epoch."""

    async def sleep_until(self, moment: float) -> None:
        """Return at or after a moment (seconds since the Unix epoch)."""


class BeaconError(Exception):
    """A beacon round is not available: it is late, or no relay gave a true one. Windows are delayed, never weakened."""


class Beacon(Protocol):
    """Public randomness by round, verified before it is returned."""

    async def randomness(self, round_number: int) -> bytes:
        """Return the 32 bytes of a round; this waits until the round is out.

        Raises:
            BeaconError: there was no true answer within the adapter's deadline; trying again may help.
        """


class Telemetry(Protocol):
    """Where a node reports what happens, for people and for Prometheus. It never raises and never waits."""

    def event(self, name: str, **fields: str | int | float) -> None:
        """Log an event; its number and the numbers among its fields are metrics as well."""
