"""The golden vectors of docs/spec, page by page, generated from fixed seeds and keys.

Every case has a name. If it has `parser` and `data`, this parser reads the bytes (hex): it returns a value that encodes
to the same bytes, or raises exactly the class in `error`. All other cases contain inputs and the values that they must
give.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from protocol.chain.manifest import Head, Manifest
from protocol.chain.verifier import Trust
from protocol.digest import digest_weights, raw_bytes, tensor_digest, type_name
from protocol.encoding import REWARD_UNIT, content_digest, pack, unpack
from protocol.identity.signing import Envelope, Signature, sign
from protocol.judging.accounts import Accounts
from protocol.judging.evidence import (
    NO_COUNTS,
    NO_EVIDENCE,
    REPRODUCED,
    UNREPRODUCED,
    advance,
    count_luck,
    count_values,
    exceeded,
    repeated_positions,
    trial_values,
)
from protocol.judging.ledger import GROUP, SHARE, Amendment, Seal, Witness
from protocol.rollout import challenge
from tests.support.builders import samples
from tests.support.builders.proofs import by_statistic
from tests.support.builders.samples import MINER, ROOT, RUN_ID, TRAINER, VALIDATOR
from tests.vectors import difficulty, outer_rounds, quantized, revisions, rollouts
from tests.vectors.cases import LIMIT, MALFORMED, SIGNATURE, Case, bad, good


def encoding() -> list[Case]:
    values: dict[str, Any] = {
        "nil": None,
        "false and true": (False, True),
        "small integers": (0, 127, -1, -32),
        "integers of each width": (128, 1 << 8, 1 << 16, 1 << 32, (1 << 64) - 1, -33, -129, -(1 << 15) - 1, -(1 << 63)),
        "floats": (0.0, -0.0, 1.5, 5e-324, 1.7976931348623157e308),
        "strings": ("", "a" * 31, "a" * 32, "größe", "\U0001d11e"),
        "bytes": (b"", b"\0" * 255, b"\0" * 256),
        "maps": {"a": 1, "B": {}, "\uffff": (), "\U0001d11e": None},
        "sixteen deep": _nested(16),
    }
    hostile = {
        "over-long integer": (b"\xcc\x05", MALFORMED),
        "over-long negative integer": (b"\xd1\xff\xff", MALFORMED),
        "float32": (b"\xca\0\0\0\0", MALFORMED),
        "NaN": (b"\xcb\x7f\xf8" + bytes(6), MALFORMED),
        "over-long string": (b"\xd9\x01a", MALFORMED),
        "over-long array": (b"\xdc\0\0", MALFORMED),
        "keys not sorted": (b"\x82\xa1b\0\xa1a\0", MALFORMED),
        "a key twice": (b"\x82\xa1a\0\xa1a\0", MALFORMED),
        "a key that is bytes": (b"\x81\xc4\x01a\0", MALFORMED),
        "extension type": (b"\xd4\x01\0", MALFORMED),
        "invalid UTF-8": (b"\xa1\xff", MALFORMED),
        "a surrogate": (b"\xa3\xed\xa0\x80", MALFORMED),
        "bytes behind": (b"\0\0", MALFORMED),
        "cut off": (b"\x92\0", MALFORMED),
        "nothing": (b"", MALFORMED),
        "seventeen deep": (b"\x91" * 16 + b"\x90", LIMIT),
        "an array of 2^32 - 1": (b"\xdd\xff\xff\xff\xff", LIMIT),
        "a string of 4,097 bytes": (b"\xda\x10\x01" + b"a" * 4097, LIMIT),
    }
    rollout, contribution = (unpack(record.to_bytes()) for record in (samples.rollout(2, 1), samples.contribution()))
    return [
        *(good(name, "value", pack(value)) for name, value in values.items()),
        *(
            good(f"{record.kind} {place}", record.kind, record.to_bytes())
            for place, record in enumerate(samples.every_record())
        ),
        *(bad(name, "value", data, error) for name, (data, error) in hostile.items()),
        bad("a float instead of an integer", "rollout", pack(rollout | {"reward": 1.0}), MALFORMED),
        bad("an integer instead of a float", "contribution", pack(contribution | {"norm": 1}), MALFORMED),
        bad("a string instead of bytes", "rollout", pack(rollout | {"sketch": "12345678"}), MALFORMED),
        bad("an unknown field", "rollout", pack(rollout | {"more": None}), MALFORMED),
        bad("a missing field", "rollout", pack({"completion": b"", "sketch": b""}), MALFORMED),
    ]


def _nested(depth: int) -> tuple[Any, ...]:
    return () if depth == 1 else (_nested(depth - 1),)


def signing() -> list[Case]:
    """Build envelopes. The parser `signed` opens an announcement that the miner must have signed; `two of two` opens a
    head that trainer and root must have signed.
    """
    data = sign(samples.announcement(), MINER)
    envelope = unpack(data)
    body = unpack(envelope["body"])
    both = unpack(sign(samples.head(), TRAINER, ROOT))
    signed, identity = both["signatures"], b"\1" + bytes(31)
    everything = identity + bytes(32)

    def forgery(key: bytes, value: bytes) -> bytes:
        record = samples.announcement(key=key)
        signatures = (Signature(key=key, value=value),)
        return Envelope(body=record.to_bytes(), of=record.kind, signatures=signatures).to_bytes()

    return [
        {"name": "keys", **{name: [secret.hex(), pair.public.hex()] for name, secret, pair in _keys()}},
        good("announcement by its key", "signed", data, digest=content_digest(envelope["body"]).hex()),
        good("head by two keys", "two of two", pack(both)),
        bad("head by one key of two", "two of two", sign(samples.head(), TRAINER), SIGNATURE),
        bad("signatures in another order", "two of two", pack(both | {"signatures": signed[::-1]}), MALFORMED),
        bad("a signature twice", "two of two", pack(both | {"signatures": signed[:1] * 2}), MALFORMED),
        bad("by another key", "signed", sign(samples.announcement(), VALIDATOR), SIGNATURE),
        bad("additionally by another key", "signed", sign(samples.announcement(), MINER, VALIDATOR), SIGNATURE),
        bad("of another kind", "signed", sign(samples.head(), MINER), MALFORMED),
        bad("labelled as another kind", "signed", pack(envelope | {"of": "head"}), MALFORMED),
        bad("without a signature", "signed", pack(envelope | {"signatures": ()}), MALFORMED),
        *(
            bad(f"{name} altered", "signed", pack(envelope | {"body": pack(body | {name: value})}), SIGNATURE)
            for name, value in {
                "run": samples.digest("x"),
                "role": "trainer",
                "name": "south",
                "expires_ms": 98,
                "credential": b"x",
            }.items()
        ),
        bad("a key of order 1, which signs everything", "announced", forgery(identity, everything), SIGNATURE),
        bad("the same key, not canonical", "announced", forgery(_little(2**255 - 18), everything), SIGNATURE),
        bad("a key of order 2", "announced", forgery(_little(2**255 - 20), bytes(64)), SIGNATURE),
        bad("a key of order 4", "announced", forgery(bytes(32), bytes(64)), SIGNATURE),
        bad("cut off", "signed", data[:-1], MALFORMED),
        bad("too large", "signed", bytes(8193), LIMIT),
    ]


def _little(value: int) -> bytes:
    return value.to_bytes(32, "little")


def _keys() -> list[tuple[str, bytes, Any]]:
    pairs = (("trainer", TRAINER), ("miner", MINER), ("validator", VALIDATOR), ("root", ROOT))
    return [(name, samples.digest(f"key of {name}"), pair) for name, pair in pairs]


def window() -> list[Case]:
    plan, randomness, miner = samples.schedule(), samples.digest("randomness"), MINER.public
    seed = challenge.group_seed(RUN_ID, 7, randomness, miner, 3)
    inputs = {"run": RUN_ID.hex(), "window": 7, "randomness": randomness.hex(), "miner": miner.hex()}
    own = RUN_ID, 7, randomness, miner
    moments = plan.opening, plan.deadline, plan.audit, plan.seal, plan.verdict
    validators = sorted(samples.key(f"validator {number}").public for number in range(5))
    rollouts = [challenge.rollout_seed(seed, i).hex() for i in range(3)]
    episodes = [challenge.episode_seed(seed, i).hex() for i in range(3)]
    cases: list[Case] = [{"name": "schedule", **plan.model_dump()}]
    for number in (0, 1, 7, (1 << 33) - 1):
        rounds = [moment(number) for moment in moments]
        cases.append({"name": f"window {number}", "window": number, "rounds": rounds})
    windows = [[number, plan.window_at(number)] for number in (1, 99, 100, 109, 110)]
    cases += [
        {"name": "windows of rounds", "windows": windows},
        {"name": "group seed", **inputs, "group": 3, "seed": seed.hex()},
        {"name": "rollout seeds", "group_seed": seed.hex(), "seeds": rollouts},
        {"name": "episode seeds", "group_seed": seed.hex(), "seeds": episodes},
        {"name": "sketch seed", **inputs, "seed": challenge.sketch_seed(RUN_ID, 7, randomness).hex()},
    ]
    for context in ("projection", "topk"):
        stream = challenge.stream(randomness, context, 40).hex()
        cases.append({"name": context, "seed": randomness.hex(), "stream": stream})
    for groups, share in ((0, 1), (1, 1), (10, 250_000), (10, 1_000_000), (4096, 2_000)):
        fields: dict[str, Any] = {"groups": groups, "share_ppm": share}
        audit = list(challenge.audit_indices(*own, **fields))
        cases.append({"name": f"audit of {groups} at {share}", **inputs, **fields, "audit": audit})
    some: dict[str, Any] = {"groups": 10, "share_ppm": 300_000, "dealt": [1, 4, 5, 7]}
    audit = list(challenge.audit_indices(*own, **some))
    cases.append({"name": "audit of 10 at 300000, of which some are dealt", **inputs, **some, "audit": audit})
    for tokens in (1024, 1025, 4096, 1 << 14):
        fields = {"size": 8, "max_tokens": tokens}
        continued = list(challenge.continued_rollouts(*own, 5, **fields))
        name = f"rollouts of {tokens} tokens that are continued"
        cases.append({"name": name, **inputs, "group": 5, **fields, "continued": continued})
    for group in (0, 1, 4095):
        order = [key.hex() for key in challenge.deal_order(*own, group, validators)]
        keys = [key.hex() for key in validators]
        cases.append({"name": f"deal of group {group}", **inputs, "group": group, "validators": keys, "order": order})
    return cases


def chain() -> list[Case]:
    """Build a chain of three versions, and heads that may follow its head, as envelopes that are read at 1,000 s."""
    manifests: list[Manifest] = []
    for version in range(3):
        previous = content_digest(manifests[-1].to_bytes()) if manifests else b""
        manifests.append(samples.manifest(version, previous))
    other = samples.manifest(2, manifests[2].previous, optimizer_step=99)

    def head(manifests: list[Manifest], **changes: Any) -> str:
        digests = tuple(content_digest(manifest.to_bytes()) for manifest in manifests)
        return sign(samples.head(manifests=digests, **changes), TRAINER).hex()

    trust = Trust(run=RUN_ID, epoch=1, version=2, digest=content_digest(manifests[2].to_bytes()), revision=0)
    steps = [
        ("the same again", head(manifests), None),
        ("renewed", head(manifests, expires_ms=4_500_000), None),
        ("a newer epoch", head(manifests, epoch=2), None),
        ("an older version", head(manifests[:2]), "RollbackError"),
        ("an older epoch", head(manifests, epoch=0), "RollbackError"),
        ("another manifest", head([*manifests[:2], other]), "ForkError"),
        ("expired", head(manifests, expires_ms=1_000_000), "ExpiredError"),
        ("valid for too long", head(manifests, expires_ms=4_900_001), "ChainError"),
        ("under a missing revision", head(manifests, revision=1), "GapError"),
        ("of another run", head(manifests, run=samples.digest("other")), "ChainError"),
        ("by another key", sign(samples.head(), MINER).hex(), SIGNATURE),
    ]
    tables = [samples.weights(), {"zeros": torch.tensor([0.0, -0.0])}]
    head_fields, manifest = unpack(samples.head().to_bytes()), unpack(manifests[0].to_bytes())
    return [
        {
            "name": "chain",
            "run": samples.run_manifest().to_bytes().hex(),
            "run_id": RUN_ID.hex(),
            "head": head(manifests),
            "manifests": [sign(manifest, TRAINER).hex() for manifest in manifests],
            "trust": trust.to_bytes().hex(),
        },
        *({"name": f"head: {name}", "next_head": data, "error": error} for name, data, error in steps),
        *(
            {
                "name": f"weights {place}",
                "tensors": [_tensor(name, tensor) for name, tensor in weights.items()],
                "digest": digest_weights(weights).hex(),
            }
            for place, weights in enumerate(tables)
        ),
        bad("anchors not ascending", Head.kind, pack(head_fields | {"anchors": (1, 0)}), MALFORMED),
        bad("an anchor before the base", Head.kind, pack(head_fields | {"base": 1}), MALFORMED),
        bad("a patch newer than the newest version", Head.kind, pack(head_fields | {"oldest_patch": 3}), MALFORMED),
        bad("tensors not ascending", Manifest.kind, pack(manifest | {"tensors": samples.TABLE[::-1]}), MALFORMED),
    ]


def _tensor(name: str, tensor: torch.Tensor) -> list[Any]:
    form = type_name(tensor.dtype), list(tensor.shape)
    return [name, *form, raw_bytes(tensor).hex(), tensor_digest(tensor).hex()]


def verdict() -> list[Case]:
    record = samples.verdict(samples.judgement(0), samples.rejected(3))
    fields = unpack(record.to_bytes())
    first, second = fields["judgements"]
    counts, untried = first["counts"], {"trials": 0, "steps": (1,)}
    replayed = counts | {"replay": {"trials": 1, "steps": (1,)}}
    return [
        good("verdict", "verdict", record.to_bytes()),
        good("a rollout that ends early", "judgement", samples.judgement(ends=(0, 2)).to_bytes()),
        good("a group that was not reproduced", "verdict", samples.verdict(samples.unreproduced()).to_bytes()),
        bad("a replay that was not tried", "counts", pack(counts | {"replay": untried}), MALFORMED),
        bad("an accepted group that was not reproduced", "judgement", pack(first | {"counts": replayed}), MALFORMED),
        bad("a replay of nil", "counts", pack(counts | {"replay": None}), MALFORMED),
        bad("a group judged twice", "verdict", pack(fields | {"judgements": (first, first)}), MALFORMED),
        bad("judgements not ascending", "verdict", pack(fields | {"judgements": (second, first)}), MALFORMED),
        bad("a group that was not submitted", "verdict", pack(fields | {"submitted": 3}), MALFORMED),
        bad("no such reason", "judgement", pack(second | {"reason": "because"}), MALFORMED),
        bad("rewards of a rejected group", "judgement", pack(second | {"rewards": (500_000,)}), MALFORMED),
        bad("a reward that is no whole number", "judgement", pack(first | {"rewards": (0.5, 1.0)}), MALFORMED),
        bad("one log-probability missing", "judgement", pack(first | {"logprobs": bytes(16)}), MALFORMED),
        bad("rollouts of which none ends early", "judgement", pack(first | {"ends": (3, 2)}), MALFORMED),
        bad("more values than trials", "counts", pack(counts | {"margin": {"trials": 5, "steps": (3, 3)}}), MALFORMED),
        bad("more trials than tokens", "judgement", pack(first | {"tokens": 0, "logprobs": b""}), MALFORMED),
        _counts(),
        _evidence(),
    ]


def _counts() -> Case:
    """Return the statistics of a group of four rollouts, and what is counted of them by the sample row. `rewards` has
    for each rollout its own, and that of the validator's continuation.
    """
    completions = ((5, 6, 7), (5, 6, 1), (9,), (5, 6, 7))
    lengths, rewards = [3, 3, 1, 3], ((REWARD_UNIT, 0), (0, 250_000), (-REWARD_UNIT, REWARD_UNIT), (40_999, 0))
    distances = (0, 33, 128, 40, 50, 65, 97, 1, 2, 3)
    margins = (0, 10_001, 10_000, 0, 300_000, 50_001, 250_001, 0, 0, 20_000)
    stops = (False, False, True, False, False, True, True, False, True, False)
    row = samples.thresholds()
    arrays = np.array(distances), np.array(margins), np.array(stops)
    counts = count_values(trial_values(*arrays, lengths, repeated_positions(completions)), row)
    return {
        "name": "counts",
        "row": row.model_dump(),
        "completions": completions,
        "distances": distances,
        "margins": margins,
        "stops": stops,
        "rewards": rewards,
        "counts": counts.model_copy(update={"luck": count_luck(rewards)}).model_dump(),
    }


def _evidence() -> Case:
    """Return groups, and after each of them the evidence and the statistic that refuses them, if one does."""
    row = samples.replay_thresholds()
    groups = [
        samples.counts(sketch=(40,), margin=(40, 1), stop=(8,), luck=(63, 250, 0)),
        samples.counts(sketch=(16, 2), margin=(24,), stop=(8,)),
        *[samples.counts(sketch=(1000,), margin=(1000, 4, 1), stop=(8, 2), luck=(3000, 0, 3000))] * 2,
        samples.counts(sketch=(40,), margin=(40, 14), stop=(8, 0, 1)),
        samples.counts(sketch=(16,)) + REPRODUCED,
        *[UNREPRODUCED] * 9,
    ]
    steps = []
    evidence = NO_EVIDENCE
    for group in groups:
        evidence = advance(evidence, group, row)
        values = by_statistic(evidence, row)
        steps.append({"counts": group.model_dump(), "evidence": values, "exceeded": exceeded(evidence, row)})
    return {"name": "evidence", "row": row.model_dump(), "groups": steps}


def ledger() -> list[Case]:
    miners = sorted((pair for _, _, pair in _keys()), key=lambda pair: pair.public)
    missed = samples.counts(sketch=(200, 7, 1), margin=(200, 1), stop=(104, 3))
    rows = (
        [
            *(
                samples.row(miners[0]),
                samples.row(miners[1], audited=16, accepted=16, tokens=300),
                samples.row(miners[2], accepted=3),
            ),
            samples.row(miners[3], submitted=5),
        ],
        [
            samples.row(miners[0], submitted=12),
            samples.row(miners[1], arithmetic="torch-bfloat16", audited=16, accepted=13, rejected=3, counts=missed),
            samples.row(miners[2], verdict=b"", arithmetic="", submitted=0, audited=0, accepted=0, counts=NO_COUNTS),
            samples.row(miners[3], audited=16, accepted=0, rejected=16, counts=samples.counts(margin=(400, 300))),
        ],
    )
    amendment = Amendment(window=7, miner=miners[0].public, verdict=b"", accepted=9, rejected=1)
    wide = samples.thresholds(miner="torch-bfloat16", margin=samples.table((20_000,), (0.02,), *[(0.5,)] * 4))
    proof = samples.run_manifest().proof.model_copy(
        update={"miners": ("torch-bfloat16", "torch-float32"), "table": (wide, samples.thresholds())}
    )
    scoring = samples.SCORING.model_copy(update={"deposit": 2 * GROUP, "shortfall": GROUP // 10, "cap": SHARE})
    entries = [
        samples.summary(*rows[0], window=7, scores=()),
        samples.summary(*rows[1], window=9, scores=(), amendments=(amendment,)),
    ]
    accounts, earlier = Accounts.of(entries, scoring, proof), entries[1].model_copy(update={"window": 6})
    record = samples.summary(samples.row())
    seal = Seal(run=RUN_ID, window=7, validator=VALIDATOR.public, summary=content_digest(record.to_bytes()))
    witness = Witness(run=RUN_ID, window=7, validator=TRAINER.public, seals=(sign(seal, VALIDATOR),))
    fields = unpack(record.to_bytes())
    row = fields["rows"][0]
    return [
        good("summary", "summary", record.to_bytes()),
        good("seal", "seal", seal.to_bytes()),
        good("witness", "witness", witness.to_bytes()),
        bad("a seal too long", "witness", pack(unpack(witness.to_bytes()) | {"seals": (bytes(513),)}), MALFORMED),
        bad("a miner twice", "summary", pack(fields | {"rows": (row, row)}), MALFORMED),
        bad("an amendment of a later window", "summary", earlier.to_bytes(), MALFORMED),
        bad("more accepted than audited", "ledger-row", pack(row | {"accepted": 5}), MALFORMED),
        bad("more submitted than pledged", "ledger-row", pack(row | {"pledged": 15}), MALFORMED),
        {
            "name": "scores",
            "scoring": scoring.model_dump(),
            "proof": proof.model_dump(),
            "ledger": [entry.to_bytes().hex() for entry in entries],
            "balances": [[miner.hex(), value] for miner, value in sorted(accounts.totals()[0].items())],
            "scores": [[miner.hex(), share] for miner, share in accounts.scores()],
            "evidence": [
                [
                    pair.public.hex(),
                    arithmetic,
                    by_statistic(accounts.evidence_of(pair.public, arithmetic), proof.table[0]),
                ]
                for pair in miners
                for arithmetic in proof.miners
            ],
        },
    ]


PAGES: dict[str, Callable[[], list[Case]]] = {
    "encoding": encoding,
    "authority": revisions.page,
    "signing": signing,
    "window": window,
    "sampling": rollouts.sampling_page,
    "sketch": rollouts.sketch_page,
    "rollout": rollouts.rollout,
    "chain": chain,
    "quantized": quantized.page,
    "verdict": verdict,
    "ledger": ledger,
    "difficulty": difficulty.page,
    "outer": outer_rounds.page,
}
