"""Seed-bound sampling as a logits processor of vLLM's model runner V1 (`vllm.v1.sample.logits_processor`).

Load it with `--logits-processors grailnode.engine.vllm.inside.sampling_v1:SeedBoundSampling`. Requests without our
argument are not changed.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.v1.sample.logits_processor import LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates

from grailnode.engine.vllm.inside.request_records import RequestArguments, records, validate
from grailnode.engine.vllm.inside.row_sampling import DrawnRows

Row = tuple[RequestArguments, Sequence[int]]

rows: dict[int, Row] = {}
"""Our requests of this worker's batch by row, each with vLLM's own list of the tokens of its completion so far."""


class SeedBoundSampling(LogitsProcessor):  # type: ignore[misc]
    """Implements vLLM's `LogitsProcessor`: the largest logit of our requests becomes that of the required token."""

    def __init__(
        self, vllm_config: Any = None, device: torch.device | None = None, is_pin_memory: bool = False
    ) -> None:
        rows.clear()
        self._drawn: DrawnRows | None = None
        self._generated: list[Sequence[int]] = []
        records.has_processor = True

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        validate(sampling_params)

    def is_argmax_invariant(self) -> bool:
        """Return False: this processor changes which token is the most likely one."""
        return False

    def update_state(self, batch_update: Any) -> None:
        if process_dict_updates(rows, batch_update, _row):
            self._drawn = None

    def apply(self, logits: Tensor) -> Tensor:
        """Draw the tokens of our rows: logits float32 [B, V], changed in place."""
        if self._drawn is None:
            drawn = [(row, ours, tokens) for row, (ours, tokens) in sorted(rows.items()) if ours.check is None]
            self._drawn = DrawnRows([(row, ours) for row, ours, _ in drawn], logits.device)
            self._generated = [tokens for _, _, tokens in drawn]
        # The length of vLLM's own list is the position of the token that is drawn now.
        return self._drawn.draw(logits, np.array([len(tokens) for tokens in self._generated], np.int64), records)


def _row(sampling_params: Any, prompt: Sequence[int] | None, generated: Sequence[int]) -> Row | None:
    """Return what is kept of a request that comes into the batch; None if it is not ours."""
    arguments = RequestArguments.parse(sampling_params.extra_args)
    return None if arguments is None else (arguments, generated)
