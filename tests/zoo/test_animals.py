"""Every animal before the real validator: refused in its first audited window, for the reason that fits what it did."""

import pytest
import trio

from bench.zoo.animals import ANIMALS, Animal
from bench.zoo.field import Field, Outcome

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


def test_the_registry_is_whole() -> None:
    assert len(ANIMALS) >= 34
    assert all(animal.due for animal in ANIMALS.values())
