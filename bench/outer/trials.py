"""A trial: some sites train one policy for some rounds, in one process, with the real codec and the real arithmetic.

Each round, miners sample with the BF16 view of the shared weights, as in PULSE (appendix J.2). Every site takes its
local steps with `roles.trainer.learn.learner.Learner`, and encodes what they changed into bytes. The step of the shared
state is that of protocol/outer, with the plain mean or with a coordinator's weighting. No clock is used, so a machine
gives the same figures each time.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from statistics import fmean
from typing import Final

import torch
from torch import Tensor

from bench.outer.methods import DENSE, VARIANTS, Variant
from bench.outer.quantizing import requantized
from bench.outer.task import WARM_UP, Task, setup_of
from protocol import pseudogradient
from protocol.outer.comparing import SentRounds, compare
from protocol.outer.local_work import begin_round, masters, own_state, without_masters
from protocol.outer.robust import weigh_round
from protocol.outer.round_records import RoundRules
from protocol.outer.shared_state import SharedState
from roles.trainer.verified_batch import VerifiedGroup

SITES: Final = 4
ROUNDS: Final = 24

Weights = Mapping[str, Tensor]


@dataclass(frozen=True)
class Trial:
    """The parameters of a trial.

    Attributes:
        variant: name in `VARIANTS`; rate: of the sites' AdamW.
        seed: of problems and sampling.
        local_steps: of each site in a round (H).
        policy: which one is trained (bench/outer/task.py).
        unequal: the first site takes one step in a round, and two if the others take one.
        weighed: contributions count as a coordinator weighs them, and pass@1 is measured at the end alone.
    """

    variant: str
    rate: float
    local_steps: int = 8
    seed: int = 0
    rounds: int = ROUNDS
    policy: str = "small"
    unequal: bool = False
    weighed: bool = False

    @property
    def steps(self) -> list[int]:
        """The local steps of each site in a round."""
        first = self.local_steps if not self.unequal else 1 if self.local_steps > 1 else 2
        return [first, *[self.local_steps] * (SITES - 1)]

    def task(self, steps: int) -> Task:
        """Return the task, whose miners make the groups of so many local steps at a time."""
        setup = setup_of(self.policy)
        groups = steps * setup.groups_per_step
        return Task(replace(setup, seed=self.seed, groups=groups, learning_rate=self.rate, warmup=WARM_UP))


@dataclass
class Outcome:
    """What a trial gave.

    Attributes:
        curve: pass@1 before the first round and after each.
        payload_bytes: of a contribution, mean over sites, by round.
        sent: share of the weights that a contribution has, mean over sites, by round.
        parameters: of the policy.
        factors: of each site's contributions, by round, if they are weighed.
    """

    curve: list[float] = field(default_factory=list)
    payload_bytes: list[float] = field(default_factory=list)
    sent: list[float] = field(default_factory=list)
    parameters: int = 0
    factors: list[tuple[float, ...]] = field(default_factory=list)

    @property
    def end(self) -> float:
        """pass@1, mean over the last three rounds."""
        return fmean(self.curve[-3:])

    @property
    def area(self) -> float:
        """The area under the curve: mean pass@1 over the rounds."""
        return fmean(self.curve[1:])


@dataclass
class _Site:
    """A site's own state between two rounds: inner optimizer, error feedback, and steps ahead of the shared weights."""

    inner: dict[str, Tensor]
    feedback: dict[str, Tensor] | None = None
    ahead: dict[str, Tensor] | None = None

    def take_steps(self, start: Weights, groups: Sequence[VerifiedGroup], task: Task) -> dict[str, Tensor]:
        """Take a round's local steps from some weights; return the state of the learner."""
        task.learner.restore(begin_round(self.inner, start))
        for begin in range(0, len(groups), task.setup.groups_per_step):
            task.learner.step(groups[begin : begin + task.setup.groups_per_step])
        return task.learner.state()


@dataclass(frozen=True)
class _Sent:
    """A contribution, and the site's own states after the round."""

    payload: pseudogradient.Payload
    size: float
    entries: int
    residual: dict[str, Tensor]
    inner: dict[str, Tensor]
    ahead: dict[str, Tensor] | None


def run_trial(trial: Trial) -> Outcome:
    """Run a trial."""
    variant = VARIANTS[trial.variant]
    return _run_ddp(trial) if trial.variant == "ddp" else _run_rounds(trial, variant)


def _run_ddp(trial: Trial) -> Outcome:
    """Train with the mean gradient of all sites in each step: one learner with the groups of all sites.

    The loss weighs all tokens of a step alike, so the mean over the sites' gradients has other weights only by the
    sites' numbers of tokens.
    """
    task, outcome = trial.task(SITES), Outcome()
    learner = task.learner
    outcome.parameters = learner.parameters
    task.serve(0)
    outcome.curve.append(task.pass_at_1())
    dense = _payload_of(masters(learner.state()))
    for number in range(trial.rounds):
        for step in range(trial.local_steps):
            learner.step(task.mine(number * trial.local_steps + step))
            task.publish(learner.view())
        outcome.curve.append(task.pass_at_1())
        outcome.payload_bytes.append(trial.local_steps * len(dense))
        outcome.sent.append(1.0)
    return outcome


def _payload_of(gradient: Weights) -> pseudogradient.Payload:
    """Return the payload of a gradient."""
    zeros = {name: torch.zeros_like(tensor) for name, tensor in gradient.items()}
    return pseudogradient.encode(gradient, zeros, None, DENSE, bytes(32)).payload


def _run_rounds(trial: Trial, variant: Variant) -> Outcome:
    ends = [*accumulate(trial.steps)]
    task, outcome = trial.task(ends[-1]), Outcome()
    rules, sent_before = variant.rules(trial.local_steps, trial.rounds), SentRounds()
    shared = SharedState.begin(task.versions[0], has_momentum=rules.momentum > 0)
    new_inner = without_masters(task.learner.state())
    sites, workers = [_Site(new_inner) for _ in range(SITES)], [bytes([place]) for place in range(SITES)]
    outcome.parameters = task.learner.parameters
    task.serve(0)
    outcome.curve.append(task.pass_at_1())
    upcoming: list[VerifiedGroup] = []
    for number in range(trial.rounds):
        groups = upcoming or task.mine(number)
        if variant.delay:  # the next local steps are taken while this round closes
            upcoming = task.mine(number + 1)
        size = task.setup.groups_per_step
        sent = [
            _contribute(site, groups[begin * size : end * size], task, shared, rules, variant)
            for site, (begin, end) in zip(sites, pairwise([0, *ends]), strict=True)
        ]
        payloads = [item.payload for item in sent]
        factors: tuple[float, ...] = (1.0,) * SITES
        if trial.weighed:
            comparison = compare(shared, payloads, rules, bytes(32))
            weighting = weigh_round(workers, comparison, sent_before)
            sent_before, factors = sent_before.after(weighting.sent), weighting.factors
            outcome.factors.append(factors)
        counted = [place for place, factor in enumerate(factors) if factor > 0]
        shared = shared.after([payloads[place] for place in counted], [factors[place] for place in counted], rules)
        for site, item, factor in zip(sites, sent, factors, strict=True):
            site.inner, site.ahead = item.inner if factor > 0 else new_inner, item.ahead
            site.feedback = item.residual if factor > 0 and rules.uses_feedback(number) else None
        task.publish(shared.bf16_view())
        if not trial.weighed or number + 1 == trial.rounds:
            outcome.curve.append(task.pass_at_1())
        outcome.payload_bytes.append(fmean(item.size for item in sent))
        outcome.sent.append(fmean(item.entries for item in sent) / outcome.parameters)
    return outcome


def _contribute(
    site: _Site, groups: Sequence[VerifiedGroup], task: Task, shared: SharedState, rules: RoundRules, variant: Variant
) -> _Sent:
    """Take a site's local steps and encode them.

    With a delay, a site does not wait for the round: it takes its steps from where its own last steps ended, and adds
    the difference to the shared weights when it has them.
    """
    start = shared.weights if site.ahead is None else site.ahead
    state, stream = site.take_steps(start, groups, task), shared.stream(rules)
    local, inner = masters(state), own_state(state, shared.weights, stream)
    if start is not shared.weights:
        local = {name: shared.weights[name] + (local[name] - start[name]) for name in local}
    ahead = local if variant.delay else None
    uses_feedback = rules.uses_feedback(shared.step)
    zeros = {name: torch.zeros_like(tensor) for name, tensor in shared.weights.items()}
    decay = rules.feedback_decay if uses_feedback else 1.0
    feedback = site.feedback if uses_feedback and site.feedback is not None else zeros
    digest = shared.digests.weights
    contribution = pseudogradient.encode(stream, local, feedback, rules.coding, digest, decay=decay)
    feedback = {**feedback, **contribution.residual}
    entries = sum(contribution.head.entries)
    if variant.value_bits is None:
        return _Sent(contribution.payload, sum(map(len, contribution.payload)), entries, feedback, inner, ahead)
    values, residual = requantized(shared.weights, contribution, digest, variant.value_bits)
    zeros = {name: torch.zeros_like(tensor) for name, tensor in values.items()}
    payload = pseudogradient.encode(values, zeros, None, DENSE, digest).payload
    size = sum(map(len, contribution.payload)) + entries * (variant.value_bits - 2) / 8
    return _Sent(payload, size, entries, residual, inner, ahead)
