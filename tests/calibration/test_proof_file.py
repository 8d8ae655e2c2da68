"""proof.json round-trips, and a broken file is refused with one line."""

import json
from pathlib import Path
from typing import Any

import pytest

from grailnode.calibration import proof_file
from grailnode.calibration.proof_file import ProofFile, ProofFileError
from grailnode.engine.policy import PACKAGED_POLICY, load_weights
from grailnode.node.user_errors import explain
from grailnode.run import workspace
from grailnode.run.creation import Choices, open_run
from grailnode.run.workspace import WorkspaceError
from protocol.digest import digest_weights
from tests.support.builders.policies import write_policy

PACKAGED = PACKAGED_POLICY / proof_file.NAME


def packaged() -> Any:
    return json.loads(PACKAGED.read_text())


def test_the_packaged_policy_has_a_proof() -> None:
    proof = proof_file.read(PACKAGED)
    choices = Choices()
    proof.check(digest_weights(load_weights(PACKAGED_POLICY)), choices.temperature, choices.max_tokens, chat=False)
    assert proof.thresholds.positions == sum(pair.positions for pair in proof.measured.pairs) > 20_000
    assert all(copy.windows == 1.0 for copy in proof.measured.copies if copy.bits <= 4)
    assert proof.measured.window <= choices.groups * choices.audit_ppm / 1_000_000


def test_a_proof_round_trips(tmp_path: Path) -> None:
    proof = proof_file.read(PACKAGED)
    (tmp_path / "proof.json").write_text(proof.to_json())
    assert proof_file.read(tmp_path / "proof.json") == proof
    assert proof.to_json() == PACKAGED.read_text()


def test_thresholds_are_copied_into_the_manifest(tmp_path: Path) -> None:
    choices = Choices(audit_ppm=500_000, audit_floor_ppm=100_000)
    workspace.create(tmp_path, choices, workspace.Pace())
    manifest = open_run((tmp_path / "run.manifest").read_bytes()).record
    assert (manifest.proof.audit_ppm, manifest.proof.audit_floor_ppm) == (500_000, 100_000)
    thresholds = packaged()["thresholds"]
    assert thresholds == {name: getattr(manifest.proof, name) for name in thresholds}
    assert set(thresholds) | set(proof_file.AUDIT) == set(type(manifest.proof).model_fields)


def with_changes(**changes: Any) -> bytes:
    """Return the packaged file with some values replaced, by path with `__` between its parts."""
    value = packaged()
    for path, new in changes.items():
        *outer, last = path.split("__")
        inside = value
        for name in outer:
            inside = inside[name]
        inside[last] = new
    return json.dumps(value).encode()


INVALID_FILES = [
    (b"", "not JSON"),
    (b"\xff", "not JSON"),
    (b"[]", "not an object with thresholds"),
    (b"[" * 100_000, "nested deeper"),
    (b'{"thresholds": {}}', "Field required"),
    (b" " * ((1 << 20) + 1), "larger than"),
    (with_changes(measured=None), "measured"),
    (with_changes(thresholds__margin=-1.0), "margin: "),
    (with_changes(thresholds__margin=float("nan")), "margin: "),
    (with_changes(thresholds__sketch="rank"), "sketch: "),
    (with_changes(thresholds__sketch_rate=0.0), "sketch_rate: "),
    (with_changes(thresholds__sketch_tolerance="1"), "sketch_tolerance: "),
    (with_changes(thresholds__positions=1 << 60), "positions: "),
    (with_changes(thresholds__margin=1.0, thresholds__margin_limit=0.5), "margin_limit lies below margin"),
    (with_changes(thresholds__extra=1), "extra"),
    (with_changes(thresholds__audit_ppm=1), "thresholds.audit_ppm: the audit shares are options"),
    (with_changes(measured__policy="df11"), "measured.policy: "),
    (with_changes(measured__pairs=[]), "measured.pairs: "),
    (with_changes(measured__pairs=[1]), "measured.pairs.0: "),
    (with_changes(measured__prompts="\x1b[2J"), "measured.prompts: "),
]


@pytest.mark.parametrize(("data", "message"), INVALID_FILES, ids=range(len(INVALID_FILES)))
def test_a_broken_file_is_reported_in_one_line(tmp_path: Path, data: bytes, message: str) -> None:
    path = tmp_path / "proof.json"
    path.write_bytes(data)
    with pytest.raises(ProofFileError) as error_info:
        workspace.create(tmp_path / "run", Choices(), workspace.Pace(), proof=path)
    line = explain(error_info.value)
    assert line is not None
    assert line.startswith(f"{path}: not a proof that `grailnode calibrate` wrote (")
    assert message in line
    assert line.isprintable()  # one line, and no control characters
    assert not (tmp_path / "run").exists()


def test_the_error_for_a_policy_without_a_proof_says_what_to_do(tmp_path: Path) -> None:
    write_policy(tmp_path / "policy")
    with pytest.raises(WorkspaceError, match=r"`grailnode calibrate --policy .*policy` first"):
        workspace.create(tmp_path / "run", Choices(), workspace.Pace(), policy=tmp_path / "policy")
    assert not (tmp_path / "run").exists()
    with pytest.raises(ProofFileError, match="cannot be read"):
        workspace.create(tmp_path / "run", Choices(), workspace.Pace(), proof=tmp_path / "nowhere.json")


def test_a_proof_is_refused_for_another_policy_or_sampling(tmp_path: Path) -> None:
    write_policy(tmp_path / "policy")
    (tmp_path / "policy" / proof_file.NAME).write_text(PACKAGED.read_text())
    with pytest.raises(ProofFileError, match="was measured on weights df1107d62568293b"):
        workspace.create(tmp_path / "run", Choices(), workspace.Pace(), policy=tmp_path / "policy")
    assert not (tmp_path / "run").exists()
    for choices in (Choices(temperature=0.9), Choices(max_tokens=9)):
        with pytest.raises(ProofFileError, match="was measured at temperature 1 up to 8 tokens"):
            workspace.create(tmp_path / "run", choices, workspace.Pace())
    assert not (tmp_path / "run").exists()
    workspace.create(tmp_path / "run", Choices(max_tokens=4), workspace.Pace())


def test_reading_a_file_equals_parsing_its_bytes() -> None:
    assert ProofFile.parse(PACKAGED.read_bytes()) == proof_file.read(PACKAGED)
