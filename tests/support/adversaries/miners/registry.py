"""The registry of adversaries, and what one can make of the groups of a window."""

import random
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from grailnode.engine.torch_engine import TorchEngine
from protocol.judging.verdict import Reason
from protocol.rollout import challenge, sketch
from protocol.rollout.batch import Group, Rollout
from roles.miner.produce import HonestProducer, MiningWindow
from roles.policy.assignment import Assignment
from roles.ports import Engine, Generation, Request
from tests.support.adversaries.harness import TrialHarness, alter

Tokens = tuple[int, ...]


@dataclass(frozen=True)
class Attempt:
    """A window in which an adversary delivers groups.

    Attributes:
        indices: the numbers of the groups.
    """

    harness: TrialHarness
    window: MiningWindow
    indices: Sequence[int]

    @property
    def assignments(self) -> list[Assignment]:
        """What the seeds of the window assign to the miner, for each group."""
        assign, window = self.harness.task.assign, self.window
        return [assign(window.window, window.randomness, window.miner, index) for index in self.indices]

    def rng(self) -> random.Random:
        """Return the adversary's random generator in this window, at its beginning."""
        return random.Random(self.window.randomness)

    async def honest_groups(self) -> list[Group]:
        """Return what an honest miner delivers."""
        return await self.harness.honest_groups(self.window, self.indices)

    async def pairs(self) -> list[tuple[Group, Assignment]]:
        """Return each honest group with its assignment."""
        return list(zip(await self.honest_groups(), self.assignments, strict=True))

    async def produce(self, engine: Engine) -> list[Group]:
        """Return the groups that an honest miner would produce with another engine."""
        return await HonestProducer(self.harness.task, engine).produce(self.window, self.indices)

    async def completions(
        self, assignment: Assignment, seeds: Sequence[bytes], temperature: float = 1.0, engine: Engine | None = None
    ) -> list[Tokens]:
        """Return completions with these seeds, by default of the serving policy."""
        params = replace(self.harness.task.run.sampling.params(), temperature=temperature)
        engine = engine or await self.harness.serving_engine()
        generations = await engine.generate([Request(assignment.prompt, seed) for seed in seeds], params)
        return [item.tokens for item in generations]

    async def complete(self, assignment: Assignment, completions: Sequence[Tokens]) -> Group:
        """Return a group of any completions, with the rewards and sketches of a prefill by the serving policy."""
        engine = await self.harness.serving_engine()
        forwards = await engine.forward([assignment.prompt] * len(completions), completions)
        generations = [
            Generation(tokens, forward.hidden, ()) for tokens, forward in zip(completions, forwards, strict=True)
        ]
        producer = HonestProducer(self.harness.task, engine)
        return producer.group(self.window, assignment, await producer.rollouts(self.window, assignment, generations))

    def with_sketches(self, group: Group, states: Sequence[Tensor]) -> Group:
        """Return the group with sketches of these hidden states, float32 [T, D] for each rollout."""
        run, window = self.harness.task.run, self.window
        seed = challenge.sketch_seed(self.harness.task.run_id, window.window, window.randomness)
        sketches = iter([sketch.commit(run.proof.sketch, hidden, seed) for hidden in states])
        return with_rollouts(group, lambda rollout: alter(rollout, sketch=next(sketches)))


Behaviour = Callable[[Attempt], Awaitable[list[Group]]]


@dataclass(frozen=True)
class AdversarialProducer:
    """Implements Producer (roles/miner/produce.py)."""

    behaviour: Behaviour
    harness: TrialHarness

    async def produce(self, mining_window: MiningWindow, indices: Sequence[int]) -> list[Group]:
        return await self.behaviour(Attempt(self.harness, mining_window, indices))


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

    def producer(self, harness: TrialHarness) -> AdversarialProducer:
        """Return the producer of a miner that cheats in this way."""
        return AdversarialProducer(self.behaviour, harness)


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


def falsified(name: str, *expected_reasons: Reason) -> Callable[[Callable[[Group], Group]], Callable[[Group], Group]]:
    """Register the behaviour of a miner that falsifies each honest group by a function."""

    def register(falsify: Callable[[Group], Group]) -> Callable[[Group], Group]:
        async def behaviour(attempt: Attempt) -> list[Group]:
            return [falsify(group) for group in await attempt.honest_groups()]

        adversary(name, *expected_reasons)(behaviour)
        return falsify

    return register


def with_rollouts(group: Group, change: Callable[[Rollout], Rollout]) -> Group:
    """Return the group with each rollout changed by a function."""
    copy: Group = alter(group, rollouts=tuple(map(change, group.rollouts)))
    return copy


def with_first_rollout(group: Group, rollout: Rollout) -> Group:
    """Return the group with another first rollout."""
    copy: Group = alter(group, rollouts=(rollout, *group.rollouts[1:]))
    return copy


async def hidden_states(engine: TorchEngine, prompt: Tokens, group: Group) -> list[Tensor]:
    """Return the hidden states float32 [T, D] of each rollout after a prompt."""
    forwards = await engine.forward([prompt] * len(group.rollouts), [rollout.tokens for rollout in group.rollouts])
    return [forward.hidden for forward in forwards]
