"""A trial: some sites train one policy for some rounds, in one process, with the real codec and the real arithmetic.

Each round, miners sample with the BF16 view of the shared weights, as in PULSE (appendix J.2). Every site takes its
local steps with `roles.trainer.learn.learner.Learner`, and encodes what they changed into bytes. The step of the shared
state is that of protocol/outer, with the plain mean. No clock is used, so a machine gives the same figures each time.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Final

import torch
from torch import Tensor

from bench.outer.methods import DENSE, VARIANTS, Variant
from bench.outer.quantizing import requantized
from bench.outer.task import GROUPS_PER_STEP, Task, new_learner, split
from protocol import pseudogradient
from protocol.outer.local_work import begin_round, masters, own_state, without_masters
from protocol.outer.round_records import RoundRules
from protocol.outer.shared_state import SharedState
from roles.trainer.learn.learner import Learner
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
    """

    variant: str
    rate: float
    local_steps: int = 8
    seed: int = 0
    rounds: int = ROUNDS


@dataclass
class Outcome:
    """What a trial gave.

    Attributes:
        curve: pass@1 before the first round and after each.
        payload_bytes: of a contribution, mean over sites, by round.
        sent: share of the weights that a contribution has, mean over sites, by round.
        parameters: of the policy.
    """

    curve: list[float] = field(default_factory=list)
    payload_bytes: list[float] = field(default_factory=list)
    sent: list[float] = field(default_factory=list)
    parameters: int = 0

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

    learner: Learner
    inner: dict[str, Tensor]
    feedback: dict[str, Tensor] | None = None
    ahead: dict[str, Tensor] | None = None

    def take_steps(self, start: Weights, groups: Sequence[VerifiedGroup]) -> dict[str, Tensor]:
        """Take a round's local steps from some weights; return the state of the learner."""
        self.learner.restore(begin_round(self.inner, start))
        for begin in range(0, len(groups), GROUPS_PER_STEP):
            self.learner.step(groups[begin : begin + GROUPS_PER_STEP])
        return self.learner.state()


@dataclass(frozen=True)
class _Sent:
    """A contribution, and the site's own states after the round."""

    payload: bytes
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
    task, outcome = Task(SITES * GROUPS_PER_STEP, trial.seed), Outcome()
    learner = new_learner(task.versions[0], trial.rate)
    task.serve(0)
    outcome.curve.append(task.pass_at_1())
    dense = _payload_of(masters(learner.state()))
    outcome.parameters = sum(tensor.numel() for tensor in task.versions[0].values())
    for number in range(trial.rounds):
        for step in range(trial.local_steps):
            learner.step(task.mine(number * trial.local_steps + step))
            task.publish(learner.view())
        outcome.curve.append(task.pass_at_1())
        outcome.payload_bytes.append(trial.local_steps * len(dense))
        outcome.sent.append(1.0)
    return outcome


def _payload_of(gradient: Weights) -> bytes:
    """Return the payload of a gradient."""
    zeros = {name: torch.zeros_like(tensor) for name, tensor in gradient.items()}
    return pseudogradient.encode(gradient, zeros, None, DENSE, bytes(32)).payload


def _run_rounds(trial: Trial, variant: Variant) -> Outcome:
    task, outcome = Task(SITES * trial.local_steps * GROUPS_PER_STEP, trial.seed), Outcome()
    rules = variant.rules(trial.local_steps, trial.rounds)
    shared = SharedState.begin(task.versions[0], has_momentum=rules.momentum > 0)
    learners = [new_learner(task.versions[0], trial.rate) for _ in range(SITES)]
    sites = [_Site(learner, without_masters(learner.state())) for learner in learners]
    outcome.parameters = sum(tensor.numel() for tensor in shared.weights.values())
    task.serve(0)
    outcome.curve.append(task.pass_at_1())
    upcoming: list[VerifiedGroup] = []
    for number in range(trial.rounds):
        groups = upcoming or task.mine(number)
        if variant.delay:  # the next local steps are taken while this round closes
            upcoming = task.mine(number + 1)
        sent = [
            _contribute(site, own, shared, rules, variant)
            for site, own in zip(sites, split(groups, SITES), strict=True)
        ]
        shared = shared.after([item.payload for item in sent], [1.0] * SITES, rules)
        for site, item in zip(sites, sent, strict=True):
            site.inner, site.ahead = item.inner, item.ahead
            site.feedback = item.residual if rules.uses_feedback(number) else None
        task.publish(shared.bf16_view())
        outcome.curve.append(task.pass_at_1())
        outcome.payload_bytes.append(fmean(item.size for item in sent))
        outcome.sent.append(fmean(item.entries for item in sent) / outcome.parameters)
    return outcome


def _contribute(
    site: _Site, groups: Sequence[VerifiedGroup], shared: SharedState, rules: RoundRules, variant: Variant
) -> _Sent:
    """Take a site's local steps and encode them.

    With a delay, a site does not wait for the round: it takes its steps from where its own last steps ended, and adds
    the difference to the shared weights when it has them.
    """
    start = shared.weights if site.ahead is None else site.ahead
    state, stream = site.take_steps(start, groups), shared.stream(rules)
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
        return _Sent(contribution.payload, len(contribution.payload), entries, feedback, inner, ahead)
    values, residual = requantized(shared.weights, contribution, digest, variant.value_bits)
    zeros = {name: torch.zeros_like(tensor) for name, tensor in values.items()}
    payload = pseudogradient.encode(values, zeros, None, DENSE, digest).payload
    size = len(contribution.payload) + entries * (variant.value_bits - 2) / 8
    return _Sent(payload, size, entries, residual, inner, ahead)
