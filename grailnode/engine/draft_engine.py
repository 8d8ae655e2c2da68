"""The torch engine with an 8-bit copy of the policy as a verified draft (speculative decoding).

In a round the copy drafts some tokens for each row of a batch, with the noise of their seeds; then the policy computes
all of them in one pass, and chooses with the same noise. Drafts stay as far as they are the policy's choices, and its
choice takes the place of the first wrong one. So tokens, states and log-probabilities are the policy's, and a bad copy
costs time alone. The copy reads the keys and values that the policy computed, and keeps none of its own.
"""

import weakref
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor

from grailnode.engine.int8_copy import int8_copy
from grailnode.engine.lora_model import LoraModel
from grailnode.engine.policy import PolicyError
from grailnode.engine.torch_engine import Policy, TorchEngine
from grailnode.engine.turn_caches import Turns, ended_turns, right_aligned
from protocol.rollout.sampling import SamplingParams
from roles.policy.causal_model import Cache, CausalModel
from roles.ports import Generation, Request

_DRAFTED: Final = 16
"""Tokens that a row drafts in a round: it drafts in vain behind a wrong token, and behind its end."""
_LOGITS_AT_ONCE: Final = 256  # rows of logits in memory


class DraftEngine(TorchEngine):
    """A torch engine that drafts. It raises PolicyError for a model with fused experts, or one that forgets tokens."""

    def __init__(self, model: CausalModel, **options: Any) -> None:
        super().__init__(model, **options)
        if any(".experts." in name for name in model.shapes):
            raise PolicyError("the experts of a mixture are fused, which 8-bit copies cannot be: drop engine.draft")
        if not model.cache().is_complete:
            raise PolicyError("attention that forgets tokens cannot take wrong drafts back: drop engine.draft")
        self._draft_model = model.with_int8_base() if isinstance(model, LoraModel) else model
        self._copied: weakref.ref[Policy] | None = None  # its weights are freed when another one is served
        self._copy: Mapping[str, Tensor] = {}

    @torch.inference_mode()
    def _sample(
        self, policy: Policy, requests: list[Request], params: SamplingParams
    ) -> tuple[list[Generation], Turns]:
        if self._copied is None or self._copied() is not policy:  # a node that only checks never makes a copy
            is_adapted = self._draft_model is not self._model
            self._copied, self._copy = None, {}  # before the next copy is made, so that not both are in memory
            self._copy = policy.weights if is_adapted else int8_copy(policy.weights)
            self._copied = weakref.ref(policy)
        # 1. The policy computes what it has not seen: the prompts at first. Its last states are those from which the
        # drafts should have been drawn, and that of the token behind them.
        rows, last_states, mask, cache = self._begin(policy, requests)
        words, offsets = self._noise([requests[row] for row in rows.tolist()])
        states, lengths, drafts = last_states[:, None], torch.zeros_like(rows), rows.new_empty(len(rows), 0)
        turns: Turns = {}
        stops = torch.tensor(params.stops, device=self._device)
        results: list[list[tuple[Tensor, ...]]] = [[] for _ in requests]
        while True:
            count = states.shape[1]
            positions = lengths[:, None] + torch.arange(count, device=self._device)
            tokens, likely = self._choose_all(policy, states, words, offsets[:, None] + positions, params)
            # 2. A choice is the row's next token if all drafts before it are right, and none of them is the last.
            right = (tokens[:, :-1] == drafts).cumprod(dim=1).sum(dim=1) + 1
            ends = torch.isin(tokens, stops) | (positions + 1 >= params.max_tokens)
            until_end = torch.where(ends.any(dim=1), ends.int().argmax(dim=1) + 1, count + 1)
            new = torch.minimum(right, until_end)
            on_host = tokens.cpu(), states.to(torch.float32).cpu(), likely
            ended: dict[int, tuple[Request, list[int]]] = {}
            values = zip(rows.tolist(), new.tolist(), (new == until_end).tolist(), strict=True)
            for place, (row, taken, is_last) in enumerate(values):
                results[row].append(tuple(part[place, :taken] for part in on_host))
                if is_last:
                    ended[place] = requests[row], torch.cat([part[0] for part in results[row]]).tolist()
            # 3. The columns of wrong drafts become pads, over which rows move right, so that they end at one column.
            mask = mask & (torch.arange(mask.shape[1], device=self._device) < mask.shape[1] - (count - new)[:, None])
            turns |= ended_turns(policy, ended, cache, mask)
            going = (new < until_end).nonzero().squeeze(1)
            if not len(going):
                break
            rows, offsets, lengths, new = rows[going], offsets[going], (lengths + new)[going], new[going]
            words = None if words is None else words[going]
            last = tokens[going].gather(1, new[:, None] - 1)
            mask, cache = right_aligned([mask[going]], [cache.select(going)])
            # 4. The copy drafts what follows the last token of each row, and the policy computes it.
            drafts, mask = self._draft(cache, mask, last, words, lengths, offsets, params)
            states = self._model.hidden(policy.weights, torch.cat([last, drafts], dim=1), mask, cache)
        joined = (map(torch.cat, zip(*parts, strict=True)) for parts in results)
        return [Generation(tuple(t.tolist()), s, tuple(p.tolist())) for t, s, p in joined], turns

    def _draft(
        self,
        cache: Cache,
        mask: Tensor,
        ids: Tensor,
        words: Tensor | None,
        lengths: Tensor,
        offsets: Tensor,
        params: SamplingParams,
    ) -> tuple[Tensor, Tensor]:
        """Return tokens that follow ids [B, 1]: int64 [B, S], and the mask with ids and them, bool [B, P + 1 + S].

        The last token of a completion is a pad in it, and so is what follows: no position is larger than the last one.
        """
        cache = cache.select(torch.arange(len(ids), device=self._device))  # the policy's own does not grow
        stops = torch.tensor(params.stops, device=self._device)
        drafts, ended = [ids[:, :0]], torch.zeros_like(ids, dtype=torch.bool)
        mask = torch.cat([mask, ~ended], dim=1)
        # The row with the most tokens left decides how far all of them draft.
        for step in range(min(_DRAFTED, params.max_tokens - int(lengths.min()) - 1)):
            hidden = self._draft_model.hidden(self._copy, ids, mask, cache)[:, -1]
            logits = self._draft_model.logits(self._copy, hidden)
            ids = self._choose(logits, words, offsets + lengths + step, params)[0][:, None]
            drafts.append(ids)
            # A row that ended drafts on with pads, until all have ended.
            ended |= torch.isin(ids, stops) | (lengths[:, None] + step + 1 >= params.max_tokens)
            mask = torch.cat([mask, ~ended], dim=1)
            if ended.all():
                break
        return torch.cat(drafts, dim=1), mask

    def _choose_all(
        self, policy: Policy, states: Tensor, words: Tensor | None, positions: Tensor, params: SamplingParams
    ) -> tuple[Tensor, Tensor]:
        """Return the policy's choice from each state, and its log-probability on the host: [B, S] each."""
        chosen, count = [], positions.shape[1]
        # A few rows at a time: logits take a vocabulary of numbers each.
        for part in torch.split(torch.arange(len(states)), max(1, _LOGITS_AT_ONCE // count)):
            logits = self._model.logits(policy.weights, states[part].flatten(0, 1))
            seeds = None if words is None else words[part].repeat_interleave(count, dim=0)
            chosen.append(self._choose(logits, seeds, positions[part].flatten(), params))
        tokens, likely = (torch.cat(parts).view(positions.shape) for parts in zip(*chosen, strict=True))
        return tokens, likely
