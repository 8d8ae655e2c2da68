"""proof.json round-trips, and a broken file is refused with one line."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from grailnode import UserError
from grailnode.calibration import proof_file
from grailnode.calibration.proof_file import ProofFile, ProofFileError
from grailnode.engine.policy import PACKAGED_POLICY, load_weights
from grailnode.node.user_errors import explain
from grailnode.run import workspace
from grailnode.run.creation import completed, open_run
from grailnode.run.run_toml import Recipe
from protocol.digest import digest_weights
from protocol.environments.rubric import parse
from tests.support.builders.policies import write_policy
from tests.support.builders.proofs import packaged_thresholds
from tests.support.builders.recipes import demo_recipe, demo_rules
from tests.support.builders.samples import replay_thresholds, task

PACKAGED = PACKAGED_POLICY / proof_file.NAME


def packaged() -> Any:
    return json.loads(PACKAGED.read_text())


def test_the_packaged_policy_has_a_proof() -> None:
    proof = proof_file.read(PACKAGED)
    rules = completed(demo_rules(), "demo")
    assert rules.max_tokens is not None
    proof.check(digest_weights(load_weights(PACKAGED_POLICY)), rules.temperature, rules.max_tokens, chat=False)
    for row in proof.table:
        assert row.thresholds.positions == sum(pair.positions for pair in row.measured.pairs) > 20_000
        assert all(copy.windows == 1.0 for copy in row.measured.copies if copy.bits <= 4)
        assert row.measured.window <= rules.groups * rules.audit_ppm / 1_000_000


def test_a_proof_round_trips(tmp_path: Path) -> None:
    proof = proof_file.read(PACKAGED)
    (tmp_path / "proof.json").write_text(proof.to_json())
    assert proof_file.read(tmp_path / "proof.json") == proof
    assert proof.to_json() == PACKAGED.read_text()


def test_thresholds_are_copied_into_the_manifest(tmp_path: Path) -> None:
    rules = demo_rules(audit_ppm=500_000, audit_floor_ppm=100_000)
    workspace.create(tmp_path, Recipe(rules=rules))
    manifest = open_run((tmp_path / "run.manifest").read_bytes()).record
    assert (manifest.proof.audit_ppm, manifest.proof.audit_floor_ppm) == (500_000, 100_000)
    assert manifest.proof.table == (packaged_thresholds(),)
    assert (manifest.proof.miners, manifest.proof.validators) == (("torch-float32",), ("torch-float32",))


def with_changes(**changes: Any) -> bytes:
    """Return the packaged file with some values replaced, by path with `__` between its parts; `row` is the first row
    of the table.
    """
    value = packaged()
    value["row"] = value["table"][0]
    for path, new in changes.items():
        *outer, last = path.split("__")
        inside = value
        for name in outer:
            inside = inside[name]
        inside[last] = new
    del value["row"]
    return json.dumps(value).encode()


INVALID_FILES = [
    (b"", "not JSON"),
    (b"\xff", "not JSON"),
    (b"[]", "not an object with a table"),
    (b"[" * 100_000, "nested deeper"),
    (b'{"table": [{}]}', "Field required"),
    (b'{"thresholds": {}}', "not an object with a table"),
    (with_changes(table=[]), "table: "),
    (with_changes(table=2 * packaged()["table"]), "do not strictly ascend"),
    (with_changes(row__thresholds__miner="exact"), "exact arithmetic has no measured thresholds"),
    (with_changes(row__thresholds__validator="torch-float16"), "validator: "),
    (b" " * ((1 << 20) + 1), "larger than"),
    (with_changes(row__measured=None), "measured"),
    (with_changes(row__thresholds__margin__beyond=[-1]), "margin.beyond.0: "),
    (with_changes(row__thresholds__threshold=float("nan")), "threshold: "),
    (with_changes(subject__sketch="rank"), "sketch: "),
    (with_changes(row__thresholds__sketch__rates=[]), "not one rate for each step"),
    (with_changes(row__thresholds__sketch__alternatives=[]), "sketch.alternatives: "),
    (with_changes(row__thresholds__threshold="1"), "threshold: "),
    (with_changes(row__thresholds__positions=1 << 60), "positions: "),
    (with_changes(row__thresholds__extra=1), "extra"),
    (with_changes(row__thresholds__audit_ppm=1), "audit_ppm: Extra inputs"),
    (with_changes(subject__policy="df11"), "subject.policy: "),
    (with_changes(row__measured__pairs=[]), "measured.pairs: "),
    (with_changes(row__measured__pairs=[1]), "measured.pairs.0: "),
    (with_changes(subject__prompts="\x1b[2J"), "subject.prompts: "),
]


@pytest.mark.parametrize(("data", "message"), INVALID_FILES, ids=range(len(INVALID_FILES)))
def test_a_broken_file_is_reported_in_one_line(tmp_path: Path, data: bytes, message: str) -> None:
    path = tmp_path / "proof.json"
    path.write_bytes(data)
    with pytest.raises(ProofFileError) as error_info:
        workspace.create(tmp_path / "run", demo_recipe(), proof=path)
    line = explain(error_info.value)
    assert line is not None
    assert line.startswith(f"{path}: not a proof that `grailnode calibrate` wrote (")
    assert message in line
    assert line.endswith("; measure it again with this version")
    assert line.isprintable()  # one line, and no control characters
    assert not (tmp_path / "run").exists()


def test_the_error_for_a_policy_without_a_proof_says_what_to_do(tmp_path: Path) -> None:
    write_policy(tmp_path / "policy")
    with pytest.raises(UserError, match=r"`grailnode calibrate --policy .*policy` first"):
        workspace.create(tmp_path / "run", demo_recipe(), policy=tmp_path / "policy")
    assert not (tmp_path / "run").exists()
    with pytest.raises(ProofFileError, match="cannot be read"):
        workspace.create(tmp_path / "run", demo_recipe(), proof=tmp_path / "nowhere.json")


def test_a_proof_is_refused_for_another_policy_or_sampling(tmp_path: Path) -> None:
    write_policy(tmp_path / "policy")
    (tmp_path / "policy" / proof_file.NAME).write_text(PACKAGED.read_text())
    with pytest.raises(ProofFileError, match="measured on weights df1107d62568293b"):
        workspace.create(tmp_path / "run", demo_recipe(), policy=tmp_path / "policy")
    assert not (tmp_path / "run").exists()
    for rules in (demo_rules(temperature=0.9), demo_rules(max_tokens=9)):
        with pytest.raises(ProofFileError, match="on completions at temperature 1 up to 8 tokens"):
            workspace.create(tmp_path / "run", Recipe(rules=rules))
    assert not (tmp_path / "run").exists()
    workspace.create(tmp_path / "run", demo_recipe(max_tokens=4))


def test_a_proof_of_fewer_turns_than_a_run_has_is_refused() -> None:
    proof = proof_file.read(PACKAGED)
    of_episodes = proof.model_copy(update={"subject": proof.subject.model_copy(update={"turns": 6})})
    policy = digest_weights(load_weights(PACKAGED_POLICY))
    for measured, turns in ((proof, 2), (of_episodes, 7)):
        advice = f"{turns - 1} turns at most, the run has {turns}: .* with --turns {turns}, other options as here"
        with pytest.raises(ProofFileError, match=advice):
            measured.check(policy, 1.0, 8, chat=False, turns=turns)
    of_episodes.check(policy, 1.0, 8, chat=False, turns=6)


def test_a_rate_of_replays_is_refused_for_larger_groups_and_other_environments() -> None:
    """The more episodes a group has, the more often one of them is not reproduced; and each environment has its own
    rate.
    """
    one, other, exact = task(exact=False), task(exact=False, config=b'{"a":1}'), task()
    rewarded_otherwise = task(exact=False, rubric=parse("score=1"))
    proof = proof_file.read(PACKAGED)
    changes = {"turns": 6, "group_size": 4, "replies": proof_file.replies_digest(one)}
    rows = tuple(
        item.model_copy(
            update={"thresholds": item.thresholds.model_copy(update={"replay": replay_thresholds().replay})}
        )
        for item in proof.table
    )
    measured = proof.model_copy(update={"subject": proof.subject.model_copy(update=changes), "table": rows})
    assert ProofFile.parse(measured.to_json().encode()) == measured
    check = partial(measured.check, digest_weights(load_weights(PACKAGED_POLICY)), 1.0, 8, chat=False, turns=6)
    check(environment=one, group_size=4)
    check(environment=rewarded_otherwise, group_size=4)
    with pytest.raises(ProofFileError, match="groups of 4, the run has 8"):
        check(environment=one, group_size=8)
    for environment in (other, exact):
        with pytest.raises(ProofFileError, match="measured on other replies"):
            check(environment=environment, group_size=4)
    without_rate = measured.model_copy(update={"table": proof.table})
    with pytest.raises(ProofFileError, match="measured on other replies"):
        without_rate.check(*check.args, chat=False, turns=6, environment=one)
