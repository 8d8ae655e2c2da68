"""The registry of adversaries, and the functions of which they consist."""

import random
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass

from torch import Tensor

from grailnode.engine.torch_engine import TorchEngine
from protocol.judging.verdict import Reason
from protocol.rollout import challenge, sketch
from protocol.rollout.batch import Group, Rollout
from roles.miner.produce import HonestProducer, MiningWindow
from roles.policy.assignment import Assignment
from roles.ports import Engine, Generation
from tests.support.adversaries.harness import TrialHarness, alter

Tokens = tuple[int, ...]
Behaviour = Callable[[TrialHarness, MiningWindow, Sequence[int]], Awaitable[list[Group]]]


@dataclass(frozen=True)
class Adversary:
    """A way to cheat.

    Attributes:
        expected_reasons: the reasons for which a validator may refuse its windows.
        within_noise: whether its change may be within honest noise, so that the thresholds decide about a refusal.
    """

    name: str
    expected_reasons: frozenset[str]
    behaviour: Behaviour
    within_noise: bool = False

    def explains(self, reasons: Collection[str]) -> bool:
        """Return whether a window was refused for these reasons because of this adversary's change.

        A group without a fault of its own may be refused with its whole window.
        """
        return not self.expected_reasons.isdisjoint(reasons) and self.expected_reasons.issuperset(
            {*reasons} - {Reason.WINDOW.value}
        )

    def producer(self, harness: TrialHarness) -> "AdversarialProducer":
        """Return the producer of a miner that cheats in this way."""
        return AdversarialProducer(self, harness)


@dataclass(frozen=True)
class AdversarialProducer:
    """Implements Producer (roles/miner/produce.py)."""

    adversary: Adversary
    harness: TrialHarness

    async def produce(self, mining_window: MiningWindow, indices: Sequence[int]) -> list[Group]:
        return await self.adversary.behaviour(self.harness, mining_window, indices)


ADVERSARIES: dict[str, Adversary] = {}


def adversary(name: str, *expected_reasons: Reason, within_noise: bool = False) -> Callable[[Behaviour], Behaviour]:
    """Register a behaviour under a name, with the reasons for which it is refused.

    A wrong token may be one where the end is due, so what is refused for its sampling may be so for its stops.
    """
    reasons = {*expected_reasons, *([Reason.STOP] if Reason.SAMPLING in expected_reasons else [])}

    def register(behaviour: Behaviour) -> Behaviour:
        ADVERSARIES[name] = Adversary(name, frozenset(reason.value for reason in reasons), behaviour, within_noise)
        return behaviour

    return register


def assignments_of(harness: TrialHarness, mining_window: MiningWindow, indices: Sequence[int]) -> list[Assignment]:
    return [
        harness.task.assign(mining_window.window, mining_window.randomness, mining_window.miner, index)
        for index in indices
    ]


def window_rng(mining_window: MiningWindow) -> random.Random:
    """Return an adversary's random generator in a window."""
    return random.Random(mining_window.randomness)


async def honest_groups_of(
    engine: Engine, harness: TrialHarness, mining_window: MiningWindow, indices: Sequence[int]
) -> list[Group]:
    """Return the groups that an honest miner would produce with this engine."""
    return await HonestProducer(harness.task, engine).produce(mining_window, indices)


async def complete_group(
    harness: TrialHarness,
    mining_window: MiningWindow,
    assignment: Assignment,
    completions: Sequence[Tokens],
    engine: TorchEngine | None = None,
) -> Group:
    """Return a group of any completions, with the rewards and sketches of a prefill by the serving policy."""
    engine = engine or await harness.serving_engine()
    forwards = await engine.forward([assignment.prompt] * len(completions), completions)
    generations = [
        Generation(tokens, forward.hidden, ()) for tokens, forward in zip(completions, forwards, strict=True)
    ]
    producer = HonestProducer(harness.task, engine)
    return producer.group(mining_window, assignment, await producer.rollouts(mining_window, assignment, generations))


def with_sketches(harness: TrialHarness, mining_window: MiningWindow, group: Group, states: Sequence[Tensor]) -> Group:
    """Return the group with sketches of these hidden states, float32 [T, D] for each rollout."""
    seed = challenge.sketch_seed(harness.task.run_id, mining_window.window, mining_window.randomness)
    kind = harness.task.run.proof.sketch
    rollouts = [
        alter(rollout, sketch=sketch.commit(kind, hidden, seed))
        for rollout, hidden in zip(group.rollouts, states, strict=True)
    ]
    return with_rollouts(group, rollouts)


def with_rollouts(group: Group, rollouts: Sequence[Rollout]) -> Group:
    copy: Group = alter(group, rollouts=tuple(rollouts))
    return copy


async def hidden_states(engine: TorchEngine, prompt: Tokens, group: Group) -> list[Tensor]:
    """Return the hidden states float32 [T, D] of each rollout after a prompt."""
    forwards = await engine.forward([prompt] * len(group.rollouts), [rollout.tokens for rollout in group.rollouts])
    return [forward.hidden for forward in forwards]
