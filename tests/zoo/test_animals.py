"""Every animal before the real validator: refused in its first audited window, for the reason that fits what it did."""

from dataclasses import replace

import pytest
import trio

from grailnode.store.memory import MemoryStore
from protocol.rollout.filters import Filters
from tests.support.adversaries.harness import Field, Outcome, changed
from tests.support.adversaries.miners import ANIMALS, Animal

WINDOWS = range(2)
CAUGHT = [animal for animal in ANIMALS.values() if not animal.slight]
SLIGHT = [animal for animal in ANIMALS.values() if animal.slight]


def trials(field: Field, animal: Animal) -> list[Outcome]:
    async def run() -> list[Outcome]:
        return [await field.trial(animal.at(field), window) for window in WINDOWS]

    return trio.run(run)


def test_honest_work_is_accepted(field: Field) -> None:
    async def run() -> list[Outcome]:
        return [await field.trial_of(field.miner, window) for window in WINDOWS]

    for outcome in trio.run(run):
        assert not outcome.reasons
        assert outcome.accepted == field.groups


@pytest.mark.parametrize("animal", CAUGHT, ids=lambda animal: animal.name)
def test_an_animal_is_caught_in_every_window(field: Field, animal: Animal) -> None:
    for outcome in trials(field, animal):
        assert animal.fits(outcome.reasons)


@pytest.mark.parametrize("animal", SLIGHT, ids=lambda animal: animal.name)
def test_what_may_lie_within_honest_noise_is_refused_for_no_other_reason(field: Field, animal: Animal) -> None:
    for outcome in trials(field, animal):
        assert not outcome.reasons or animal.fits(outcome.reasons)


FILTERS = [Filters(top_k=5), Filters(top_p=0.9), Filters(min_p=0.05)]
DRAWN = [
    "own noise",
    "greedy",
    "special tokens",
    "one edited token in 10% of rollouts",
    "draft model of half the depth, full prefill",
]


@pytest.mark.parametrize("filters", FILTERS, ids=str)
@pytest.mark.parametrize("margin", [0.0, 0.1], ids=["float32", "mixed"])
def test_a_filter_excuses_nobody_and_accuses_nobody(field: Field, filters: Filters, margin: float) -> None:
    proof = field.proof if not margin else changed(field.proof, margin=margin, margin_limit=7.2)
    filtered = replace(field, filters=filters, proof=proof, store=MemoryStore(), works={}, _engines={}, _honest={})

    async def run() -> Outcome:
        return await filtered.trial_of(filtered.miner, 0)

    outcome = trio.run(run)
    assert not outcome.reasons
    assert outcome.accepted == filtered.groups
    for name in DRAWN:
        for outcome in trials(filtered, ANIMALS[name]):
            assert ANIMALS[name].fits(outcome.reasons), name


def test_the_registry_is_whole() -> None:
    assert len(ANIMALS) >= 34
    assert all(animal.due for animal in ANIMALS.values())
