"""Adversaries that sample with the right seeds from another policy."""

from collections.abc import Callable

from grailnode.calibration.procedure import quantized
from protocol.judging.verdict import Reason
from protocol.rollout.batch import Group
from roles.miner.produce import HonestProducer
from tests.support.adversaries.harness import TrialHarness, Weights
from tests.support.adversaries.miners.registry import Attempt, Behaviour, adversary
from tests.support.adversaries.weight_changes import count_layers, keep_layers


def other_policy(name: str, make: Callable[[TrialHarness], Weights]) -> Behaviour:
    """Return the behaviour of a miner that uses other weights for tokens and sketches."""

    async def behaviour(attempt: Attempt) -> list[Group]:
        return await attempt.produce(await attempt.harness.engine(name, lambda: make(attempt.harness)))

    return behaviour


def _older(versions: int) -> Callable[[TrialHarness], Weights]:
    return lambda harness: harness.policy_history.version(max(0, harness.policy_history.serving - versions))


def _bits(bits: int) -> Callable[[TrialHarness], Weights]:
    return lambda harness: quantized(harness.serving_weights, bits)


def _without_middle_layer(harness: TrialHarness) -> Weights:
    layers = list(range(count_layers(harness.serving_weights)))
    del layers[len(layers) // 2]
    return keep_layers(harness.serving_weights, layers)


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
async def draft(attempt: Attempt) -> list[Group]:
    """Generate tokens by a cheap model with the right seeds, and sketches by one prefill of the right model."""
    producer = HonestProducer(attempt.harness.task, await attempt.harness.draft_engine())
    generations = await producer.generate(attempt.window, attempt.assignments)
    return [
        await attempt.complete(assignment, [item.tokens for item in group])
        for assignment, group in zip(attempt.assignments, generations, strict=True)
    ]
