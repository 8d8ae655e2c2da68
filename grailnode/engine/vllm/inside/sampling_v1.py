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

from grailnode.engine.vllm.inside.request_records import RequestArguments, records, validate
from grailnode.engine.vllm.inside.row_sampling import DrawnRows

rows: dict[int, tuple[RequestArguments, Sequence[int]]] = {}
"""Our requests of this worker's batch by their row, each with the tokens of its completion so far: vLLM's own list, to
which vLLM appends. The hidden states of prefills are found by it.
"""


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
        """Refuse a request that cannot be sampled."""
        validate(sampling_params)

    def is_argmax_invariant(self) -> bool:
        """Return False: this processor changes which token is the most likely one."""
        return False

    def update_state(self, batch_update: Any) -> None:
        """Follow the changes of vLLM's batch: rows removed, added and moved, in this order."""
        if batch_update is None:
            return
        self._drawn = None
        # vLLM's order: removals, then additions, which may reuse a row, then moves.
        for row in batch_update.removed:
            rows.pop(row, None)
        for row, params, _, generated in batch_update.added:
            arguments = RequestArguments.parse(params.extra_args)
            # The row may have belonged to a request of ours before.
            rows.pop(row, None)
            if arguments is not None:
                rows[row] = arguments, generated
        for source, target, direction in batch_update.moved:
            # Both rows are taken out before either is put back, so that a swap loses none.
            source_row, target_row = rows.pop(source, None), rows.pop(target, None)
            if source_row is not None:
                rows[target] = source_row
            if target_row is not None and direction.name == "SWAP":
                rows[source] = target_row

    def apply(self, logits: Tensor) -> Tensor:
        """Draw the tokens of our rows: logits float32 [B, V], changed in place."""
        if self._drawn is None:
            drawn = [(row, ours, tokens) for row, (ours, tokens) in sorted(rows.items()) if ours.check is None]
            self._drawn = DrawnRows([(row, ours) for row, ours, _ in drawn], logits.device)
            self._generated = [tokens for _, _, tokens in drawn]
        # The length of vLLM's own list is the position of the token that is drawn now.
        return self._drawn.draw(logits, np.array([len(tokens) for tokens in self._generated], np.int64), records)
