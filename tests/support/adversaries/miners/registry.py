"""What an animal is, the list of them all, and what they are put together from."""

import random
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass

from torch import Tensor

from protocol.judging.verdict import Reason
from protocol.rollout import challenge, sketch
from protocol.rollout.batch import Group, Rollout
from roles.miner.produce import HonestProducer, MiningWindow
from roles.policy.assignment import Assignment
from roles.ports import Engine, Generation
from tests.support.adversaries.harness import Field, changed

Tokens = tuple[int, ...]
Behaviour = Callable[[Field, MiningWindow, Sequence[int]], Awaitable[list[Group]]]


@dataclass(frozen=True)
class Animal:
    """A cheat: its name, the reasons that fit it, and what it does.

    Attributes:
        slight: what it changes may lie within honest noise; whether it is caught depends on the thresholds.
    """

    name: str
    due: frozenset[str]
    behaviour: Behaviour
    slight: bool = False

    def fits(self, reasons: Collection[str]) -> bool:
        """Whether a window was refused for what was done in it; a group that passes by itself may fall with the
        others.
        """
        return not self.due.isdisjoint(reasons) and self.due.issuperset({*reasons} - {Reason.WINDOW.value})

    def at(self, field: Field) -> "Specimen":
        """The animal as a miner's producer."""
        return Specimen(self, field)


@dataclass(frozen=True)
class Specimen:
    """A Producer (roles/miner/produce.py)."""

    animal: Animal
    field: Field

    async def produce(self, mining_window: MiningWindow, indices: Sequence[int]) -> list[Group]:
        """What it delivers."""
        return await self.animal.behaviour(self.field, mining_window, indices)


ANIMALS: dict[str, Animal] = {}


def animal(name: str, *due: Reason, slight: bool = False) -> Callable[[Behaviour], Behaviour]:
    """Register a behaviour."""

    def register(behaviour: Behaviour) -> Behaviour:
        ANIMALS[name] = Animal(name, frozenset(reason.value for reason in due), behaviour, slight)
        return behaviour

    return register


def assigned(field: Field, mining_window: MiningWindow, indices: Sequence[int]) -> list[Assignment]:
    """What is asked of the miner."""
    return [
        field.task.assign(mining_window.window, mining_window.randomness, mining_window.miner, index)
        for index in indices
    ]


def chance(mining_window: MiningWindow) -> random.Random:
    """An animal's own dice in a window."""
    return random.Random(mining_window.randomness)


async def by(engine: Engine, field: Field, mining_window: MiningWindow, indices: Sequence[int]) -> list[Group]:
    """Everything as it should be, but by another policy."""
    return await HonestProducer(field.task, engine).produce(mining_window, indices)


async def finished(
    field: Field,
    mining_window: MiningWindow,
    due: Assignment,
    completions: Sequence[Tokens],
    engine: Engine | None = None,
) -> Group:
    """A group of any completions, with the rewards and the sketches that a prefill by the right policy gives."""
    engine = engine or await field.serving()
    seen = await engine.forward([due.prompt] * len(completions), completions)
    done = [Generation(tokens, forward.hidden, ()) for tokens, forward in zip(completions, seen, strict=True)]
    producer = HonestProducer(field.task, engine)
    return producer.group(mining_window, due, await producer.rollouts(mining_window, due, done))


def with_sketches(field: Field, mining_window: MiningWindow, group: Group, states: Sequence[Tensor]) -> Group:
    """The group with sketches of these hidden states, float32 [T, D] a rollout."""
    seed = challenge.sketch_seed(field.task.run_id, mining_window.window, mining_window.randomness)
    kind = field.task.run.proof.sketch
    rollouts = [
        changed(rollout, sketch=sketch.commit(kind, hidden, seed))
        for rollout, hidden in zip(group.rollouts, states, strict=True)
    ]
    return with_rollouts(group, rollouts)


def with_rollouts(group: Group, rollouts: Sequence[Rollout]) -> Group:
    """The group with other rollouts."""
    altered: Group = changed(group, rollouts=tuple(rollouts))
    return altered


async def states_of(engine: Engine, prompt: Tokens, group: Group) -> list[Tensor]:
    """The hidden states float32 [T, D] of each rollout behind a prompt."""
    seen = await engine.forward([prompt] * len(group.rollouts), [rollout.tokens for rollout in group.rollouts])
    return [forward.hidden for forward in seen]
