"""The reference engine: torch, batched, with a key-value cache (implements roles.ports.Engine).

Computation is a pure function of the weights, and a request is computed with one policy version from beginning to end:
a commit waits for the calls under way, and later calls wait for the commit. So the weights of one version are in memory
in the engine's dtype. On a CPU a BF16 version is staged as it is, and the commit frees the old one before it converts
the new one. The arithmetic runs through `run_sync`, by default in one of trio's worker threads, a batch at a time, so
that cancellation takes effect between two batches.
"""

import itertools
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import torch
import trio
from torch import Tensor

from grailnode.engine.models import check_fit
from grailnode.engine.turn_caches import TurnCaches, Turns, ended_turns, joined_turns, right_aligned, take_turn
from grailnode.engine.version_gate import VersionGate
from protocol.chain.manifest import Manifest
from protocol.digest import Weights, weights_digest
from protocol.errors import MalformedError, PatchError, ProtocolError
from protocol.patch import apply_with_digests
from protocol.proof import Arithmetic, arithmetic_of
from protocol.quantization import dequantize, is_code
from protocol.rollout.checking import Check, CheckRules, DrawnTokens, check_completions
from protocol.rollout.sampling import SamplingParams, seed_words
from protocol.rollout.token_choice import choose_with_log_probabilities
from roles.policy.causal_model import Cache, CausalModel
from roles.policy.sequences import Tokens, check_ids, split
from roles.ports import CheckRequest, EngineError, Generation, Request

_PASS_TOKENS: Final = 1024
"""Completion tokens in one pass of a prefill: enough for large matrix products, few enough for a processor's caches."""

RunSync = Callable[..., Awaitable[Any]]
"""`await run_sync(function, *arguments)` runs a function off the event loop's thread, and returns what it returns."""

DEFAULT_BATCH_TOKENS: Final = 8192
"""Padded tokens of one batch: bounds the memory of activations and cache. The caches of episodes that wait for a reply
have at most as many beside it.
"""


@dataclass(frozen=True)
class Policy:
    """A policy version with its weights, in the dtype and on the device of the engine once it serves."""

    version: int
    weights: Weights
    is_quantized: bool


@dataclass(frozen=True)
class Forward:
    """The result of a prefill for one completion."""

    hidden: Tensor  # float32 [T, D], the final hidden state from which each token is drawn
    # computes logits float32 [n, V] from such states [n, D]; the same for all completions of a call
    project: Callable[[Tensor], Tensor]

    @property
    def logits(self) -> Tensor:
        """float32 [T, V], computed at each access; token t is drawn from row t."""
        return self.project(self.hidden)


class TorchEngine:
    """Samples from a policy and checks completions, with torch, in batches of at most `max_batch_tokens` padded tokens.

    The weights, which are BF16 or quantized, are converted to `dtype`: float32 on a CPU, where BF16 arithmetic is slow
    and rounds more.
    """

    def __init__(
        self,
        model: CausalModel,
        *,
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
        max_batch_tokens: int = DEFAULT_BATCH_TOKENS,
        run_sync: RunSync = trio.to_thread.run_sync,
    ) -> None:
        dtype_name = str(dtype).removeprefix("torch.")
        self.arithmetic: Arithmetic = "exact" if model.exact else arithmetic_of("torch", dtype_name)
        self._model = model
        self._device = torch.device(device)
        self._dtype = dtype
        self._max_batch_tokens = max_batch_tokens
        self._run_sync = run_sync
        self._serving: Policy | None = None
        self._staged: Policy | None = None
        self._turn_caches = TurnCaches(max_batch_tokens)
        self._gate = VersionGate()

    @property
    def version(self) -> int | None:
        return self._serving.version if self._serving is not None else None

    @property
    def takes_patches(self) -> bool:
        is_quantized = self._serving is not None and self._serving.is_quantized
        # On a CPU, BF16 weights are served as they are, and converting all of them to float32 takes less memory and
        # time than a patch, for which they are converted to BF16 and digested once more.
        return not is_quantized and self._device.type != "cpu"

    async def stage(self, version: int, weights: Weights) -> None:
        check_fit(self._model.shapes, weights)
        is_quantized = any(map(is_code, weights.values()))
        if not self._converts_late(is_quantized):
            weights = await self._compute(self._convert, weights)
        self._staged = Policy(version, weights, is_quantized)

    async def stage_patch(self, version: int, patch: bytes, manifest: Manifest) -> None:
        """Implements Engine.stage_patch; tensors that the patch does not change are shared."""
        # If the patch is refused, nothing is staged: a later commit must not serve an older stage.
        self._staged = None
        async with self._in_use() as policy:
            try:
                weights = await self._compute(self._patched, policy, patch, manifest.weights)
            except ProtocolError as error:
                raise EngineError(f"version {version} cannot be patched in: {error}") from error
        self._staged = Policy(version, weights, is_quantized=False)

    async def commit(self) -> None:
        if self._staged is None:
            raise EngineError("nothing is staged")
        staged, self._staged = self._staged, None
        async with self._gate.exclusive():
            await self._compute(self._swap, staged)

    async def generate(self, requests: Sequence[Request], params: SamplingParams) -> list[Generation]:
        check_ids([request.prompt for request in requests], self._model.vocabulary)
        results: dict[int, Generation] = {}
        # Every completion counts with its longest possible length, so that the cache of a batch cannot outgrow the
        # memory.
        lengths = [len(request.prompt) + params.max_tokens for request in requests]
        async with self._in_use() as policy:
            for batch in split(lengths, self._max_batch_tokens):
                # `split` sorts by length, so results are carried by index.
                generations, turns = await self._compute(self._sample, policy, [requests[i] for i in batch], params)
                self._turn_caches.keep(turns)
                # To give back the memory of what is not kept takes long on an event loop.
                await self._compute(turns.clear)
                results.update(zip(batch, generations, strict=True))
        return [results[index] for index in range(len(requests))]

    async def forward(self, prompts: Sequence[Tokens], completions: Sequence[Tokens]) -> list[Forward]:
        """Run one prefill over each prompt with its completion; return the results in order.

        With a large vocabulary the logits of a group are gigabytes, so whoever needs only results of a check asks
        `check` for these.
        """
        check_ids([*prompts, *completions], self._model.vocabulary)
        results: list[Forward] = []
        async with self._in_use() as policy:
            # Neighbours with the same prompt stay in one batch, so that the prompt is computed once for all of them.
            for batch in _runs(prompts, completions, self._max_batch_tokens):
                states = await self._compute(self._prefill, policy, prompts[batch], completions[batch])
                parts = states.split([len(completion) for completion in completions[batch]])
                results += [Forward(part, partial(self._project, policy)) for part in parts]
        return results

    async def check(self, requests: Sequence[CheckRequest], rules: CheckRules) -> list[Check]:
        """Implements Engine.check; a repeated prompt is computed once."""
        prompts, completions = [item.prompt for item in requests], [item.completion for item in requests]
        check_ids([*prompts, *completions], self._model.vocabulary)
        results: list[Check] = []
        async with self._in_use() as policy:
            for batch in _runs(prompts, completions, self._max_batch_tokens):
                results += await self._compute(self._check, policy, requests[batch], rules)
        return results

    @asynccontextmanager
    async def _in_use(self) -> AsyncIterator[Policy]:
        """Hold the policy that serves, beside other calls."""
        async with self._gate.shared():
            if self._serving is None:
                raise EngineError("no policy has been committed")
            yield self._serving

    async def _compute(self, function: Callable[..., Any], *arguments: Any) -> Any:
        with _torch_errors():
            return await self._run_sync(function, *arguments)

    def _patched(self, policy: Policy, patch: bytes, digest: bytes) -> dict[str, Tensor]:
        # The patch is for BF16 bits. A float32 copy has them in its upper half, so the old version needs no copy of its
        # own.
        before = {name: _bf16_bits(tensor.cpu()) for name, tensor in policy.weights.items()}
        after = apply_with_digests(before, patch)
        if weights_digest(after.digests, after.weights) != digest:
            raise PatchError("the patch does not lead to the weights that the trainer signed")
        # Tensors that the patch does not touch are shared with the version that still serves.
        changed = {name: tensor for name, tensor in after.weights.items() if tensor is not before[name]}
        return self._convert({**policy.weights, **changed})

    def _swap(self, staged: Policy) -> None:
        """Serve a staged policy. Nobody computes meanwhile, and the old one is freed before the new one is converted:
        here, since that takes long on an event loop.
        """
        self._serving = None
        if self._converts_late(staged.is_quantized):
            weights = self._convert(staged.weights)
            # Weights that had to be copied in their own dtype are in memory once, since the caller gets the copies.
            if isinstance(staged.weights, dict):
                copied = {n: t for n, t in weights.items() if t.dtype == staged.weights[n].dtype}
                staged.weights.update(copied)
            staged = replace(staged, weights=weights)
        self._serving = staged

    def _converts_late(self, is_quantized: bool) -> bool:
        """Return whether a commit converts a version, and not its staging: a GPU takes long to get the weights, and
        codes may turn out to be none.
        """
        return self._device.type == "cpu" and not is_quantized

    def _convert(self, weights: Weights) -> dict[str, Tensor]:
        try:
            return dequantize(weights, self._dtype, self._device, self._model.places(self._dtype, self._device))
        except MalformedError as error:
            raise EngineError(str(error)) from error

    @torch.inference_mode()
    def _check(self, policy: Policy, requests: Sequence[CheckRequest], rules: CheckRules) -> list[Check]:
        states = self._prefill(policy, [item.prompt for item in requests], [item.completion for item in requests])
        if any(item.drawn is not None for item in requests):
            drawn = [flag for item in requests for flag in item.drawn or [True] * len(item.completion)]
            states = states[torch.tensor(drawn, dtype=torch.bool)]
        items = [DrawnTokens(item.drawn_tokens, item.seed, item.sketch) for item in requests]
        check = check_completions(states, partial(self._project, policy), items, rules, self._model.vocabulary)
        return check.split([len(item.tokens) for item in items])

    @torch.inference_mode()
    def _prefill(self, policy: Policy, prompts: Sequence[Tokens], completions: Sequence[Tokens]) -> Tensor:
        """Compute each prompt once, then its completions in a batch; return the states, float32 [N, D] on the host."""
        # 1. All distinct prompts in one pass, padded on the left: the last state of each row predicts the first token.
        distinct = {prompt: row for row, prompt in enumerate(dict.fromkeys(prompts))}
        ids, mask = padded(list(distinct), self._device, left_padded=True)
        shared = self._model.cache()
        last = self._model.hidden(policy.weights, ids, mask, shared)[:, -1]
        # 2. One place in `states` for each completion token, completions one after the other.
        owners = torch.tensor([distinct[prompt] for prompt in prompts], device=self._device)
        lengths = torch.tensor([len(completion) for completion in completions], device=self._device)
        begins = lengths.cumsum(0) - lengths
        states = last.new_empty(int(lengths.sum()), last.shape[1])
        states[begins[lengths > 0]] = last[owners[lengths > 0]]  # the prompt's last state predicts the first token
        # 3. The completions in batches of similar length, each against its prompt's keys and values. The last token of
        # a completion is never an input, because nothing is drawn after it.
        for batch in split([mask.shape[1] + len(completion) for completion in completions], self._max_batch_tokens):
            rows, visible, cache = batch, mask[owners[batch]], shared.select(owners[batch])
            for ended_rows, begin, end in _passes([len(completions[row]) - 1 for row in batch]):
                # Rows are sorted by length, so those that have ended are the first ones, and the cache drops them.
                if ended_rows:
                    rows, visible = rows[ended_rows:], visible[ended_rows:]
                    cache = cache.select(torch.arange(ended_rows, ended_rows + len(rows), device=self._device))
                # A row that is shorter than this pass gets pads at its end, which no real token can see.
                inputs = [completions[row][:-1][begin:end] for row in rows]
                ids, own = padded(inputs, self._device, width=end - begin)
                visible = torch.cat([visible, own], dim=1)
                computed = self._model.hidden(policy.weights, ids, visible, cache)
                # State number t comes from the input token t, and token t + 1 is drawn from it.
                places = begins[rows][:, None] + torch.arange(begin + 1, end + 1, device=self._device)
                states[places[own]] = computed[own]
        return states.to("cpu", torch.float32)

    def _project(self, policy: Policy, hidden: Tensor) -> Tensor:
        """Return the logits of states that this engine computed; converting them to float32 and back changed no bit."""
        with torch.inference_mode(), _torch_errors():
            return self._model.logits(policy.weights, hidden.to(self._device, self._dtype)).cpu()

    @torch.inference_mode()
    def _sample(
        self, policy: Policy, requests: list[Request], params: SamplingParams
    ) -> tuple[list[Generation], Turns]:
        """Generate one batch until all completions have ended; return also what may be kept for next turns."""
        # Rows that have ended leave the batch; `rows` says which request each remaining row is.
        rows, hidden, mask, cache = self._begin(policy, requests)
        words, offsets = self._noise([requests[row] for row in rows.tolist()])
        tokens: list[list[int]] = [[] for _ in requests]
        states: list[list[Tensor]] = [[] for _ in requests]
        log_probs: list[list[float]] = [[] for _ in requests]
        turns: Turns = {}
        # One step draws one token for each row: logits, choice, and then the next states.
        for position in range(params.max_tokens):
            logits = self._model.logits(policy.weights, hidden)
            next_tokens, likely = self._choose(logits, words, offsets + position, params)
            # The state from which a token is drawn is what a sketch commits to, in float32 whatever the dtype of the
            # engine.
            on_host = hidden.to(torch.float32).cpu()
            ended: dict[int, tuple[Request, list[int]]] = {}
            for place, (row, token) in enumerate(zip(rows.tolist(), next_tokens.tolist(), strict=True)):
                tokens[row].append(token)
                states[row].append(on_host[place])
                log_probs[row].append(float(likely[place]))
                # A stop token belongs to its completion; only what follows it is not drawn.
                if token in params.stops or position + 1 == params.max_tokens:
                    ended[place] = requests[row], tokens[row]
            turns |= ended_turns(policy, ended, cache, mask)
            if len(ended) == len(rows):
                break
            if ended:
                going = torch.tensor([place for place in range(len(rows)) if place not in ended], device=self._device)
                rows, mask, offsets, cache = rows[going], mask[going], offsets[going], cache.select(going)
                words, next_tokens = None if words is None else words[going], next_tokens[going]
            # Each drawn token becomes a real one that later tokens attend to.
            mask = torch.cat([mask, mask.new_ones(len(rows), 1)], dim=1)
            hidden = self._model.hidden(policy.weights, next_tokens[:, None], mask, cache)[:, -1]
        generations = [
            Generation(tuple(t), torch.stack(s), tuple(p)) for t, s, p in zip(tokens, states, log_probs, strict=True)
        ]
        return generations, turns

    def _begin(self, policy: Policy, requests: Sequence[Request]) -> tuple[Tensor, Tensor, Tensor, Cache]:
        """Compute the prompts, of turns only what is not kept; return which request each row is, int64 [B], the states
        that predict the first tokens, [B, D], and mask and cache. All rows end at the last column, so that each step
        appends one column for all rows.
        """
        turns = {row: turn for row, request in enumerate(requests) if (turn := take_turn(policy, request)) is not None}
        parts: list[tuple[list[int], Tensor, Tensor, Cache]] = []
        if new := [row for row in range(len(requests)) if row not in turns]:
            ids, mask = padded([requests[row].prompt for row in new], self._device, left_padded=True)
            cache = self._model.cache()
            parts.append((new, self._model.hidden(policy.weights, ids, mask, cache)[:, -1], mask, cache))
        # New tokens of similar number are computed together, so that less than half of them are pads.
        tails = {row: requests[row].prompt[len(turn.tokens) :] for row, turn in turns.items()}
        groups: dict[int, list[int]] = {}
        for row, tail in tails.items():
            groups.setdefault(len(tail).bit_length(), []).append(row)
        for rows in groups.values():
            rows.sort(key=lambda row: id(turns[row].cache))
            mask, cache = joined_turns([turns[row] for row in rows])
            ids, real = padded([tails[row] for row in rows], self._device)
            mask = torch.cat([mask, real], dim=1)
            computed = self._model.hidden(policy.weights, ids, mask, cache)
            last = real.sum(dim=1) - 1
            parts.append((rows, computed[torch.arange(len(rows), device=self._device), last], mask, cache))
        order, states, masks, caches = zip(*parts, strict=True)
        rows_of_requests = torch.tensor([*itertools.chain(*order)], device=self._device)
        return rows_of_requests, torch.cat(states), *right_aligned(masks, caches)

    def _noise(self, requests: Sequence[Request]) -> tuple[Tensor | None, Tensor]:
        """Return the words of the seeds of a batch, int64 [B, 4], or None without seeds; and the offsets, int64 [B]."""
        seeds = [request.seed for request in requests]
        words = seed_words(seeds, self._device) if any(seeds) else None
        return words, torch.tensor([request.offset for request in requests], device=self._device)

    def _choose(
        self, logits: Tensor, seeds: Tensor | None, positions: Tensor, params: SamplingParams
    ) -> tuple[Tensor, Tensor]:
        """Return the next token of each row, and its log-probability on the host: int64 [B] and float32 [B]."""
        # Noise depends on seed and position alone, so a row draws the same token in any batch.
        tokens, likely = choose_with_log_probabilities(logits, seeds, positions, params.temperature, params.filters)
        return tokens, likely.cpu()


def _bf16_bits(tensor: Tensor) -> Tensor:
    """Return the BF16 tensor from which a float32 tensor was converted, with the payloads of its NaNs."""
    if tensor.dtype == torch.bfloat16:
        return tensor.contiguous()
    return (tensor.contiguous().view(torch.int32) >> 16).to(torch.int16).view(torch.bfloat16)


@contextmanager
def _torch_errors() -> Iterator[None]:
    """Translate torch's errors (out of memory, a broken device) into EngineError."""
    try:
        yield
    except RuntimeError as error:
        raise EngineError(f"torch failed: {error}") from error


def _runs(prompts: Sequence[Tokens], completions: Sequence[Tokens], max_tokens: int) -> Iterator[slice]:
    """Yield runs of neighbouring sequences of at most `max_tokens` tokens together; a longer sequence is a run of its
    own.

    A prompt counts once in a run, padded to the longest prompt.
    """
    # `distinct * width` is the padded size of the prompts, which are computed once each; completions are not padded
    # across a run.
    begin = distinct = width = tokens = 0
    for place, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        new = place == begin or prompt != prompts[place - 1]
        # The next sequence would exceed the limit: end the run before it, unless the run is empty.
        if place > begin and (distinct + new) * max(width, len(prompt)) + tokens + len(completion) > max_tokens:
            yield slice(begin, place)
            begin, distinct, width, tokens, new = place, 0, 0, 0, True
        distinct, width, tokens = distinct + new, max(width, len(prompt)), tokens + len(completion)
    if begin < len(prompts):
        yield slice(begin, len(prompts))


def _passes(lengths: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yield passes over the completions of a batch: how many rows have ended since the pass before, and the positions
    (begin, end) that the other rows compute.

    This saves work: a row has pads only in its last pass, and attends to masked positions only within a pass. A pass
    has about _PASS_TOKENS tokens, and ends with the shortest row if possible.
    """
    first_row = begin = 0
    while first_row < len(lengths):
        # Rows are sorted, so those that ended at `begin` are a prefix of the rest.
        ended_rows = sum(length <= begin for length in lengths[first_row:])
        first_row += ended_rows
        if first_row < len(lengths):
            # A pass is the narrower, the more rows it has. It is cut so that the shortest row ends together with a
            # pass, and is then dropped.
            most, shortest = max(1, _PASS_TOKENS // (len(lengths) - first_row)), lengths[first_row] - begin
            parts = round(shortest / most)
            end = min(begin + (math.ceil(shortest / parts) if parts else most), lengths[-1])
            yield ended_rows, begin, end
            begin = end


def padded(
    sequences: Sequence[Tokens], device: torch.device, *, width: int | None = None, left_padded: bool = False
) -> tuple[Tensor, Tensor]:
    """Return ids int64 [B, S] and mask bool [B, S]. With pads on the left, each row ends at the last column."""
    if left_padded and not all(sequences):
        raise ValueError("a prompt has at least one token")
    if width is None:
        width = max(map(len, sequences), default=0)
    ids = torch.zeros(len(sequences), width, dtype=torch.int64)
    mask = torch.zeros(len(sequences), width, dtype=torch.bool)
    for row, sequence in enumerate(sequences):
        begin = width - len(sequence) if left_padded else 0
        ids[row, begin : begin + len(sequence)] = torch.tensor(sequence, dtype=torch.int64)
        mask[row, begin : begin + len(sequence)] = True
    return ids.to(device), mask.to(device)
