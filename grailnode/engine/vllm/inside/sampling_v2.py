"""Seed-bound sampling as a logits processor of vLLM's model runner V2 (`vllm.v1.worker.gpu.sample.logits_processor`).

Load it with `--logits-processors grailnode.engine.vllm.inside.sampling_v2:SeedBoundSampling`. V2 keeps a request in one
slot from its first to its last token, and tells for each row of logits which slot it belongs to. Speculative decoding
gives a request several rows; it is refused at start (docs/adr).
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor

from grailnode.engine.vllm.inside.request_records import RequestArguments, records, validate
from grailnode.engine.vllm.inside.row_sampling import DrawnRows

slots: dict[int, RequestArguments] = {}
"""Our requests of this worker by their slot."""


class SeedBoundSampling(LogitsProcessor):  # type: ignore[misc]
    """Implements V2's `LogitsProcessor`: the largest logit of our requests becomes that of the required token."""

    def __init__(self, vllm_config: Any, req_states: Any) -> None:
        self._prompt_lengths, self._prefill_lengths = req_states.prompt_len, req_states.prefill_len
        slots.clear()
        self._drawn = DrawnRows([], torch.device("cpu"))
        self._rows = np.empty(0, np.int64)
        self._batch: tuple[bytes, bytes] | None = None  # of the slots and of the rows that are drawn, the last time
        records.has_processor = True

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        validate(sampling_params)

    def add_request(self, req_idx: int, sampling_params: Any) -> bool:
        """Take a request into its slot; return whether it is ours."""
        arguments = RequestArguments.parse(sampling_params.extra_args)
        # vLLM reuses slots, and does not say when a request leaves one.
        slots.pop(req_idx, None)
        self._batch = None
        if arguments is not None:
            slots[req_idx] = arguments
        return arguments is not None

    def apply(self, logits: Tensor, ctx: Any) -> Tensor:
        """Draw the tokens of our rows: logits float32 [B, V], changed in place; each request in `ctx` has one row."""
        in_batch = ctx.idx_mapping_np
        lengths = ctx.seq_lens_upper_bound_np[: len(in_batch)]
        # A row of a prefill that goes on in the next step has logits, too, but vLLM draws nothing from them.
        whole = lengths >= self._prefill_lengths.np[in_batch]
        batch = in_batch.tobytes(), whole.tobytes()
        if batch != self._batch:
            requests = enumerate(map(slots.get, in_batch.tolist()))
            drawn = [(row, ours) for row, ours in requests if ours is not None and ours.check is None and whole[row]]
            self._drawn, self._batch = DrawnRows(drawn, logits.device), batch
            self._rows = np.array([row for row, _ in drawn], np.int64)
        # V2 has no list of generated tokens: the position follows from the lengths of sequence and prompt.
        positions = (lengths - self._prompt_lengths.np[in_batch])[self._rows]
        return self._drawn.draw(logits, positions.astype(np.int64), records)
