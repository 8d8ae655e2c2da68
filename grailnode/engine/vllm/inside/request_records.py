"""What was sampled for each request: tokens, log-probabilities, hidden states, and the weights that each came from.

A record is written where the token is drawn, in the worker, with the version of the verified weights in memory at that
moment. The node takes the records of finished requests and compares them with vLLM's answers.

Prompts that are computed in several steps, and requests that vLLM computes again, write a position twice; the last
write counts, as it does for vLLM. Async scheduling begins a step before vLLM knows the tokens of the last one, so one
more token may be drawn after the stop token: the node cuts it off, and it is dropped here if the record was taken.
"""

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Any, ClassVar, Final

import numpy as np
import torch
from pydantic import ConfigDict, Field, NonNegativeInt, PositiveFloat, TypeAdapter
from torch import Tensor

from protocol.rollout.checking import CheckRules
from protocol.rollout.filters import EVERY_TOKEN, Filters
from protocol.rollout.sampling import SEED_BYTES
from protocol.rollout.sketch import SketchKey

ARGUMENT: Final = "grailnode"
"""The key of a request's extra arguments (`SamplingParams.extra_args`) under which ours are."""

GIVEN: Final = -1  # in place of a token that is not checked
_MAX_RECORDS: Final = 65_536  # what no node takes or abandons is dropped after so many newer records

Seed = Annotated[bytes, Field(min_length=SEED_BYTES, max_length=SEED_BYTES)]


@dataclass(frozen=True)
class CheckArguments:
    """How a prefill is checked."""

    begin: int  # position of the first token whose state is needed, prompt and completion together
    tokens: tuple[int, ...]  # of the completion, GIVEN for those that are not checked
    seed: Seed
    sketch: SketchKey
    rules: CheckRules


@dataclass(frozen=True)
class RequestArguments:
    """Our arguments of one request, which the node sends as JSON."""

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid", ser_json_bytes="hex", val_json_bytes="hex")

    request: str  # the id under which its record is asked for
    seed: Seed | None = None  # of its noise; None for the most likely tokens
    temperature: PositiveFloat = 1.0
    filters: Filters = EVERY_TOKEN
    states: bool = True
    sketch: SketchKey | None = None  # of the states, recorded in their place
    check: CheckArguments | None = None  # for a prefill, of which nothing else is recorded
    offset: NonNegativeInt = 0  # position of the first token, for the noise

    def to_json(self) -> str:
        """Return what `parse` reads."""
        return _adapter.dump_json(self).decode()

    @classmethod
    def parse(cls, extra: Mapping[str, Any] | None) -> "RequestArguments | None":
        """Parse a request's extra arguments; None if ours are not among them. ValueError if they are invalid."""
        text = (extra or {}).get(ARGUMENT)
        return None if text is None else _adapter.validate_json(text)


_adapter: Final = TypeAdapter(RequestArguments)


def validate(sampling_params: Any) -> None:
    """Raise ValueError if a request's arguments are invalid, or vLLM would add noise or penalties of its own."""
    if RequestArguments.parse(sampling_params.extra_args) is None:
        return
    # vLLM takes the largest logit at temperature 0. Our token has the largest one (row_sampling.py), so vLLM adds no
    # noise of its own.
    if sampling_params.temperature != 0:
        raise ValueError(f"a request with {ARGUMENT} needs temperature 0: the noise is in the logits")
    penalties = (sampling_params.presence_penalty, sampling_params.frequency_penalty)
    if any(penalties) or sampling_params.repetition_penalty != 1.0:
        raise ValueError(f"a request with {ARGUMENT} takes no penalties")


class Step:
    """What one step of the engine drew for rows of its batch, on its way to the host: nothing waits for it there. The
    version is None for weights that were not verified. Tokens are int64 [B], log-probabilities float32 [B]; states are
    those from which the tokens were drawn, [B, D], their sketch, uint8 [B, 4], or [B, 0].
    """

    def __init__(self, version: int | None, states: Tensor, tokens: Tensor, log_probabilities: Tensor) -> None:
        self.version = version
        self.dtype = np.uint8 if states.dtype == torch.uint8 else np.float32
        columns = tokens[:, None], log_probabilities[:, None], states if self.dtype == np.uint8 else states.float()
        # One tensor, so that it is one copy; vLLM writes into the memory of the states in its next step.
        rows = torch.cat([column.contiguous().view(torch.uint8) for column in columns], dim=1)
        self._rows, self._copied = rows, None
        if rows.is_cuda:
            self._rows = torch.empty(rows.shape, dtype=torch.uint8, pin_memory=True).copy_(rows, non_blocking=True)
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record()

    @cached_property
    def rows(self) -> list[bytes]:
        """What was drawn for each row: its token, its log-probability, and its states in float32 or their sketch."""
        if self._copied is not None:
            self._copied.synchronize()
        data, width = self._rows.numpy().tobytes(), self._rows.shape[1]
        return [data[begin : begin + width] for begin in range(0, len(data), width)]


@dataclass
class Record:
    """The record of one request: for each token the step that drew it, and its row in that step; or, by position of the
    first token, the version and what was checked in a pass of a prefill, float32 [N, S].
    """

    tokens: list[tuple[Step, int]] = field(default_factory=list)
    prefill: dict[int, tuple[int | None, Tensor]] = field(default_factory=dict)

    def write_prefill(self, position: int, version: int | None, checked: Tensor) -> None:
        """Record what was checked from a position on, in place of that at it and after it."""
        # A prefill that vLLM preempted begins again, in pieces of other lengths.
        self.prefill = {begin: piece for begin, piece in self.prefill.items() if begin < position}
        self.prefill[position] = version, checked

    def collect(self) -> dict[str, Any]:
        """Return the record on the host: versions, tokens, log-probabilities float32 [T], and states float32 [T, D] or
        their sketch uint8 [T, 4]; or versions, and what was checked.
        """
        if self.prefill:
            parts = self.prefill.values()
            checked = torch.cat([part for _, part in parts])
            return {"versions": sorted({str(version) for version, _ in parts}), "checked": checked.cpu().numpy()}
        rows = np.frombuffer(b"".join(step.rows[row] for step, row in self.tokens), dtype=np.uint8)
        rows = rows.reshape(len(self.tokens), -1)
        return {
            # More than one means that a commit fell into the completion, and the node throws it away.
            "versions": sorted({str(version) for version in {step.version for step, _ in self.tokens}}),
            "tokens": rows[:, :8].copy().view(np.int64).ravel().tolist(),
            "log_probabilities": rows[:, 8:12].copy().view(np.float32).ravel(),
            "states": rows[:, 12:].copy().view(self.tokens[0][0].dtype),
        }


class RequestRecords:
    """The records of a worker's requests by id."""

    def __init__(self) -> None:
        self._records: OrderedDict[str, Record] = OrderedDict()
        self.sampled_states: Tensor | None = None  # [B, D], whose logits the model computed last
        self.version: int | None = None  # of the verified weights
        self.has_processor = False  # whether vLLM has made the logits processor

    def record(self, request: str) -> Record:
        """Return the record of a request, made if there is none."""
        if request not in self._records:
            self._records[request] = Record()
            while len(self._records) > _MAX_RECORDS:
                self._records.popitem(last=False)
        return self._records[request]

    def write(self, step: Step, requests: Sequence[str], positions: Sequence[int]) -> None:
        """Record the tokens that a step drew, at their positions in the completions, in place of any later ones.

        A token is dropped if those before it are not recorded: the record was taken or cleared meanwhile.
        """
        for row, (request, position) in enumerate(zip(requests, positions, strict=True)):
            record = self._records.get(request) if position else self.record(request)
            if record is None or position > len(record.tokens):
                continue
            # A request that vLLM computes again begins at an earlier position; what was drawn after it is void.
            if position < len(record.tokens):
                del record.tokens[position:]
            record.tokens.append((step, row))

    def take(self, request: str) -> dict[str, Any] | None:
        """Return a finished request's record and forget it; None if nothing was recorded."""
        # Taken once: a second answer with the same id is a fault.
        record = self._records.pop(request, None)
        return None if record is None or not (record.tokens or record.prefill) else record.collect()

    def forget(self, requests: Iterable[str]) -> None:
        """Forget the records of requests that nobody will ask for."""
        for request in requests:
            self._records.pop(request, None)

    def clear(self) -> None:
        self._records.clear()
        self.sampled_states = None


records: Final = RequestRecords()
"""The records of this worker: vLLM makes the logits processor and the worker extension, which share them."""
