"""Adversaries that deliver honest rollouts with false sketches."""

import numpy as np
import torch

from protocol.judging.verdict import Reason
from protocol.rollout.batch import Group
from tests.support.adversaries import sketch_predictors
from tests.support.adversaries.harness import TrialHarness, alter
from tests.support.adversaries.miners.registry import (
    Attempt,
    Behaviour,
    adversary,
    falsified,
    hidden_states,
    with_rollouts,
)


@adversary("constant sketch", Reason.SKETCH)
async def constant_sketch(attempt: Attempt) -> list[Group]:
    """Claim the best constant: for each of the four values, the most frequent one of honest sketches of the window."""
    groups = await attempt.honest_groups()
    data = b"".join(rollout.sketch for group in groups for rollout in group.rollouts)
    guess = bytes(int(np.bincount(column).argmax()) for column in np.frombuffer(data, np.uint8).reshape(-1, 4).T)
    return [with_rollouts(group, lambda item: alter(item, sketch=guess * len(item.tokens))) for group in groups]


@adversary("random sketch", Reason.SKETCH)
async def random_sketch(attempt: Attempt) -> list[Group]:
    """Claim random values with the distribution of sketches."""
    rng = np.random.default_rng(attempt.window.window)
    return [
        with_rollouts(group, lambda item: alter(item, sketch=rng.bytes(len(item.sketch))))
        for group in await attempt.honest_groups()
    ]


@falsified("sketch of another position", Reason.SKETCH)
def another_position(group: Group) -> Group:
    """Claim at every position the sketch of the next one."""
    return with_rollouts(group, lambda item: alter(item, sketch=item.sketch[4:] + item.sketch[:4]))


@adversary("sketch of another prompt", Reason.SKETCH)
async def another_prompt(attempt: Attempt) -> list[Group]:
    """Claim sketches of the right policy and completions, but after another prompt."""
    (other,) = Attempt(attempt.harness, attempt.window, [max(attempt.indices) + 1]).assignments
    engine = await attempt.harness.serving_engine()
    return [
        attempt.with_sketches(group, await hidden_states(engine, other.prompt, group))
        for group in await attempt.honest_groups()
    ]


@adversary("sketch of another version", Reason.SKETCH, within_noise=True)
async def another_version(attempt: Attempt) -> list[Group]:
    """Claim sketches of the right tokens by the oldest version."""
    engine = await attempt.harness.engine("version 0", lambda: attempt.harness.policy_history.version(0))
    return [
        attempt.with_sketches(group, await hidden_states(engine, assignment.prompt, group))
        for group, assignment in await attempt.pairs()
    ]


_TRAINING_WINDOW = 1_000_000
_EMBEDDING = "model.embed_tokens.weight"
_PREDICTORS: dict[tuple[int, str], sketch_predictors.Predictor] = {}  # by harness and kind; each is fitted once


async def examples(harness: TrialHarness) -> sketch_predictors.Examples:
    """Return hidden states of the right policy in earlier windows."""
    inputs, states = [], []
    embedding, engine = harness.serving_weights[_EMBEDDING], await harness.serving_engine()
    for window in range(_TRAINING_WINDOW, _TRAINING_WINDOW + harness.training_windows):
        attempt = Attempt(harness, harness.mining_window(window), range(harness.groups))
        for group, assignment in await attempt.pairs():
            inputs += [sketch_predictors.features(embedding, assignment.prompt, item.tokens) for item in group.rollouts]
            states += await hidden_states(engine, assignment.prompt, group)
    return sketch_predictors.Examples(torch.cat(inputs), torch.cat(states))


def _predicted_sketch(kind: str) -> Behaviour:
    async def behaviour(attempt: Attempt) -> list[Group]:
        harness = attempt.harness
        if (id(harness), kind) not in _PREDICTORS:
            fit = sketch_predictors.ridge if kind == "ridge" else sketch_predictors.network
            _PREDICTORS[id(harness), kind] = fit(await examples(harness))
        predict, embedding = _PREDICTORS[id(harness), kind], harness.serving_weights[_EMBEDDING]
        groups = []
        for group in await attempt.honest_groups():
            completions = (item.tokens for item in group.rollouts)
            inputs = [sketch_predictors.features(embedding, group.prompt_tokens, tokens) for tokens in completions]
            groups.append(attempt.with_sketches(group, list(map(predict, inputs))))
        return groups

    return behaviour


adversary("distilled sketch: ridge regression", Reason.SKETCH)(_predicted_sketch("ridge"))
adversary("distilled sketch: small network", Reason.SKETCH)(_predicted_sketch("network"))
