"""Runs adversaries against the validator: one run, the versions of one policy, one miner, and the validator's own code.

A trial is one window: the adversary produces the groups that it is assigned and commits to them, and Auditor and Judge
of roles/validator judge them. No part of the check is implemented here.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor

from grailnode.engine.exact_qwen3 import ExactQwen3
from grailnode.engine.policy import Policy
from grailnode.engine.qwen3 import Qwen3, Qwen3Config
from grailnode.engine.torch_engine import TorchEngine
from grailnode.environments import registry
from grailnode.store.memory import MemoryStore
from protocol import paths
from protocol.digest import digest_weights
from protocol.encoding import Record
from protocol.environments import Environment
from protocol.identity.signing import SigningKey, open_signed, sign
from protocol.judging.evidence import NO_EVIDENCE, Counts, Evidence, advance, count_luck
from protocol.judging.ledger import LedgerRow
from protocol.judging.roster import Roster
from protocol.judging.verdict import Verdict
from protocol.proof import Arithmetic, ProofSpec
from protocol.rollout.batch import Commitment, Group, assemble
from protocol.rollout.filters import EVERY_TOKEN, Filters
from protocol.run import EpisodeSpec, FileRef, ModelSpec, RunManifest, SamplingSpec
from roles.miner.produce import HonestProducer, MiningWindow, Producer
from roles.node.identity import Node
from roles.policy.assignment import Task
from roles.policy.causal_model import CausalModel
from roles.ports import Engine
from roles.validator.audit import Auditor
from roles.validator.judge import Judge
from roles.validator.window_cases import Case
from tests.support.adversaries.weight_changes import count_layers, keep_layers
from tests.support.builders import samples
from tests.support.simulation.network import inline

Weights = Mapping[str, Tensor]
_EVERY_GROUP = 1_000_000  # millionths: the share of a new miner's groups that is audited


def key(name: str) -> SigningKey:
    return SigningKey(sha256(name.encode()).digest())


class StubPorts:
    """Telemetry that drops events, a clock that stands still, and a beacon with fixed randomness."""

    def event(self, name: str, **fields: str | int | float) -> None:
        """Drop the event."""

    def now(self) -> float:
        return 0.0

    async def sleep_until(self, moment: float) -> None:
        """Return at once."""

    async def randomness(self, round_number: int) -> bytes:
        """Return 32 bytes that depend on the round number alone."""
        return sha256(f"round {round_number}".encode()).digest()


@dataclass
class PolicyHistory:
    """A policy and its earlier versions.

    Attributes:
        serving: the version that serves the windows.
        version: returns the weights of a version.
        draft: weights of a model of half the depth that imitates the policy; None for the first half of its layers.
    """

    policy: Policy
    serving: int
    version: Callable[[int], Weights]
    draft: Weights | None = None


@dataclass(frozen=True)
class TrialOutcome:
    """The verdict of the validator on one window of one miner.

    Attributes:
        reasons: numbers of rejected groups by reason.
        accepted: number of accepted groups.
        tokens: number of completion tokens that were checked.
        counts: of the accepted groups.
        rewards: of their rollouts, by which they are trained on, in millionths.
    """

    reasons: Counter[str]
    accepted: int
    tokens: int
    counts: Counts
    rewards: tuple[int, ...]


@dataclass
class TrialHarness:
    """One run with its validator.

    Args:
        policy_history: the policy and its earlier versions.
        environment: the task.
        proof: the thresholds.
        max_tokens: limit of a completion.
        group_size, groups: rollouts of a group, and groups of a miner's window.
        training_windows: number of windows from which predictors of sketches learn.
        wrap: what every engine is made into.
        filters: the filters of the run's sampling.
        episode: of a run with episodes.
        exact: whether all compute in exact arithmetic.
        declaration: how the miner declares to compute; None for how the validator does.
        dtype: in which all engines compute.
        change: of the model of all engines.
        judging_engine: of the validator; None for that of the honest nodes.
    """

    policy_history: PolicyHistory
    environment: Environment
    proof: ProofSpec
    max_tokens: int
    group_size: int = 8
    groups: int = 8
    training_windows: int = 12
    wrap: Callable[[TorchEngine], TorchEngine] = field(default=lambda engine: engine)
    filters: Filters = EVERY_TOKEN
    episode: EpisodeSpec | None = None
    exact: bool = False
    declaration: Arithmetic | None = None
    dtype: torch.dtype = torch.float32
    change: Callable[[CausalModel], CausalModel] = field(default=lambda model: model)
    judging_engine: Engine | None = None
    miner: SigningKey = field(default_factory=lambda: key("adversary miner"))
    neighbour: SigningKey = field(default_factory=lambda: key("adversary neighbour"))
    store: MemoryStore = field(default_factory=MemoryStore)
    accepted_work: dict[bytes, bytes] = field(default_factory=dict)
    _engines: dict[str, TorchEngine] = field(default_factory=dict)
    _group_cache: dict[tuple[bytes, int], dict[int, Group]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        policy, stub = self.policy_history.policy, StubPorts()
        run = self._manifest()
        run_id = sha256(b"adversaries").digest()  # of no manifest, so that seeds do not depend on the thresholds
        self.task = Task(run_id, run, self.environment, policy.tokenizer, policy.vocabulary, inline)
        validator = key("adversaries validator")
        store = self.store
        self.node = Node(run_id, run, validator, "adversaries", store, MemoryStore(), stub, stub, stub, inline)

    def _manifest(self) -> RunManifest:
        filters, ref = self.filters, FileRef(name="config.json", digest=sha256(b"config").digest(), size=1)
        name = self.environment.name
        return samples.run_manifest(
            model=ModelSpec(files=(ref,), genesis=digest_weights(self.policy_history.version(0))),
            environment=samples.task(
                registry.built_in_spec(name) if registry.is_built_in(name) else None,
                name=name,
                exact=self.environment.exact,
            ),
            sampling=SamplingSpec(
                temperature=1.0,
                max_tokens=self.max_tokens,
                stops=self.policy_history.policy.stops,
                top_k=filters.top_k,
                top_p=filters.top_p,
                min_p=filters.min_p,
            ),
            episode=self.episode,
            numerics="exact" if self.exact else "calibrated",
            group_size=self.group_size,
            groups=self.groups,
            proof=self.proof,
        )

    @property
    def own_arithmetic(self) -> Arithmetic:
        """How the validator computes."""
        if self.judging_engine is not None:
            return self.judging_engine.arithmetic
        if self.exact:
            return "exact"
        return "torch-float32" if self.dtype == torch.float32 else "torch-bfloat16"

    @property
    def arithmetic(self) -> Arithmetic:
        return self.declaration or self.own_arithmetic

    def model(self, depth: int | None = None) -> Qwen3:
        """Return the policy's model, or one with another number of layers."""
        config = Qwen3Config.of(self.policy_history.policy.config)
        assert config is not None
        make = ExactQwen3 if self.exact else Qwen3
        return make(config if depth is None else replace(config, num_hidden_layers=depth))

    async def engine(self, name: str, make: Callable[[], Weights]) -> TorchEngine:
        """Return the engine of a name, made at its first use from weights of any number of layers."""
        if name not in self._engines:
            weights = make()
            model = self.change(self.model(count_layers(weights)))
            engine = TorchEngine(model, dtype=self.dtype, run_sync=inline)
            await engine.stage(self.policy_history.serving, dict(weights))
            await engine.commit()
            self._engines[name] = self.wrap(engine)
        return self._engines[name]

    @property
    def serving_weights(self) -> Weights:
        return self.policy_history.version(self.policy_history.serving)

    async def serving_engine(self) -> TorchEngine:
        """Return the engine of the honest nodes."""
        return await self.engine("serving", lambda: self.serving_weights)

    async def draft_engine(self) -> TorchEngine:
        """Return an engine with half of the policy's layers."""
        half = list(range(count_layers(self.serving_weights) // 2))
        return await self.engine("draft", lambda: self.policy_history.draft or keep_layers(self.serving_weights, half))

    def mining_window(self, window: int, miner: SigningKey | None = None) -> MiningWindow:
        """Return a window of the miner, or of another one."""
        return MiningWindow(window, self.randomness(window), self.policy_history.serving, (miner or self.miner).public)

    @staticmethod
    def randomness(window: int) -> bytes:
        """Return the randomness of the round that opens a window, 32 bytes."""
        return sha256(f"adversaries window {window}".encode()).digest()

    async def honest_groups(self, mining_window: MiningWindow, indices: Sequence[int]) -> list[Group]:
        """Return the groups of an honest miner. They are cached for the adversaries that falsify them."""
        cache = self._group_cache.setdefault((mining_window.miner, mining_window.window), {})
        if missing := [index for index in indices if index not in cache]:
            producer = HonestProducer(self.task, await self.serving_engine())
            cache |= {group.index: group for group in await producer.produce(mining_window, missing)}
        return [cache[index] for index in indices]

    async def trial(self, producer: Producer, window: int) -> TrialOutcome:
        """Judge one window of a producer. The validator knows no other work than what the producer shows it."""
        self.accepted_work.clear()
        groups = await producer.produce(self.mining_window(window), range(self.groups))
        return await self.judge(*assemble(groups, self.arithmetic), self.miner)

    async def windows_until_refusal(self, producer: Producer, max_windows: int) -> tuple[int, Counter[str]]:
        """Return how many windows of one group are accepted before the first refusal, and its reasons."""
        evidence, row = NO_EVIDENCE, self.proof.row(self.arithmetic, self.own_arithmetic)
        for window in range(max_windows):
            self.accepted_work.clear()
            groups = await producer.produce(self.mining_window(window), [0])
            outcome = await self.judge(*assemble(groups, self.arithmetic), self.miner, evidence)
            if outcome.reasons:
                return window, outcome.reasons
            evidence = advance(evidence, outcome.counts, row)
        return max_windows, Counter()

    async def luck(self, producer: Producer, window: int) -> tuple[TrialOutcome, TrialOutcome]:
        """Return a window's outcome, and one with the luck and the rewards that honest groups make it."""
        groups = await producer.produce(self.mining_window(window), range(self.groups))
        honest = await self.honest_groups(self.mining_window(window), range(self.groups))
        rewards, others = (
            [rollout.reward for group in each for rollout in group.rollouts] for each in (groups, honest)
        )
        outcome = await self.judge(*assemble(groups, self.arithmetic), self.miner)
        counts = alter(outcome.counts, luck=count_luck(zip(rewards, others, strict=True)))
        return outcome, replace(outcome, counts=counts, rewards=tuple(others))

    async def honest_trial(self, miner: SigningKey, window: int) -> TrialOutcome:
        """Judge one window of an honest miner, whose accepted work the validator remembers."""
        groups = await self.honest_groups(self.mining_window(window, miner), range(self.groups))
        return await self.judge(*assemble(groups, self.arithmetic), miner)

    async def judge(
        self, batch: bytes, commitment: Commitment, miner: SigningKey, evidence: Evidence = NO_EVIDENCE
    ) -> TrialOutcome:
        """Return the validator's verdict on a batch that is in storage in time.

        Args:
            evidence: of the miner's earlier windows.
        """
        window = commitment.window
        await self.store.put(paths.batch(miner.public, window, commitment.batch), batch)
        engine = self.judging_engine or await self.serving_engine()
        draw = sha256(f"draw {window}".encode()).digest()
        judge = Judge(self.task, engine, window, self.randomness(window), draw=draw)
        auditor = Auditor(self.node, judge, Roster((self.node.key.public,), 1), draw, self.accepted_work)
        signed = open_signed(sign(commitment, miner), Commitment, [miner.public])
        verdict, suspected_copies = await auditor.audit(
            Case(signed, self.groups, 0.0), _EVERY_GROUP, is_known=True, evidence=evidence
        )
        await self.store.delete(paths.batch(miner.public, window, commitment.batch))
        return _outcome(auditor.name_copies(verdict, suspected_copies))


def _outcome(verdict: Verdict) -> TrialOutcome:
    reasons = Counter(judgement.reason for judgement in verdict.judgements if not judgement.accepted)
    tokens = sum(judgement.tokens for judgement in verdict.judgements)
    rewards = tuple(reward for judgement in verdict.judgements for reward in judgement.rewards)
    counts = LedgerRow.of(verdict).counts
    return TrialOutcome(reasons, len(verdict.judgements) - reasons.total(), tokens, counts, rewards)


def alter(record: Record, **changes: Any) -> Any:
    """Return a copy of a record with other values, without any checks."""
    return record.model_copy(update=changes)
