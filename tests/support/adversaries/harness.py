"""Where an animal meets the validator: one run, one policy with its past, one miner, and the validator's own code.

A trial is one window: the animal produces the groups that the window's randomness asks of it and commits to them, and
Auditor and Judge of roles/validator say what they find. Nothing of the check is rebuilt here.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import Any

import trio
from torch import Tensor

from grailnode.engine.policy import Policy
from grailnode.engine.qwen3 import Qwen3, Qwen3Config
from grailnode.engine.torch_engine import TorchEngine
from grailnode.run.creation import SCORING, Choices, first_authority
from grailnode.store.memory import MemoryStore
from protocol import paths
from protocol.beacon import LocalKey
from protocol.digest import digest_weights
from protocol.encoding import Record
from protocol.environments import Environment
from protocol.identity.signing import SigningKey, open_signed, sign
from protocol.judging.evidence import Counts
from protocol.judging.ledger import LedgerRow
from protocol.judging.verdict import Verdict
from protocol.rollout.batch import Commitment, Group, assemble
from protocol.rollout.filters import EVERY_TOKEN, Filters
from protocol.run import FileRef, ModelSpec, ProofSpec, RunManifest, SamplingSpec
from protocol.window import Schedule
from roles.miner.produce import HonestProducer, MiningWindow, Producer
from roles.node.identity import Node
from roles.policy.assignment import Task
from roles.ports import Engine
from roles.validator.audit import Auditor
from roles.validator.judge import Judge
from roles.validator.window_cases import Case
from tests.support.adversaries.batched_engine import Together
from tests.support.adversaries.weight_changes import keeping, layers

Weights = Mapping[str, Tensor]
_EVERY_GROUP = 1_000_000  # millionths: what is audited of a newcomer


async def inline(function: Any, *arguments: Any) -> Any:
    """Compute in place."""
    await trio.lowlevel.checkpoint()
    return function(*arguments)


def key(name: str) -> SigningKey:
    """A key that follows from its name."""
    return SigningKey(sha256(name.encode()).digest())


class Silent:
    """Telemetry that nobody reads, a clock that stands still, and a beacon that nobody asks."""

    def event(self, name: str, **fields: str | int | float) -> None:
        """Nothing."""

    def now(self) -> float:
        """Zero."""
        return 0.0

    async def sleep_until(self, moment: float) -> None:
        """At once."""

    async def randomness(self, round_number: int) -> bytes:
        """A constant for each round."""
        return sha256(f"round {round_number}".encode()).digest()


@dataclass
class Past:
    """A policy and what it was before.

    Attributes:
        serving: the version that the windows are served by.
        version: the weights of a version.
        draft: a small model of half the depth that imitates the policy; None to cut the policy itself in half.
    """

    policy: Policy
    serving: int
    version: Callable[[int], Weights]
    draft: Weights | None = None


@dataclass(frozen=True)
class Outcome:
    """What a validator said of one window of one miner.

    Attributes:
        reasons: rejected groups by reason; accepted: groups accepted.
        tokens: completion tokens that were checked.
        counts: what the accepted groups showed.
    """

    reasons: Counter[str]
    accepted: int
    tokens: int
    counts: Counts


@dataclass
class Field:
    """One run with its validator.

    Args:
        past: the policy.
        environment: the task.
        proof: thresholds.
        group_size, groups: of a miner's window.
        lessons: windows from which predictors of sketches learn.
        together: windows are tried side by side (tests/support/adversaries/batched_engine.py).
        filters: of the run's sampling.
    """

    past: Past
    environment: Environment
    proof: ProofSpec
    max_tokens: int
    group_size: int = 8
    groups: int = 8
    lessons: int = 12
    together: bool = False
    filters: Filters = EVERY_TOKEN
    miner: SigningKey = field(default_factory=lambda: key("zoo miner"))
    neighbour: SigningKey = field(default_factory=lambda: key("zoo neighbour"))
    store: MemoryStore = field(default_factory=MemoryStore)
    works: dict[bytes, bytes] = field(default_factory=dict)
    _engines: dict[str, Engine] = field(default_factory=dict)
    _honest: dict[tuple[bytes, int, int], Group] = field(default_factory=dict)

    def __post_init__(self) -> None:
        policy, silent = self.past.policy, Silent()
        run = self._manifest()
        run_id = sha256(b"zoo").digest()  # not the manifest's digest: the same seeds whatever the thresholds
        self.task = Task(run_id, run, self.environment, policy.tokenizer, policy.vocabulary, inline)
        validator = key("zoo validator")
        store = self.store
        self.node = Node(run_id, run, validator, "zoo", store, MemoryStore(), silent, silent, silent, inline)

    def _manifest(self) -> RunManifest:
        ref = FileRef(name="config.json", digest=sha256(b"config").digest(), size=1)
        choices = Choices()
        return RunManifest(
            name="zoo",
            authority=first_authority(
                choices,
                roots=[key("zoo root").public],
                trainers=[key("zoo trainer").public],
                validators=[key("zoo validator").public],
            ),
            model=ModelSpec(files=(ref,), genesis=digest_weights(self.past.version(0))),
            environment=self.environment.name,
            data=None,
            sampling=SamplingSpec(
                temperature=1.0,
                max_tokens=self.max_tokens,
                eos=self.past.policy.eos,
                top_k=self.filters.top_k,
                top_p=self.filters.top_p,
                min_p=self.filters.min_p,
            ),
            group_size=self.group_size,
            groups=self.groups,
            schedule=Schedule(
                first_round=1,
                rounds=8,
                commit_rounds=5,
                audit_rounds=6,
                seal_rounds=16,
                verdict_rounds=24,
                lead=1,
                max_lag=2,
            ),
            beacon=LocalKey.from_seed(b"the beacon of the zoo").chain(1000, 0),
            proof=self.proof,
            scoring=SCORING,
            head_ttl=choices.head_ttl,
        )

    def share(self, other: "Field") -> None:
        """Use another field's engines and honest work: the same run but for its thresholds."""
        self._engines, self._honest = other._engines, other._honest

    def model(self, depth: int | None = None) -> Qwen3:
        """The architecture, or one of another depth."""
        config = Qwen3Config.of(self.past.policy.config)
        assert config is not None
        return Qwen3(config if depth is None else replace(config, num_hidden_layers=depth))

    async def engine(self, name: str, make: Callable[[], Weights]) -> Engine:
        """An engine of some weights, made once for each name. Their number of layers may be another than the
        policy's.
        """
        if name not in self._engines:
            weights = make()
            engine: Engine = TorchEngine(self.model(layers(weights)), run_sync=inline)
            await engine.stage(self.past.serving, dict(weights))
            await engine.commit()
            self._engines[name] = Together(engine) if self.together else engine
        return self._engines[name]

    async def serving(self) -> Engine:
        """The engine that every honest node has."""
        return await self.engine("serving", lambda: self.past.version(self.past.serving))

    async def draft(self) -> Engine:
        """An engine of half the depth."""
        whole = self.past.version(self.past.serving)
        half = list(range(layers(whole) // 2))
        return await self.engine("draft", lambda: self.past.draft or keeping(whole, half))

    def mining_window(self, window: int, miner: SigningKey | None = None) -> MiningWindow:
        """A window of the miner, or of somebody else."""
        return MiningWindow(window, self.randomness(window), self.past.serving, (miner or self.miner).public)

    @staticmethod
    def randomness(window: int) -> bytes:
        """Of the round that opens a window."""
        return sha256(f"zoo window {window}".encode()).digest()

    async def honest(self, mining_window: MiningWindow, indices: Sequence[int]) -> list[Group]:
        """What an honest miner makes; kept, so that those who only falsify it need not compute it again."""
        missing = [index for index in indices if (mining_window.miner, mining_window.window, index) not in self._honest]
        for group in (
            await HonestProducer(self.task, await self.serving()).produce(mining_window, missing) if missing else []
        ):
            self._honest[mining_window.miner, mining_window.window, group.index] = group
        return [self._honest[mining_window.miner, mining_window.window, index] for index in indices]

    async def trial(self, producer: Producer, window: int) -> Outcome:
        """One window of one program before the validator, who remembers nothing but what the program itself brings
        about.
        """
        self.works.clear()
        groups = await producer.produce(self.mining_window(window), range(self.groups))
        batch, commitment = assemble(groups)
        return await self.judge(batch, commitment, self.miner)

    async def windows_until_refused(self, producer: Producer, most: int) -> tuple[int, Counter[str]]:
        """How many windows of one group a miner has accepted before the first that is refused, and for what."""
        history: list[Counts] = []
        for window in range(most):
            self.works.clear()
            batch, commitment = assemble(await producer.produce(self.mining_window(window), [0]))
            outcome = await self.judge(batch, commitment, self.miner, history)
            if outcome.reasons:
                return window, outcome.reasons
            history.append(outcome.counts)
        return most, Counter()

    async def trial_of(self, miner: SigningKey, window: int) -> Outcome:
        """One window of an honest program under a key, which the validator remembers."""
        batch, commitment = assemble(await self.honest(self.mining_window(window, miner), range(self.groups)))
        return await self.judge(batch, commitment, miner)

    async def judge(
        self, batch: bytes, commitment: Commitment, miner: SigningKey, history: Sequence[Counts] = ()
    ) -> Outcome:
        """What the validator finds of a batch that lies in storage in time, and of the miner's windows up to it."""
        window = commitment.window
        await self.store.put(paths.batch(miner.public, window, commitment.batch), batch)
        judge = Judge(self.task, await self.serving(), window, self.randomness(window))
        auditor = Auditor(self.node, judge, sha256(f"draw {window}".encode()).digest(), self.works)
        signed = open_signed(sign(commitment, miner), Commitment, [miner.public])
        verdict, strange = await auditor.audit(
            Case(signed, self.groups, 0.0), _EVERY_GROUP, is_known=True, history=history
        )
        await self.store.delete(paths.batch(miner.public, window, commitment.batch))
        return _outcome(auditor.name_copies(verdict, strange))


def _outcome(verdict: Verdict) -> Outcome:
    reasons = Counter(judgement.reason for judgement in verdict.judgements if not judgement.accepted)
    tokens = sum(judgement.tokens for judgement in verdict.judgements)
    return Outcome(reasons, len(verdict.judgements) - reasons.total(), tokens, LedgerRow.of(verdict).counts)


def changed(record: Record, **changes: Any) -> Any:
    """A copy of a record with other values, unchecked: what a liar writes."""
    return record.model_copy(update=changes)
