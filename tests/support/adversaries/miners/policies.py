"""The due noise, but another policy."""

from collections.abc import Callable, Sequence

from grailnode.calibration.copies import quantized
from protocol.judging.verdict import Reason
from protocol.rollout.batch import Group
from roles.miner.produce import HonestProducer, MiningWindow
from tests.support.adversaries.harness import Field, Weights
from tests.support.adversaries.miners.registry import Behaviour, animal, assigned, by, finished
from tests.support.adversaries.weight_changes import keeping, layers


def other_policy(name: str, make: Callable[[Field], Weights]) -> Behaviour:
    """Rollouts of other weights, sketch and all."""

    async def behaviour(field: Field, mining_window: MiningWindow, indices: Sequence[int]) -> list[Group]:
        return await by(await field.engine(name, lambda: make(field)), field, mining_window, indices)

    return behaviour


def _serving(field: Field) -> Weights:
    return field.past.version(field.past.serving)


def _older(versions: int) -> Callable[[Field], Weights]:
    return lambda field: field.past.version(max(0, field.past.serving - versions))


def _bits(bits: int) -> Callable[[Field], Weights]:
    return lambda field: quantized(_serving(field), bits)


def _skipping(field: Field) -> Weights:
    middle = layers(_serving(field)) // 2
    return keeping(_serving(field), [layer for layer in range(layers(_serving(field))) if layer != middle])


for _count in (1, 5, 50):
    _name = f"policy {_count} version{'s' if _count > 1 else ''} old"
    animal(_name, Reason.SKETCH, Reason.SAMPLING, Reason.WINDOW, slight=True)(other_policy(_name, _older(_count)))
for _count in (8, 4, 3):
    _name = f"{_count}-bit weights"
    animal(_name, Reason.SKETCH, Reason.SAMPLING, Reason.WINDOW, slight=_count == 8)(other_policy(_name, _bits(_count)))
animal("one layer skipped", Reason.SKETCH)(other_policy("one layer skipped", _skipping))


@animal("draft model of half the depth, full prefill", Reason.SAMPLING)
async def draft(field: Field, mining_window: MiningWindow, indices: Sequence[int]) -> list[Group]:
    """Tokens by a cheap model with the due noise, then one prefill of the right one for the sketch."""
    dues, engine = assigned(field, mining_window, indices), await field.draft()
    done = await HonestProducer(field.task, engine).generate(dues)
    return [
        await finished(field, mining_window, due, [item.tokens for item in group])
        for due, group in zip(dues, done, strict=True)
    ]
