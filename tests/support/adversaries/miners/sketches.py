"""Adversaries that deliver honest rollouts with false sketches."""

from collections.abc import Sequence

import numpy as np
import torch

from protocol.judging.verdict import Reason
from protocol.rollout.batch import Group
from roles.miner.produce import MiningWindow
from tests.support.adversaries import sketch_predictors
from tests.support.adversaries.harness import TrialHarness, alter
from tests.support.adversaries.miners.registry import (
    Behaviour,
    adversary,
    assignments_of,
    hidden_states,
    with_rollouts,
    with_sketches,
)


@adversary("constant sketch", Reason.SKETCH)
async def constant_sketch(harness: TrialHarness, mining_window: MiningWindow, indices: Sequence[int]) -> list[Group]:
    """Claim the best constant: for each of the four values, the most frequent one of honest sketches of the window."""
    groups = await harness.honest_groups(mining_window, indices)
    data = b"".join(rollout.sketch for group in groups for rollout in group.rollouts)
    guess = bytes(int(np.bincount(column).argmax()) for column in np.frombuffer(data, np.uint8).reshape(-1, 4).T)
    return [
        with_rollouts(group, [alter(item, sketch=guess * len(item.tokens)) for item in group.rollouts])
        for group in groups
    ]


@adversary("random sketch", Reason.SKETCH)
async def random_sketch(harness: TrialHarness, mining_window: MiningWindow, indices: Sequence[int]) -> list[Group]:
    """Claim random values with the distribution of sketches."""
    rng = np.random.default_rng(mining_window.window)
    groups = await harness.honest_groups(mining_window, indices)
    return [
        with_rollouts(group, [alter(item, sketch=rng.bytes(len(item.sketch))) for item in group.rollouts])
        for group in groups
    ]


@adversary("sketch of another position", Reason.SKETCH)
async def another_position(harness: TrialHarness, mining_window: MiningWindow, indices: Sequence[int]) -> list[Group]:
    """Claim at every position the sketch of the next one."""
    groups = await harness.honest_groups(mining_window, indices)
    return [
        with_rollouts(group, [alter(item, sketch=item.sketch[4:] + item.sketch[:4]) for item in group.rollouts])
        for group in groups
    ]


@adversary("sketch of another prompt", Reason.SKETCH)
async def another_prompt(harness: TrialHarness, mining_window: MiningWindow, indices: Sequence[int]) -> list[Group]:
    """Claim sketches of the right policy and completions, but after another prompt."""
    other = assignments_of(harness, mining_window, [max(indices) + 1])[0].prompt
    return [
        with_sketches(harness, mining_window, group, await hidden_states(await harness.serving_engine(), other, group))
        for group in await harness.honest_groups(mining_window, indices)
    ]


@adversary("sketch of another version", Reason.SKETCH, within_noise=True)
async def another_version(harness: TrialHarness, mining_window: MiningWindow, indices: Sequence[int]) -> list[Group]:
    """Claim sketches of the right tokens by the oldest version."""
    engine = await harness.engine("version 0", lambda: harness.policy_history.version(0))
    assignments = assignments_of(harness, mining_window, indices)
    return [
        with_sketches(harness, mining_window, group, await hidden_states(engine, assignment.prompt, group))
        for group, assignment in zip(await harness.honest_groups(mining_window, indices), assignments, strict=True)
    ]


_TRAINING_WINDOW = 1_000_000
_PREDICTORS: dict[tuple[int, str], sketch_predictors.Predictor] = {}  # by harness and kind; each is fitted once


async def examples(harness: TrialHarness) -> sketch_predictors.Examples:
    """Return hidden states of the right policy in earlier windows."""
    inputs, states = [], []
    embedding = harness.policy_history.version(harness.policy_history.serving)["model.embed_tokens.weight"]
    for window in range(_TRAINING_WINDOW, _TRAINING_WINDOW + harness.training_windows):
        mining_window = harness.mining_window(window)
        for assignment in assignments_of(harness, mining_window, range(harness.groups)):
            group = (await harness.honest_groups(mining_window, [assignment.index]))[0]
            inputs += [sketch_predictors.features(embedding, assignment.prompt, item.tokens) for item in group.rollouts]
            states += await hidden_states(await harness.serving_engine(), assignment.prompt, group)
    return sketch_predictors.Examples(torch.cat(inputs), torch.cat(states))


async def _predictor(harness: TrialHarness, kind: str) -> sketch_predictors.Predictor:
    if (id(harness), kind) not in _PREDICTORS:
        fit = sketch_predictors.ridge if kind == "ridge" else sketch_predictors.network
        _PREDICTORS[id(harness), kind] = fit(await examples(harness))
    return _PREDICTORS[id(harness), kind]


def _predicted_sketch(kind: str) -> Behaviour:
    async def behaviour(harness: TrialHarness, mining_window: MiningWindow, indices: Sequence[int]) -> list[Group]:
        predict = await _predictor(harness, kind)
        embedding = harness.policy_history.version(harness.policy_history.serving)["model.embed_tokens.weight"]
        return [
            with_sketches(
                harness,
                mining_window,
                group,
                [
                    predict(sketch_predictors.features(embedding, group.prompt_tokens, item.tokens))
                    for item in group.rollouts
                ],
            )
            for group in await harness.honest_groups(mining_window, indices)
        ]

    return behaviour


adversary("distilled sketch: ridge regression", Reason.SKETCH)(_predicted_sketch("ridge"))
adversary("distilled sketch: small network", Reason.SKETCH)(_predicted_sketch("network"))
