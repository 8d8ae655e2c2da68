"""Records with an invalid field are not made: one table for each kind of record."""

from collections.abc import Callable
from typing import Any

import pytest
from pydantic import ValidationError

from protocol import limits
from protocol.encoding import Record
from protocol.judging.ledger import SHARE, Amendment, Evaluation, StratumResult
from protocol.rollout.batch import Rollout
from protocol.run import FileRef, ModelSpec, SamplingSpec, ScoringSpec
from tests.support.builders import samples
from tests.support.builders.samples import (
    MINER,
    ROOT,
    SCORING,
    TRAINER,
    VALIDATOR,
    announcement,
    authority,
    counts,
    judgement,
    row,
    run_manifest,
    sample_of,
    schedule,
    summary,
    thresholds,
)

KEYS = (TRAINER.public, VALIDATOR.public)
FIRST, SECOND = (samples.key(f"root {name}") for name in "ab")


scoring = sample_of(ScoringSpec, **SCORING.model_dump())
rollout = sample_of(Rollout, completion=b"", sketch=b"", reward=0)
file = sample_of(FileRef, name="config.json", digest=samples.digest("file"), size=1)
model = sample_of(ModelSpec, files=(file(),), genesis=samples.digest("genesis"))
sampling = sample_of(SamplingSpec, temperature=1.0, max_tokens=8, stops=(1,))
stratum = sample_of(StratumResult, name="a", right=(1, 0))
evaluation = sample_of(Evaluation, version=1, strata=(stratum(), stratum(name="b")))
later_manifest = sample_of(samples.manifest, version=1, previous=samples.digest("manifest 0"))


INVALID: dict[Callable[..., Record], list[dict[str, Any]]] = {
    authority: [
        {"trainers": KEYS[:1], "workers": KEYS[:1]},
        *({"roots": ()}, {"root_threshold": 2}, {"root_threshold": 0}, {"quorum": 2}, {"quorum": 0}),
        *({"validators": KEYS[:1] * 2, "quorum": 2}, {"roots": KEYS[:1] * 2, "root_threshold": 2}),
        *({"trainers": KEYS[:1] * 2}, {"trainers": (b"short",)}, {"revoked": (TRAINER.public,)}),
        *({"revoked": (ROOT.public,)}, {"revoked": tuple(sorted((FIRST.public, SECOND.public), reverse=True))}),
        {"revoked": (FIRST.public,) * 2},
        {"revoked": (MINER.public,), "admission": samples.admission(allowed=(MINER.public,))},
    ],
    samples.admission: [
        *(
            {"policy": "whoever"},
            {"miners": 0},
            {"miners": limits.MAX_WINDOW_MINERS + 1},
            {"difficulty": 257},
            {"credential": "Two Words"},
        ),
        *({"allowed": tuple(sorted((FIRST.public, SECOND.public), reverse=True))}, {"inviters": (FIRST.public,) * 2}),
    ],
    run_manifest: [
        *({"group_size": 1}, {"groups": 0}, {"name": ""}, {"name": "two\nlines"}, {"name": "\x1b]0;title\x07"}),
        {"head_ttl": 0},
    ],
    file: [{"name": name} for name in ("", ".", "..", ".hidden", "a/b", "a\\b", "a" * 101, "a\n", "é", "a\0")],
    model: [{"files": (file(), file())}],
    sampling: [{"stops": stops} for stops in ((), (2, 1), (1, 1), (-1,), (1 << 31,), tuple(range(17)))],
    samples.lora: [
        *({"rank": rank} for rank in (0, -1, limits.MAX_LORA_RANK + 1)),
        *({"alpha": alpha} for alpha in (0.0, float("nan"), float("inf"), 1e9)),
        *(
            {"targets": targets}
            for targets in ((), ("v_proj", "q_proj"), ("q_proj", "q_proj"), ("q proj",), (".",), ("",))
        ),
        {"targets": tuple(f"m{number:03d}" for number in range(limits.MAX_LORA_TARGETS + 1))},
        *({"base": b"short"}, {"shards": ()}, {"shards": (samples.SHARD,) * (limits.MAX_ANCHOR_SHARDS + 1)}),
    ],
    counts: [
        *({"margin": (3, 2, 2)}, {"sketch": (0, 1)}, {"stop": (-1,)}, {"luck": (1, 2, 0, 0)}, {"luck": (0, 1, 0)}),
        *({"luck": (9, 0, 0)}, {"margin": (1 << 53,)}),
    ],
    scoring: [
        {"penalty": 999_999},  # a rejection would cost less than a group earns
        *({"shortfall": -1}, {"miss_price": 0.5}, {"deposit": 10**15 + 1}, {"cap": 0}, {"cap": 10**9 + 1}),
        *({"decay": 10**9 + 1}, {"windows": 0}),
    ],
    announcement: [
        *({"role": "king"}, {"name": "a" * 33}, {"name": "a\n"}, {"name": "é"}, {"key": b"k"}, {"expires_ms": -1}),
        {"credential": bytes(1025)},
        *(
            {"space": url}
            for url in (
                *("https://", "https://host/", "https://host//a", "https://host/.well-known", "https://host/../a"),
                *("https://host/a?b=c", "https://host/a#b", "https://host/%2e%2e", "https://user@host/a"),
                *("https://user:word@host/a", "https://host:0/a", "https://host:65536/a", "https://host:70000/a"),
                *("https://host:123456/a", "http://localhost:99999/a", "https://[::1]/a", "https://HOST/a"),
                *("https://-host/a", "https://host..org/a", "https://hôst/a", "https://host/a b", "https://host/a\n"),
                *("http://host/a", "http://127.0.0.1.example.org/a", "ftp://host/a", "file:///etc/passwd"),
                *("s3://bucket", "//host/a", "https://host/" + "a/" * 150, "https://" + "a" * 64 + ".org"),
            )
        ),
    ],
    schedule: [
        *({"commit_rounds": 8}, {"audit_rounds": 6}, {"audit_rounds": 11}, {"verdict_rounds": 20}),
        *({"seal_rounds": 8}, {"rounds": 2}, {"lead": 0}, {"max_lag": -1}, {"first_round": 0}, {"rounds": 10.0}),
        {"rounds": True},
    ],
    thresholds: [*({"threshold": 0}, {"threshold": 10**9}, {"confidence_ppm": 10**6})],
    samples.head: [
        *({"anchors": ()}, {"anchors": (1, 0)}, {"anchors": (0, 0)}, {"anchors": (2,), "oldest_patch": 2}),
        *({"base": 1}, {"oldest_patch": 3}, {"anchors": (1,), "oldest_patch": 0}, {"manifests": ()}, {"epoch": -1}),
    ],
    samples.manifest: [
        *({"previous": samples.digest("before")}, {"anchor": ()}),
        *({"patch": samples.manifest(1, samples.digest("m")).patch}, {"tensors": ()}),
        *({"tensors": (("b", "F32", ()), ("a", "F32", ()))}, {"tensors": (("a", "F32", ()), ("a", "F32", ()))}),
        *({"tensors": (("a", "F64", ()),)}, {"tensors": (("a", "F32", (-1,)),)}),
        *({"tensors": (("a", "F32", (1 << 30, 1 << 30)),)}, {"tensors": (("a", "F32", (1,) * 9),)}),
        {"tensors": (("é" * 300, "F32", ()),)},
    ],
    later_manifest: [{"previous": b""}, {"previous": b"short"}, {"patch": None}],
    rollout: [
        *({"completion": b"abc"}, {"completion": b"abcd", "sketch": b""}, {"completion": b"", "sketch": b"abc"}),
        *({"completion": b"abcd", "sketch": b"abcdefgh"}, {"reward": 10**12 + 1}, {"reward": 0.5}),
    ],
    samples.group: [
        *({"rollouts": ()}, {"prompt": b"abc"}, {"index": limits.MAX_GROUPS}, {"window": -1}, {"miner": b"short"})
    ],
    judgement: [
        {"reason": "because"},
        {"reason": "wrong-sketch"},  # with rewards and log-probabilities
        *({"reason": "wrong-sketch", "rewards": ()}, {"logprobs": bytes(16)}, {"tokens": 6}),
        *(
            {"tokens": 1 << 40, "logprobs": bytes(20)},
            {"counts": counts(luck=(5001, 1, 0))},
            {"counts": counts(luck=(9, 5001, 0))},
            {"rewards": (2 * 10**12,)},
        ),
        *({"rewards": (0.5, 1.0)}, {"index": 1 << 20}),
        *({"ends": (1,)}, {"ends": (3, 2)}, {"ends": (-1, 2)}, {"ends": (1, 1, 1)}),
        {"reason": "wrong-sketch", "rewards": (), "logprobs": b"", "ends": (1, 1)},
    ],
    row: [
        *({"accepted": 5}, {"audited": 17, "accepted": 17}, {"pledged": 15}, {"dealt": 3}, {"dealt": 17}),
        *({"verdict": b""}, {"submitted": 0, "audited": 0, "accepted": 0}, {"verdict": bytes(31)}),
    ],
    stratum: [{"right": (1,)}, {"right": (1, -1)}, {"name": "a\n"}],
    evaluation: [
        *({"strata": ()}, {"strata": (stratum(right=(0, 0)),)}, {"strata": (stratum(name="b"), stratum())}),
        *({"strata": (stratum(),) * 2}, {"strata": (stratum(), stratum(name="b", right=(1, 0, 0)))}),
    ],
    summary: [
        {"rows": (row(), row())},
        {"rows": tuple(sorted((row(MINER), row(TRAINER)), key=lambda item: item.miner, reverse=True))},
        {"amendments": (Amendment(window=7, miner=MINER.public, verdict=b"", accepted=0, rejected=1),)},
        *({"previous": bytes(5)}, {"salt": bytes(15)}, {"roster": ()}, {"roster": (MINER.public,)}),
        *({"roster": (samples.VALIDATOR.public,) * 2}, {"judges": 2}, {"judges": 0}),
        *({"scores": ((MINER.public, 0),)}, {"scores": ((MINER.public, SHARE + 1),)}, {"alarms": ("two\nlines",)}),
        *({"alarms": ("\x1b[2J",)}, {"alarms": ("a" * 501,)}, {"alarms": ("\u202e",)}),
    ],
}


@pytest.mark.parametrize(
    ("make", "changes"),
    [pytest.param(make, case, id=str(case)[:80]) for make, cases in INVALID.items() for case in cases],
)
def test_a_record_with_an_invalid_field_is_not_made(make: Callable[..., Record], changes: dict[str, Any]) -> None:
    make()
    with pytest.raises(ValidationError):
        make(**changes)
