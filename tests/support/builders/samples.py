"""Small valid objects of every kind from fixed seeds, for tests and golden vectors."""

import hashlib
import math
import struct
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from protocol.beacon import ChainInfo
from protocol.chain.manifest import Head, Manifest, PatchRef, TensorRow
from protocol.chain.verifier import Trust
from protocol.encoding import Record
from protocol.environments.record import CodeRef, EnvironmentShare, EnvironmentSpec
from protocol.identity.admission import Invite, ProofOfWorkSolution
from protocol.identity.authority import OPEN, Admission, Authority, ChainPoint, Revision
from protocol.identity.participant import Announcement
from protocol.identity.signing import Envelope, Signature, SigningKey
from protocol.judging.evidence import NO_COUNTS, UNREPRODUCED, Counts, Tally
from protocol.judging.ledger import (
    GROUP,
    SHARE,
    Amendment,
    Evaluation,
    LedgerRow,
    Seal,
    StratumResult,
    Summary,
    Witness,
)
from protocol.judging.report import CanaryFailure, Disagreement, ValidatorReport
from protocol.judging.verdict import Judgement, ReauditVerdict, Verdict
from protocol.lora import LoraSpec
from protocol.objects import ObjectRef
from protocol.outer.round_records import (
    AggregatedShare,
    CountedContribution,
    OuterState,
    PayloadRef,
    PlannedContribution,
    Refusal,
    RoundContribution,
    RoundManifest,
    RoundPlan,
    RoundPointer,
    RoundProducts,
    RoundRules,
)
from protocol.proof import DECADE, RATE_UNIT, STATISTICS, Alternative, ProofSpec, Table, Thresholds
from protocol.rollout.batch import Commitment, EpisodeRollout, Group, Rollout, pack_tokens
from protocol.rollout.challenge import rollout_seed
from protocol.run import EvaluationSpec, FileRef, ModelSpec, RunManifest, SamplingSpec, ScoringSpec
from protocol.window import Schedule

# Quicknet's public key: a point of the curve that every implementation of the beacon knows.
BEACON_KEY = bytes.fromhex(
    "83cf0f2896adee7eb8b5f01fcad3912212c437e0073e911fb90022d3e760183c8c4b450b6a0a6c3ac6a5776a2d1064510d1fec758c921cc22b0e17e63aaf4bcb"
    "5ed66304de9cf809bd274ca73bab4af5a6e9c76a4bc09e76eae8991ef5ece45a"
)
Sample = TypeVar("Sample")
TABLE: tuple[TensorRow, ...] = (("a", "BF16", (2, 3)), ("b", "F32", ()))


def digest(name: str) -> bytes:
    """Return the 32 bytes that belong to a name."""
    return hashlib.sha256(name.encode()).digest()


def key(name: str) -> SigningKey:
    """Return the key pair that belongs to a name."""
    return SigningKey(digest(f"key of {name}"))


def seeds(count: int, name: str = "seed") -> list[bytes]:
    """Return the seeds of a group's first rollouts, 16 bytes each."""
    return [rollout_seed(digest(name), index) for index in range(count)]


TRAINER, MINER, VALIDATOR, ROOT = key("trainer"), key("miner"), key("validator"), key("root")
RUN_ID = digest("run")
OF_WINDOW: dict[str, Any] = {"run": RUN_ID, "window": 7, "version": 3}
OF_MINER = OF_WINDOW | {"miner": MINER.public}
SCORING = ScoringSpec(
    penalty=10 * GROUP,
    shortfall=GROUP,
    miss_price=GROUP // 2,
    deposit=8 * GROUP,
    cap=SHARE // 2,
    windows=100,
    decay=986_232_704,
)


def sample_of(kind: Callable[..., Sample], **fields: Any) -> Callable[..., Sample]:
    """Return a function that makes an object with these fields, of which its arguments replace some."""
    return lambda **changes: kind(**(fields | changes))


schedule = sample_of(
    Schedule,
    first_round=100,
    rounds=10,
    commit_rounds=6,
    audit_rounds=8,
    seal_rounds=20,
    verdict_rounds=30,
    lead=1,
    max_lag=2,
)

admission = sample_of(Admission, **OPEN.model_dump())

authority = sample_of(
    Authority,
    roots=(ROOT.public,),
    root_threshold=1,
    trainers=(TRAINER.public,),
    validators=(VALIDATOR.public,),
    quorum=1,
    admission=admission(),
    revoked=(),
)


SHARD = ObjectRef(digest=digest("shard"), size=4096)

lora = sample_of(LoraSpec, rank=4, alpha=8.0, targets=("q_proj", "v_proj"), base=digest("base"), shards=(SHARD,))


def revision(number: int = 1, previous: bytes = RUN_ID, **changes: Any) -> Revision:
    """Return a revision, by default with the sample authority."""
    fields: dict[str, Any] = {
        "run": RUN_ID,
        "number": number,
        "previous": previous,
        "authority": authority(),
        "rewind": None,
        "note": "",
    }
    return Revision(**(fields | changes))


def table(beyond: tuple[int, ...], rates: tuple[float, ...], *scores: tuple[float, ...]) -> Table:
    """Return a table with the least growth of each alternative.

    Args:
        rates: as probabilities.
        scores: of each alternative, in decades.
    """
    whole_rates = tuple(round(rate * RATE_UNIT) for rate in rates)
    alternatives = tuple(_alternative(rates, tuple(round(score * DECADE) for score in decades)) for decades in scores)
    return Table(beyond=beyond, rates=whole_rates, alternatives=alternatives)


def _alternative(rates: tuple[float, ...], scores: tuple[int, ...]) -> Alternative:
    powers = [10 ** (score / DECADE) for score in (0, *scores)]
    gains = (rate * (power - before) for rate, before, power in zip(rates, powers, powers[1:], strict=False))
    return Alternative(scores=scores, growth=max(1, math.ceil(math.log10(1 + sum(gains)) * DECADE)))


_SCORES = ((0.5, 0.5, 0.5), (1.5, 1.5, 1.5), (0.0, 4.0, 4.0), (0.0, 0.0, 12.0))


# By this row a trial that reaches the last step refuses its group, and honest trials reach the first step once in 1000
# (stops: 100), at the level 1e-9.
thresholds = sample_of(
    Thresholds,
    miner="torch-float32",
    validator="torch-float32",
    sketch=table((32, 64, 96), (1e-3, 1e-6, 1e-15), *_SCORES),
    margin=table((10_000, 50_000, 250_000), (1e-3, 1e-6, 1e-15), *_SCORES),
    stop=table((10_000, 250_000), (1e-2, 1e-15), (0.5, 0.5), (0.0, 12.0)),
    threshold=math.ceil((9 + math.log10(14)) * DECADE),  # there are 14 alternatives
    logprob_tolerance=50_000,
    logprob_bias=1_000,
    confidence_ppm=990_000,
    positions=100_000,
)


def replay_thresholds() -> Thresholds:
    """Return the sample row of a run in which honest nodes do not reproduce at most one group of twenty."""
    return thresholds(replay=table((0,), (0.05,), (0.4,), (1.0,), (2.0,)))


def counts(row: Thresholds | None = None, /, **tallies: tuple[int, ...]) -> Counts:
    """Return counts of groups that were judged by a row, by default the sample one.

    Args:
        tallies: by statistic, the trials and how many of them reach each step, up to the last one that any reaches; of
            luck, the squares and both sums.
    """
    row = row or thresholds()
    fields = {}
    for name in STATISTICS:
        trials, *steps = tallies.get(name, (0,))
        zeros = [0] * (len(row.table(name).beyond) - len(steps))
        fields[name] = Tally(trials=trials, steps=(*steps, *zeros))
    return Counts(**fields)


environment = sample_of(
    EnvironmentSpec,
    name="addition",
    code=(CodeRef(distribution="grailnode", version="0.1.0", digest=digest("modules"), size=0),),
    python="",
    config=b"{}",
    exact=True,
)


def task(spec: EnvironmentSpec | None = None, **changes: Any) -> tuple[EnvironmentShare, ...]:
    """Return the task of one environment."""
    return (EnvironmentShare(ppm=1_000_000, environment=spec or environment(**changes)),)


run_manifest = sample_of(
    RunManifest,
    name="sample",
    authority=authority(),
    model=ModelSpec(
        files=(FileRef(name="config.json", digest=digest("config"), size=10),), genesis=digest("weights 0")
    ),
    lora=None,
    precision="bf16",
    environment=task(),
    data=None,
    chat=None,
    sampling=SamplingSpec(temperature=1.0, max_tokens=8, stops=(1,)),
    episode=None,
    evaluation=EvaluationSpec(problems=16, samples=0, pass_at=1),
    numerics="calibrated",
    group_size=2,
    groups=16,
    spares=1,
    schedule=schedule(),
    beacon=ChainInfo(
        public_key=BEACON_KEY, period_ms=3000, genesis_ms=0, group_hash=digest("group"), beacon_id="default"
    ),
    proof=ProofSpec(
        sketch="projection",
        miners=("torch-float32",),
        table=(thresholds(),),
        audit_ppm=250_000,
        audit_floor_ppm=50_000,
        audit_halving=8,
    ),
    scoring=SCORING,
    head_ttl=3600,
)


def manifest(version: int = 0, previous: bytes = b"", **changes: Any) -> Manifest:
    ref = ObjectRef(digest=digest(f"object {version}"), size=100 + version)
    fields: dict[str, Any] = {
        "run": RUN_ID,
        "version": version,
        "previous": previous,
        "weights": digest(f"weights {version}"),
        "tensors": TABLE,
        "patch": PatchRef(parts=(ref,), changed=3) if version else None,
        "anchor": () if version else (ref,),
        "optimizer_step": 10 * version,
        "beacon_round": 100 + version,
        "first_window": version,
        "epoch": 1,
    }
    return Manifest(**(fields | changes))


head = sample_of(
    Head,
    run=RUN_ID,
    epoch=1,
    base=0,
    manifests=(digest("manifest 0"), digest("manifest 1")),
    anchors=(0,),
    oldest_patch=1,
    revision=0,
    expires_ms=4_000_000,
)


def commitment(groups: tuple[tuple[bytes, int], ...], **changes: Any) -> Commitment:
    fields: dict[str, Any] = {"arithmetic": "torch-float32", "batch": digest("batch"), "groups": groups}
    return Commitment(**(OF_MINER | fields | changes))


def rollout(*tokens: int, reward: int = 500_000) -> Rollout:
    return Rollout(completion=pack_tokens(tokens), sketch=bytes(range(4 * len(tokens))), reward=reward)


def episode_rollout() -> EpisodeRollout:
    turns = ((2, pack_tokens((9, 8, 7))), (1, b""))
    return EpisodeRollout(**dict(rollout(2, 1, 3)), turns=turns)


def group(index: int = 0, **changes: Any) -> Group:
    fields: dict[str, Any] = {
        "index": index,
        "prompt": pack_tokens((5, 6, 7 + index)),
        "rollouts": (rollout(2, 3, 1), rollout(4, 1, reward=1_000_000)),
    }
    return Group(**(OF_MINER | fields | changes))


def judgement(index: int = 0, **changes: Any) -> Judgement:
    fields: dict[str, Any] = {
        "index": index,
        "digest": digest(f"frame {index}"),
        "reason": "",
        "tokens": 5,
        "counts": counts(sketch=(5,), margin=(5,), stop=(2,)),
        "rewards": (500_000, 1_000_000),
        "logprobs": bytes(20),
    }
    return Judgement(**(fields | changes))


def unreproduced(index: int = 0, counts: Counts = UNREPRODUCED) -> Judgement:
    """Return the judgement on a group that was not reproduced, without counts where its replies should be exact."""
    return judgement(index, reason="unreproduced", counts=counts, rewards=(), logprobs=b"")


def rejected(index: int = 0, reason: str = "wrong-sketch", **changes: Any) -> Judgement:
    fields: dict[str, Any] = {
        "rewards": (),
        "logprobs": b"",
        "counts": counts(sketch=(5, 0, 0, 4), margin=(5,), stop=(2,)),
    }
    return judgement(index, reason=reason, **(fields | changes))


def lapsed(index: int = 0) -> Judgement:
    return rejected(index, "lapsed-version", counts=NO_COUNTS)


def verdict(*judgements: Judgement, **changes: Any) -> Verdict:
    fields: dict[str, Any] = {
        "validator": VALIDATOR.public,
        "commitment": digest("commitment"),
        "miner_arithmetic": "torch-float32",
        "validator_arithmetic": "torch-float32",
        "pledged": 16,
        "submitted": 16,
        "dealt": changes.get("submitted", 16),
        "judgements": judgements,
        "seen_ms": 123_456,
    }
    return Verdict(**(OF_MINER | fields | changes))


def row(miner: SigningKey = MINER, **changes: Any) -> LedgerRow:
    fields: dict[str, Any] = {
        "miner": miner.public,
        "verdict": digest("verdict"),
        "arithmetic": "torch-float32",
        "pledged": 16,
        "submitted": 16,
        "dealt": changes.get("submitted", 16),
        "audited": 4,
        "accepted": 4,
        "rejected": 0,
        "tokens": 5 * changes.get("accepted", 4),
        "counts": counts(sketch=(16, 1), margin=(20,), stop=(8,)),
    }
    return LedgerRow(**(fields | changes))


def summary(*rows: LedgerRow, **changes: Any) -> Summary:
    fields: dict[str, Any] = {
        "validator": VALIDATOR.public,
        "previous": digest("summary 6"),
        "salt": bytes(16),
        "weights": digest("weights 3"),
        "roster": (changes.get("validator", VALIDATOR.public),),
        "judges": 1,
        "arithmetic": "torch-float32",
        "rows": tuple(sorted(rows, key=lambda item: item.miner)),
        "amendments": (),
        "scores": ((MINER.public, SHARE // 2),),
        "evaluation": Evaluation(version=3, strata=(StratumResult(name="", right=(6, 4)),)),
        "verified_tokens": 100,
        "verify_ms": 20,
        "alarms": ("a head that goes back",),
    }
    return Summary(**(OF_WINDOW | fields | changes))


report = sample_of(
    ValidatorReport,
    run=RUN_ID,
    window=7,
    trainer=TRAINER.public,
    disagreements=(
        Disagreement(
            miner=MINER.public,
            index=3,
            digest=digest("frame 3"),
            about="verdict",
            accepting=(VALIDATOR.public,),
            rejecting=(key("other validator").public,),
        ),
    ),
    canary_failures=(
        CanaryFailure(validator=VALIDATOR.public, canary=key("canary").public, index=1, accepted=True, about="verdict"),
    ),
)

announcement = sample_of(
    Announcement,
    run=RUN_ID,
    key=MINER.public,
    role="miner",
    name="north 1",
    space="https://north.example.org/run",
    groups=16,
    version=3,
    arithmetic="torch-float32",
    expires_ms=99,
    credential=b"",
)


def outer_state(step: int = 0, **changes: Any) -> OuterState:
    fields: dict[str, Any] = {
        "step": step,
        "weights": digest(f"outer weights {step}"),
        "momentum": digest(f"outer momentum {step}"),
    }
    return OuterState(**(fields | changes))


round_rules = sample_of(
    RoundRules,
    values="grid",
    fraction=3,
    chosen=0,
    feedback_decay=1.0,
    frozen_steps=0,
    momentum=0.9,
    outer_rate=0.7,
    local_steps=8,
    quorum=1,
    delay=0,
    streams=1,
    spread=0,
)


WORKERS = tuple(sorted((MINER.public, VALIDATOR.public)))
"""The keys of the sample sites."""


def contribution(number: int = 1, worker: bytes = WORKERS[0], **changes: Any) -> RoundContribution:
    fields: dict[str, Any] = {
        "run": RUN_ID,
        "worker": worker,
        "number": number,
        "opening": digest(f"round {number - 1}"),
        "state": outer_state(number - 1),
        "payload": PayloadRef(digest=digest("payload"), size=1000, total=3000),
        "groups": tuple(sorted((digest("group 0"), digest("group 1")))),
        "local_steps": 8,
        "norm": 0.5,
        "feedback": digest("feedback"),
        "beacon_round": 109,
    }
    return RoundContribution(**(fields | changes))


def counted(worker: bytes = WORKERS[0], **changes: Any) -> CountedContribution:
    fields: dict[str, Any] = {
        "worker": worker,
        "contribution": digest("contribution"),
        "payload": PayloadRef(digest=digest("payload"), size=1000, total=3000),
        "groups": (digest("group 0"),),
        "factor": 0.5,
    }
    return CountedContribution(**(fields | changes))


def round_manifest(number: int = 0, previous: bytes | None = None, **changes: Any) -> RoundManifest:
    """Return a round manifest; number 1 and later ones count a contribution of the first sample site."""
    fields: dict[str, Any] = {
        "run": RUN_ID,
        "trainer": TRAINER.public,
        "number": number,
        "previous": previous if previous is not None else digest(f"round {number - 1}") if number else b"",
        "epoch": 1,
        "counted": (counted(),) if number else (),
        "refused": (Refusal(worker=WORKERS[1], reason="lost"),) if number else (),
        "aggregated": (),
        "state": outer_state(number),
        "version": number,
        "workers": WORKERS,
        "rules": round_rules(),
        "beacon_round": 100 + 10 * number,
        "closes": 110 + 10 * number,
    }
    return RoundManifest(**(fields | changes))


round_plan = sample_of(
    RoundPlan,
    run=RUN_ID,
    trainer=TRAINER.public,
    number=1,
    opening=digest("round 0"),
    contributions=tuple(
        PlannedContribution(worker=worker, payload=PayloadRef(digest=digest("payload"), size=1000, total=3000))
        for worker in WORKERS
    ),
    aggregators=WORKERS[::-1],
)
round_products = sample_of(
    RoundProducts,
    run=RUN_ID,
    worker=WORKERS[0],
    number=1,
    subject=digest("plan"),
    parts=(1, 2),
    numbers=struct.pack("<4d", 0.5, -1.5, 2.0, 0.0),
)
aggregated = sample_of(
    AggregatedShare,
    worker=WORKERS[0],
    products=digest("products"),
    outcome="sound",
    checker=WORKERS[1],
    repeat=b"",
    check="lost",
)
round_pointer = sample_of(
    RoundPointer,
    run=RUN_ID,
    trainer=TRAINER.public,
    epoch=1,
    newest=3,
    digest=digest("round 3"),
    state_number=2,
    shards=(ObjectRef(digest=digest("shard"), size=800),),
)


def every_record() -> list[Record]:
    """Return a record of every kind that is read from bytes."""
    frames = tuple((digest(f"frame {index}"), 50 + index) for index in range(3))
    return [
        run_manifest(),
        manifest(),
        manifest(1, digest("manifest 0")),
        head(),
        Trust(run=RUN_ID, epoch=1, version=5, digest=digest("manifest 5"), revision=0),
        revision(rewind=ChainPoint(version=4, digest=digest("manifest 4")), note="a stolen key"),
        ProofOfWorkSolution(expires_ms=5, nonce=7),
        Invite(run=RUN_ID, key=MINER.public, expires_ms=99),
        group(),
        commitment(frames),
        verdict(judgement(0), rejected(3)),
        ReauditVerdict(**dict(verdict(judgement(1)))),
        summary(row(), amendments=(Amendment(window=5, miner=MINER.public, verdict=b"", accepted=2, rejected=0),)),
        Seal(run=RUN_ID, window=7, validator=VALIDATOR.public, summary=digest("summary 7")),
        Witness(run=RUN_ID, window=7, validator=VALIDATOR.public, seals=(b"a seal", b"another")),
        report(),
        round_manifest(),
        round_manifest(1),
        contribution(),
        round_pointer(),
        round_plan(),
        round_products(),
        aggregated(),
        announcement(),
        Envelope(body=b"body", of="head", signatures=(Signature(key=MINER.public, value=bytes(64)),)),
        group(1, rollouts=(episode_rollout(),)),
        counts(sketch=(5,)) + UNREPRODUCED,
        replay_thresholds(),
    ]


def weights(seed: int = 0) -> dict[str, torch.Tensor]:
    """Return tensors of several dtypes, one of them empty, one without dimensions."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "layer.weight": torch.randn(4, 6, generator=generator).to(torch.bfloat16),
        "bias": torch.randn(6, generator=generator),
        "empty": torch.empty(0, 3, dtype=torch.float16),
        "scale": torch.tensor(0.5),
        "steps": torch.arange(5, dtype=torch.int32),
        "eight": torch.tensor([1.0, -0.0], dtype=torch.float8_e4m3fn),
    }
