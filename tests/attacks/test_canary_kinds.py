"""A validator without the policy compares the noise of the tokens, which is public, to tell canaries from miners."""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
import trio

from grailnode.node.canary import CanaryProducer
from grailnode.store.memory import MemoryStore
from protocol.encoding import content_digest
from protocol.judging.evidence import weigh
from protocol.judging.report import is_false_group
from protocol.judging.verdict import Judgement, Reason
from protocol.proof import Arithmetic
from protocol.rollout import sampling
from protocol.rollout.batch import Group
from roles.miner.produce import MiningWindow
from roles.policy.assignment import Assignment
from roles.trainer.collect.logprob_bias import BiasEvidence, add_groups, weigh_ends
from roles.trainer.spool import CanaryNote
from roles.validator.judge import Judge
from tests.support.adversaries.harness import key
from tests.support.adversaries.key_histories import packaged_policy_harness
from tests.support.builders.proofs import BFLOAT16, FLOAT32, packaged_thresholds, proof_of

HARNESS = packaged_policy_harness(FLOAT32)
THRESHOLDS = HARNESS.proof.row(*FLOAT32)
TRAINER = key("trainer")
GROUPS = 48
LIAR = key("liar").public
TEMPERATURE = 3.0  # the packaged policy is certain of its answers; at this temperature its tokens depend on the noise


class Canary(CanaryProducer):
    """A canary that falsifies what it is told to."""

    async def falsify(self, mining_window: MiningWindow, group: Group) -> Group:
        """Return the group, falsified in the way that the coin decides."""
        return await self._falsify(mining_window, group)

    async def judge(self, mining_window: MiningWindow, group: Group) -> Judgement:
        """Return an honest judgement on a group by itself."""
        judge = Judge(self.task, self.engine, mining_window.window, mining_window.randomness)
        (judgement,) = await judge.judge([(group, content_digest(group.to_frame()))], THRESHOLDS)
        return judgement


async def make_canary() -> Canary:
    """Return a canary in a run in which tokens depend on the noise."""
    run = HARNESS.task.run
    hot = run.model_copy(update={"sampling": run.sampling.model_copy(update={"temperature": TEMPERATURE})})
    return Canary(replace(HARNESS.task, run=hot), await HARNESS.serving_engine(), TRAINER)


@cache
def true_groups() -> tuple[list[Assignment], list[Group]]:
    """Return twice as many true groups as are compared, with their assignments."""

    async def generate() -> tuple[list[Assignment], list[Group]]:
        canary, window = await make_canary(), HARNESS.mining_window(0)
        assignments = canary.assignments(window, range(2 * GROUPS))
        groups = [
            canary.group(window, assignment, await canary.rollouts(window, assignment, generations))
            for assignment, generations in zip(assignments, await canary.generate(window, assignments), strict=True)
        ]
        return assignments, groups

    return trio.run(generate)


def mean_noise(group: Group, seeds: Sequence[bytes]) -> float:
    """Return the mean noise of the chosen tokens, for which nobody needs the policy."""
    values = []
    for rollout, seed in zip(group.rollouts, seeds, strict=True):
        tokens = torch.tensor(rollout.tokens)
        noise = sampling.noise(sampling.seed_words([seed]), torch.arange(len(tokens)), int(tokens.max()) + 1)
        values.append(noise.gather(1, tokens[:, None]))
    return float(torch.cat(values).mean())


def best_accuracy(false_noise: Sequence[float]) -> float:
    """Return which share of false and other true groups the best threshold on the mean noise tells, either way."""
    assignments, groups = true_groups()
    others = list(zip(groups, assignments, strict=True))[GROUPS:]
    false, true = np.array(false_noise), np.array([mean_noise(group, item.seeds) for group, item in others])
    points = np.concatenate([false, true])
    return 0.5 + max(abs(float((false <= point).mean() - (true <= point).mean())) for point in points) / 2.0


def test_a_validator_without_the_policy_cannot_tell_a_canary_by_its_noise() -> None:
    """The best threshold tells at most 1/2 + d/2 of the groups.

    Two samples of n groups from one distribution differ in their shares below some threshold by more than d with a
    probability of at most e exp(-n d^2) (Dvoretzky-Kiefer-Wolfowitz; Wei and Dudley 2012); d is that for 10^-3. An edit
    changes the mean noise of a group by a few thousandths, which is little beside its standard deviation of 0.4. The
    tokens behind it are drawn as those of a true group.
    """

    async def falsify() -> tuple[set[str], list[float]]:
        canary, window = await make_canary(), HARNESS.mining_window(0)
        reasons, noise = set(), []
        for assignment, group in list(zip(*true_groups(), strict=True))[:GROUPS]:
            false_group = await canary.falsify(window, group)
            assert any(any(rollout.sketch) for rollout in false_group.rollouts)
            judgement = await canary.judge(window, false_group)
            evidence = weigh(judgement.counts, THRESHOLDS)
            assert max(evidence) > 2 * THRESHOLDS.threshold  # no honest validator accepts it
            reasons.add(judgement.reason)
            noise.append(mean_noise(false_group, assignment.seeds))
        return reasons, noise

    true_groups()
    reasons, noise = trio.run(falsify)
    assert reasons == {Reason.SAMPLING.value, Reason.SKETCH.value}
    distance = math.sqrt(math.log(math.e / 1e-3) / GROUPS)
    assert best_accuracy(noise) < 0.5 + distance / 2


def test_the_noise_of_exchanged_rollouts_tells_every_group() -> None:
    """Canaries had the rollouts of a group with each other's noise before: a threshold tells all of them."""
    assignments, groups = true_groups()
    pairs = list(zip(groups, assignments, strict=True))[:GROUPS]
    assert best_accuracy([mean_noise(group, (*item.seeds[1:], item.seeds[0])) for group, item in pairs]) == 1.0


def test_half_of_the_windows_have_only_true_groups_and_the_others_as_many_false_ones() -> None:
    false = np.array([[is_false_group(TRAINER, window, index) for index in range(16)] for window in range(1000)])
    has_false = false.any(axis=1)
    assert 0.45 < has_false.mean() < 0.55
    assert 0.48 < false[has_false].mean() < 0.52


def test_the_coin_decides_which_groups_are_false() -> None:
    async def judge() -> set[str]:
        canary = Canary(HARNESS.task, await HARNESS.serving_engine(), TRAINER)
        window = HARNESS.mining_window(1)
        judgements = {
            group.index: await canary.judge(window, group) for group in await canary.produce(window, range(8))
        }
        assert all(item.accepted != is_false_group(TRAINER, 1, index) for index, item in judgements.items())
        return {item.reason for item in judgements.values()}

    assert trio.run(judge) == {"", Reason.SAMPLING.value, Reason.SKETCH.value}


@pytest.mark.parametrize(("pair", "groups"), [(FLOAT32, 1), (BFLOAT16, 6)], ids=["float32", "bfloat16"])
def test_a_validator_that_ends_rollouts_anywhere_is_found_by_what_the_canary_notes(
    pair: tuple[Arithmetic, Arithmetic], groups: int
) -> None:
    """It ends one rollout of each group, as if it had drawn another token there."""
    row = packaged_thresholds(*pair)

    async def notes() -> list[CanaryNote]:
        state, window = MemoryStore(), HARNESS.mining_window(0)
        canary = CanaryProducer(HARNESS.task, await HARNESS.serving_engine(), TRAINER, state)
        await canary.produce(window, range(4 * groups))
        paths = sorted([item.path async for item in state.list("canaries/")])
        return [CanaryNote.from_bytes(await state.get(path, CanaryNote.max_bytes)) for path in paths]

    generator, noted = np.random.default_rng(6), trio.run(notes)[:groups]
    assert len(noted) == groups
    lies, honest = [], []
    for number, note in enumerate(noted):
        lengths = [len(data) // 4 for data in note.leads]
        assert sum(lengths) == note.judgement.tokens
        ends = [*lengths]
        ends[number % len(ends)] = int(generator.integers(lengths[number % len(ends)]))
        lies.append((LIAR, TRAINER.public, weigh_ends(ends, note.leads, row, has_filters=False)))
        honest.append((LIAR, TRAINER.public, weigh_ends(lengths, note.leads, row, has_filters=False)))
    evidence = BiasEvidence(next_window=0, nodes=(), values=b"", ends=b"", biased=b"")
    assert any(add_groups(evidence, (), lies, proof_of(row), 3).biased)
    assert not any(add_groups(evidence, (), honest, proof_of(row), 3).biased)
