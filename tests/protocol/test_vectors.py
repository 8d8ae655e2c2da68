"""The golden vectors agree with the code."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from protocol import errors
from protocol.chain.manifest import Head, Manifest
from protocol.chain.verifier import ChainVerifier, Trust
from protocol.difficulty import DifficultySpec, DifficultyTable
from protocol.encoding import Record, pack, unpack
from protocol.identity.admission import Invite, ProofOfWorkSolution
from protocol.identity.authority import Authority, Revision, Revisions
from protocol.identity.participant import Announcement
from protocol.identity.signing import Envelope, SigningKey, open_announced, open_signed
from protocol.judging.evidence import Counts
from protocol.judging.ledger import LedgerRow, Seal, Summary, Witness
from protocol.judging.report import ValidatorReport
from protocol.judging.verdict import Judgement, ReauditVerdict, Verdict
from protocol.outer.round_checks import check_next_manifest
from protocol.outer.round_records import (
    AggregatedShare,
    RoundContribution,
    RoundManifest,
    RoundPlan,
    RoundPointer,
    RoundProducts,
)
from protocol.proof import Thresholds
from protocol.rollout import sampling, sketch
from protocol.rollout.batch import Commitment, EpisodeRule, Group, Rollout, open_group
from protocol.run import RunManifest
from tests.protocol import slow_sampling, slow_sketch

FOLDER = Path(__file__).parent.parent / "vectors"
VECTORS: dict[str, list[dict[str, Any]]] = {
    path.stem: json.loads(path.read_text()) for path in sorted(FOLDER.glob("*.json"))
}
KINDS: tuple[type[Record], ...] = (
    *(Announcement, Commitment, Counts, Envelope, Group, Head, Judgement),
    *(Manifest, ValidatorReport, Rollout, LedgerRow, RunManifest, Seal, Summary, Trust, Verdict),
    *(Invite, ReauditVerdict, Revision, Thresholds, Witness, ProofOfWorkSolution),
    *(RoundManifest, RoundContribution, RoundPointer, RoundPlan, RoundProducts, AggregatedShare),
)


def case(page: str, name: str) -> dict[str, Any]:
    return next(item for item in VECTORS[page] if item["name"] == name)


KEYS = {name: SigningKey(bytes.fromhex(pair[0])) for name, pair in case("signing", "keys").items() if name != "name"}
COMMITMENT = Commitment.from_bytes(bytes.fromhex(case("rollout", "commitment")["data"]))
PARSERS: dict[str, Callable[[bytes], object]] = {
    "value": unpack,
    "frame": Group.from_frame,
    "group 0": lambda data: open_group(data, COMMITMENT, 0),
    "signed": lambda data: open_signed(data, Announcement, [KEYS["miner"].public]),
    "announced": lambda data: open_announced(data, Announcement),
    "two of two": lambda data: open_signed(data, Head, [KEYS["trainer"].public, KEYS["root"].public], 2),
    **{kind.kind: kind.from_bytes for kind in KINDS},
    "difficulty": DifficultyTable.from_bytes,
    "difficulty-rule": DifficultySpec.from_bytes,
}
PARSER_CASES = [(page, item) for page, items in VECTORS.items() for item in items if "parser" in item]


def cases(page: str, *fields: str) -> list[dict[str, Any]]:
    return [item for item in VECTORS[page] if set(fields) <= item.keys()]


def name_of(item: dict[str, Any]) -> str:
    return str(item["name"])


def check_case(item: dict[str, Any], read: Callable[[], Any]) -> Any:
    """Return what is read, or check that it is refused with the error that the case names."""
    if item.get("error") is None:
        return read()
    with pytest.raises(errors.ProtocolError) as error_info:
        read()
    assert type(error_info.value).__name__ == item["error"]
    return None


@pytest.mark.parametrize(("page", "item"), PARSER_CASES, ids=[f"{page}: {item['name']}" for page, item in PARSER_CASES])
def test_parsers(page: str, item: dict[str, Any]) -> None:
    data = bytes.fromhex(item["data"])
    value = check_case(item, lambda: PARSERS[item["parser"]](data))
    if isinstance(value, Record) and item["parser"] != "frame":
        assert value.to_bytes() == data
    if item["parser"] == "value" and "error" not in item:
        assert pack(value) == data


@pytest.mark.parametrize("item", cases("authority", "revision"), ids=name_of)
def test_revisions(item: dict[str, Any]) -> None:
    initial = case("authority", "initial authority")
    revisions = Revisions(bytes.fromhex(initial["run_id"]), Authority.from_bytes(bytes.fromhex(initial["authority"])))
    for number, data in enumerate(item["previous"], 1):
        revisions.adopt(revisions.check(number, bytes.fromhex(data)))
    signed = check_case(item, lambda: revisions.check(item["number"], bytes.fromhex(item["revision"])))
    assert signed is None or signed.record.number == item["number"]


@pytest.mark.parametrize("item", cases("sampling", "temperature"), ids=name_of)
def test_tokens(item: dict[str, Any]) -> None:
    seed = bytes.fromhex(item["seed"])
    for t, row in enumerate(item["logits"]):
        scores = [logit / item["temperature"] + slow_sampling.noise(seed, t, token) for token, logit in enumerate(row)]
        assert scores.index(max(scores)) == item["tokens"][t]
    logits, tokens = torch.tensor(item["logits"]), torch.tensor(item["tokens"])
    places = sampling.token_places([seed], [len(tokens)])
    assert (sampling.batch_margins(logits, tokens, *places, item["temperature"]) == 0).all()


@pytest.mark.parametrize("item", cases("sketch", "hidden"), ids=name_of)
def test_sketches(item: dict[str, Any]) -> None:
    hidden, seed = torch.tensor(item["hidden"], dtype=torch.float64), bytes.fromhex(item["seed"])
    data = sketch.commit(item["kind"], hidden.float(), seed)
    assert data.hex() == item["sketch"]
    exact = slow_sketch.values(item["kind"], hidden.numpy(), seed)
    assert np.abs(exact % 1 - 0.5).min() > 1e-3  # float32 rounds like real numbers, on every machine
    assert np.array_equal(np.frombuffer(data, dtype=np.uint8).reshape(-1, 4), np.round(exact) % 256)


@pytest.mark.parametrize("item", cases("rollout", "rule"), ids=name_of)
def test_forms_of_episodes(item: dict[str, Any]) -> None:
    turns = [(count, tuple(reply)) for count, reply in item["turns"]]
    assert EpisodeRule(**item["rule"]).is_complete(item["tokens"], turns) == item["complete"]


def follow_chain() -> ChainVerifier:
    item = case("chain", "chain")
    run = RunManifest.from_bytes(bytes.fromhex(item["run"]))
    node = ChainVerifier(bytes.fromhex(item["run_id"]), run)
    node.accept_head(bytes.fromhex(item["head"]), 1000.0)
    for version, data in enumerate(item["manifests"]):
        node.accept_manifest(version, bytes.fromhex(data))
    return node


def test_the_chain_is_followed() -> None:
    assert follow_chain().trust == Trust.from_bytes(bytes.fromhex(case("chain", "chain")["trust"]))


@pytest.mark.parametrize("item", cases("chain", "next_head"), ids=name_of)
def test_the_next_head(item: dict[str, Any]) -> None:
    node = follow_chain()
    check_case(item, lambda: node.accept_head(bytes.fromhex(item["next_head"]), 1000.0))


@pytest.mark.parametrize("item", cases("outer", "trusted"), ids=name_of)
def test_round_manifests(item: dict[str, Any]) -> None:
    signed = (bytes.fromhex(item[name]) for name in ("trusted", "following"))
    trusted, following = (open_signed(data, RoundManifest, [KEYS["trainer"].public]) for data in signed)
    check_case(item, lambda: check_next_manifest(trusted, following))
