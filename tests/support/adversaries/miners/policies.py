"""Adversaries that sample with the right seeds from another policy."""

from collections.abc import Callable, Sequence

from grailnode.calibration.copies import quantized
from protocol.judging.verdict import Reason
from protocol.rollout.batch import Group
from roles.miner.produce import HonestProducer, MiningWindow
from tests.support.adversaries.harness import TrialHarness, Weights
from tests.support.adversaries.miners.registry import (
    Behaviour,
    adversary,
    assignments_of,
    complete_group,
    honest_groups_of,
)
from tests.support.adversaries.weight_changes import count_layers, keep_layers


def other_policy(name: str, make: Callable[[TrialHarness], Weights]) -> Behaviour:
    """Return the behaviour of a miner that uses other weights for tokens and sketches."""

    async def behaviour(harness: TrialHarness, mining_window: MiningWindow, indices: Sequence[int]) -> list[Group]:
        return await honest_groups_of(
            await harness.engine(name, lambda: make(harness)), harness, mining_window, indices
        )

    return behaviour


def _serving_weights(harness: TrialHarness) -> Weights:
    return harness.policy_history.version(harness.policy_history.serving)


def _older(versions: int) -> Callable[[TrialHarness], Weights]:
    return lambda harness: harness.policy_history.version(max(0, harness.policy_history.serving - versions))


def _bits(bits: int) -> Callable[[TrialHarness], Weights]:
    return lambda harness: quantized(_serving_weights(harness), bits)


def _without_middle_layer(harness: TrialHarness) -> Weights:
    middle = count_layers(_serving_weights(harness)) // 2
    return keep_layers(
        _serving_weights(harness),
        [layer for layer in range(count_layers(_serving_weights(harness))) if layer != middle],
    )


for _count in (1, 5, 50):
    _name = f"policy {_count} version{'s' if _count > 1 else ''} old"
    adversary(_name, Reason.SKETCH, Reason.SAMPLING, Reason.WINDOW, within_noise=True)(
        other_policy(_name, _older(_count))
    )
for _count in (8, 4, 3):
    _name = f"{_count}-bit weights"
    adversary(_name, Reason.SKETCH, Reason.SAMPLING, Reason.WINDOW, within_noise=_count == 8)(
        other_policy(_name, _bits(_count))
    )
adversary("one layer skipped", Reason.SKETCH)(other_policy("one layer skipped", _without_middle_layer))


@adversary("draft model of half the depth, full prefill", Reason.SAMPLING)
async def draft(harness: TrialHarness, mining_window: MiningWindow, indices: Sequence[int]) -> list[Group]:
    """Generate tokens by a cheap model with the right seeds, and sketches by one prefill of the right model."""
    assignments, engine = assignments_of(harness, mining_window, indices), await harness.draft_engine()
    generations = await HonestProducer(harness.task, engine).generate(mining_window, assignments)
    return [
        await complete_group(harness, mining_window, assignment, [item.tokens for item in group])
        for assignment, group in zip(assignments, generations, strict=True)
    ]
