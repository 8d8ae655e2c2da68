"""Honest rollouts with false sketches."""

from collections.abc import Sequence

import numpy as np
import torch

from protocol.judging.verdict import Reason
from protocol.rollout.batch import Group
from roles.miner.produce import MiningWindow
from tests.support.adversaries import sketch_predictors
from tests.support.adversaries.harness import Field, changed
from tests.support.adversaries.miners.registry import (
    Behaviour,
    animal,
    assigned,
    states_of,
    with_rollouts,
    with_sketches,
)


@animal("constant sketch", Reason.SKETCH)
async def constant_sketch(field: Field, mining_window: MiningWindow, indices: Sequence[int]) -> list[Group]:
    """The best constant there is: in each of the four values the median of honest sketches under the window's
    projection.
    """
    groups = await field.honest(mining_window, indices)
    data = b"".join(rollout.sketch for group in groups for rollout in group.rollouts)
    guess = np.median(np.frombuffer(data, np.int8).reshape(-1, 4), axis=0).round().astype(np.int8).tobytes()
    return [
        with_rollouts(group, [changed(item, sketch=guess * len(item.tokens)) for item in group.rollouts])
        for group in groups
    ]


@animal("random sketch", Reason.SKETCH)
async def random_sketch(field: Field, mining_window: MiningWindow, indices: Sequence[int]) -> list[Group]:
    """Values drawn as sketches are distributed."""
    dice = np.random.default_rng(mining_window.window)

    def drawn(count: int) -> bytes:
        return dice.normal(0.0, 32.0, count).round().clip(-127, 127).astype(np.int8).tobytes()

    groups = await field.honest(mining_window, indices)
    return [
        with_rollouts(group, [changed(item, sketch=drawn(len(item.sketch))) for item in group.rollouts])
        for group in groups
    ]


@animal("sketch of another position", Reason.SKETCH)
async def another_position(field: Field, mining_window: MiningWindow, indices: Sequence[int]) -> list[Group]:
    """Every position has its neighbour's sketch."""
    groups = await field.honest(mining_window, indices)
    return [
        with_rollouts(group, [changed(item, sketch=item.sketch[4:] + item.sketch[:4]) for item in group.rollouts])
        for group in groups
    ]


@animal("sketch of another prompt", Reason.SKETCH)
async def another_prompt(field: Field, mining_window: MiningWindow, indices: Sequence[int]) -> list[Group]:
    """The right policy read the right completions behind another prompt."""
    other = assigned(field, mining_window, [max(indices) + 1])[0].prompt
    return [
        with_sketches(field, mining_window, group, await states_of(await field.serving(), other, group))
        for group in await field.honest(mining_window, indices)
    ]


@animal("sketch of another version", Reason.SKETCH, slight=True)
async def another_version(field: Field, mining_window: MiningWindow, indices: Sequence[int]) -> list[Group]:
    """The right tokens, read by the oldest version."""
    engine = await field.engine("version 0", lambda: field.past.version(0))
    dues = assigned(field, mining_window, indices)
    return [
        with_sketches(field, mining_window, group, await states_of(engine, due.prompt, group))
        for group, due in zip(await field.honest(mining_window, indices), dues, strict=True)
    ]


_LONG_AGO = 1_000_000
_LEARNED: dict[tuple[int, str], sketch_predictors.Predictor] = {}  # by field and kind; a miner learns once


async def examples(field: Field) -> sketch_predictors.Examples:
    """Hidden states of the right policy from windows long past."""
    inputs, states = [], []
    embedding = field.past.version(field.past.serving)["model.embed_tokens.weight"]
    for window in range(_LONG_AGO, _LONG_AGO + field.lessons):
        mining_window = field.mining_window(window)
        for due in assigned(field, mining_window, range(field.groups)):
            group = (await field.honest(mining_window, [due.index]))[0]
            inputs += [sketch_predictors.features(embedding, due.prompt, item.tokens) for item in group.rollouts]
            states += await states_of(await field.serving(), due.prompt, group)
    return sketch_predictors.Examples(torch.cat(inputs), torch.cat(states))


async def _predictor(field: Field, kind: str) -> sketch_predictors.Predictor:
    if (id(field), kind) not in _LEARNED:
        learn = sketch_predictors.ridge if kind == "ridge" else sketch_predictors.network
        _LEARNED[id(field), kind] = learn(await examples(field))
    return _LEARNED[id(field), kind]


def _distilled(kind: str) -> Behaviour:
    async def behaviour(field: Field, mining_window: MiningWindow, indices: Sequence[int]) -> list[Group]:
        predict = await _predictor(field, kind)
        embedding = field.past.version(field.past.serving)["model.embed_tokens.weight"]
        return [
            with_sketches(
                field,
                mining_window,
                group,
                [
                    predict(sketch_predictors.features(embedding, group.prompt_tokens, item.tokens))
                    for item in group.rollouts
                ],
            )
            for group in await field.honest(mining_window, indices)
        ]

    return behaviour


animal("distilled sketch: ridge regression", Reason.SKETCH)(_distilled("ridge"))
animal("distilled sketch: small network", Reason.SKETCH)(_distilled("network"))
