"""What the torch engine keeps of a turn of an episode, so that the next one computes its new tokens only.

A turn's keys and values serve a prompt that begins with its tokens, and the very policy that computed them. Whatever
else a request brings is left out, so that a cache changes the costs alone.
"""

import itertools
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from roles.policy.causal_model import Cache
from roles.policy.sequences import Tokens
from roles.ports import Request, TurnCache


@dataclass(frozen=True)
class ComputedTurn:
    """The content of a TurnCache: the tokens that were computed, and their keys and values.

    Rows that ended together share a cache, in which `row` is the index.
    """

    policy: "weakref.ref[object]"
    tokens: Tokens
    cache: Cache
    mask: Tensor  # bool [B, K], False at pads
    row: int


Turns = dict[TurnCache, ComputedTurn]
"""What may be kept, by where it is kept."""


class TurnCaches:
    """Bounds what is kept: at most so many tokens, pads included, of all episodes that wait."""

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._caches: list[weakref.ref[TurnCache]] = []  # a cache ends with its episode

    def keep(self, turns: Turns) -> None:
        """Keep turns as far as there is room; a prompt whose turn is not kept is computed again."""
        contents = {cache: cache.content for item in self._caches if (cache := item()) is not None}
        current = {cache: turn for cache, turn in contents.items() if isinstance(turn, ComputedTurn)}
        # By cache, because rows that ended together share one, which stays in memory as a whole.
        sizes = {id(turn.cache): turn.mask.numel() for turn in current.values()}
        for cache, turn in turns.items():
            size = {id(turn.cache): turn.mask.numel()}
            if sum((sizes | size).values()) <= self._max_tokens:
                sizes |= size
                cache.content = current[cache] = turn
        self._caches = [weakref.ref(cache) for cache in current]


def take_turn(policy: object, request: Request) -> ComputedTurn | None:
    """Take from a request's cache what this policy has computed of the prompt; None if that is nothing."""
    cache = request.turn_cache or TurnCache()
    # Taken, because the turn that this call computes is kept in its place.
    turn, cache.content = cache.content, None
    if not isinstance(turn, ComputedTurn) or turn.policy() is not policy:
        return None
    count = len(turn.tokens)
    return turn if count < len(request.prompt) and request.prompt[:count] == turn.tokens else None


def ended_turns(
    policy: object, ended: Mapping[int, tuple[Request, Sequence[int]]], cache: Cache, mask: Tensor
) -> Turns:
    """Return what may be kept of rows of a batch that ended, given the request and the drawn tokens of each."""
    rows = {row: turn for row, (request, _) in ended.items() if (turn := request.turn_cache) is not None}
    if not rows or not cache.is_complete:
        return {}
    # A copy of these rows alone: the batch goes on and grows without them.
    places = torch.tensor([*rows], device=mask.device)
    cache, mask, turns = cache.select(places), mask[places], Turns()
    for place, (row, turn_cache) in enumerate(rows.items()):
        request, drawn = ended[row]
        # The last token that was drawn has been no input yet.
        turns[turn_cache] = ComputedTurn(weakref.ref(policy), (*request.prompt, *drawn[:-1]), cache, mask, place)
    return turns


def joined_turns(turns: Sequence[ComputedTurn]) -> tuple[Tensor, Cache]:
    """Return mask and cache of some turns, in order. Neighbours that share a cache are copied at once."""
    masks, caches = [], []
    for _, part in itertools.groupby(turns, key=lambda turn: id(turn.cache)):
        first, *others = part
        rows = torch.tensor([turn.row for turn in (first, *others)], device=first.mask.device)
        masks.append(first.mask[rows])
        caches.append(first.cache.select(rows))
    return right_aligned(masks, caches)


def right_aligned(masks: Sequence[Tensor], caches: Sequence[Cache]) -> tuple[Tensor, Cache]:
    """Return mask and cache of the rows of several batches, whose real tokens are moved right as far as possible."""
    width = max(mask.shape[1] for mask in masks)
    mask = torch.cat([functional.pad(mask, (width - mask.shape[1], 0)) for mask in masks])
    cache = caches[0].join(caches[1:]) if len(caches) > 1 else caches[0]
    # A stable sort puts the pads of a row first, and keeps the order of its tokens.
    columns = mask.to(torch.int8).argsort(dim=1, stable=True)[:, -int(mask.sum(dim=1).max()) :]
    aligned = mask.gather(1, columns)
    return (mask, cache) if torch.equal(aligned, mask) else (aligned, cache.take(columns))
