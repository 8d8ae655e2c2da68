"""Seed-bound sampling inside vLLM: a logits processor adds the noise, so that greedy decoding gives the required
tokens.

Load it with `vllm serve MODEL --logits-processors grailnode.engine.vllm_sampling:SeedBoundLogitsProcessor` and send
each request with temperature 0 and `vllm_xargs` {"grailnode_seed": 32 hexadecimal digits, "grailnode_temperature": 1.0,
...}. It implements the interface of vLLM's v1 engine (`vllm.v1.sample.logits_processor`); requests without a seed are
not changed. The noise is that of protocol/rollout/sampling.py, integer arithmetic on the device of the logits: its bits
are the same on every machine.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from protocol.rollout.filters import Filters, allowed_tokens
from protocol.rollout.sampling import SEED_BYTES, noise, seed_words

PREFIX = "grailnode_"


@dataclass(frozen=True)
class SeededRequest:
    """The sampling of one request.

    Attributes:
        seed: 16 bytes; temperature: divides the logits; filters: tokens that may be sampled.
        generated: token ids of the completion so far: vLLM's own list, to which vLLM appends.
    """

    seed: bytes
    temperature: float
    filters: Filters
    generated: Sequence[int]

    @classmethod
    def parse(cls, arguments: Mapping[str, Any] | None, generated: Sequence[int]) -> "SeededRequest | None":
        """Parse a request's extra arguments; None if there is no seed among them.

        Raises:
            ValueError: an unknown argument, or one with an invalid value.
        """
        values = {key.removeprefix(PREFIX): value for key, value in (arguments or {}).items() if key.startswith(PREFIX)}
        if "seed" not in values:
            return None
        unknown = values.keys() - {"seed", "temperature", "top_k", "top_p", "min_p"}
        if unknown:
            raise ValueError(f"{PREFIX}{min(unknown)}: no such argument")
        seed = bytes.fromhex(str(values["seed"]))
        temperature = float(values.get("temperature", 1.0))
        if len(seed) != SEED_BYTES or not temperature > 0.0:
            raise ValueError(
                f"{PREFIX}seed has {2 * SEED_BYTES} hexadecimal digits, and {PREFIX}temperature is positive"
            )
        filters = Filters(int(values.get("top_k", 0)), float(values.get("top_p", 1.0)), float(values.get("min_p", 0.0)))
        return cls(seed, temperature, filters, generated)


class SeedBoundLogitsProcessor:
    """Implements vLLM's `LogitsProcessor`: the logits of seeded requests become scores whose largest is the required
    token.

    Args:
        vllm_config, device, is_pin_memory: arguments that vLLM passes; they are not used.
    """

    def __init__(
        self, vllm_config: Any = None, device: torch.device | None = None, is_pin_memory: bool = False
    ) -> None:
        self._rows: dict[int, SeededRequest] = {}

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        """Refuse a request that cannot be sampled.

        Raises:
            ValueError: its seed, temperature or filters are invalid, or vLLM would add noise of its own.
        """
        if SeededRequest.parse(sampling_params.extra_args, ()) is not None and sampling_params.temperature != 0:
            raise ValueError(f"a request with {PREFIX}seed needs temperature 0: the noise is in the logits")

    def is_argmax_invariant(self) -> bool:
        """Return False: this processor changes which token is the most likely one."""
        return False

    def update_state(self, batch_update: Any) -> None:
        """Follow the changes of vLLM's batch: rows removed, added and moved, in this order."""
        if batch_update is None:
            return
        for row in batch_update.removed:
            self._rows.pop(row, None)
        for row, params, _, generated in batch_update.added:
            request = SeededRequest.parse(params.extra_args, generated)
            self._rows.pop(row, None)
            if request is not None:
                self._rows[row] = request
        for source, target, direction in batch_update.moved:
            request, replaced = self._rows.pop(source, None), self._rows.pop(target, None)
            if request is not None:
                self._rows[target] = request
            if replaced is not None and getattr(direction, "name", direction) == "SWAP":
                self._rows[source] = replaced

    def apply(self, logits: Tensor) -> Tensor:
        """Return the scores of seeded rows, and the logits of all others.

        Args:
            logits: float [B, V]; changed in place.
        """
        if not self._rows:
            return logits
        places = sorted(self._rows)
        requests = [self._rows[place] for place in places]
        rows = torch.tensor(places, device=logits.device)
        temperatures = torch.tensor([request.temperature for request in requests], device=logits.device)
        positions = torch.tensor([len(request.generated) for request in requests], device=logits.device)
        words = seed_words([request.seed for request in requests], logits.device)
        scaled = logits[rows].to(torch.float32) / temperatures[:, None]
        scores = scaled + noise(words, positions, logits.shape[-1])
        for place, request in enumerate(requests):
            if request.filters.active:
                scores[place] = scores[place].masked_fill(~allowed_tokens(scaled[place], request.filters), -torch.inf)
        logits[rows] = scores.to(logits.dtype)
        return logits
