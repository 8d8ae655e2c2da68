"""`grailnode calibrate` from its options to its file, and its errors."""

from dataclasses import replace
from pathlib import Path

import pytest
import trio
from click.testing import CliRunner

from grailnode.calibration import proof_file
from grailnode.calibration.procedure import calibrate
from grailnode.calibration.thresholds import CalibrationError
from grailnode.cli.actions.calibration_run import make_job
from grailnode.cli.main import cli
from grailnode.engine.policy import Policy
from grailnode.node.user_errors import explain
from grailnode.run import workspace
from grailnode.run.creation import Choices, open_run
from grailnode.run.requirements import RequirementError
from protocol import environments
from tests.calibration.options import OPTIONS
from tests.support.builders.phrase_policies import write_speaking_policy
from tests.support.builders.tasks import MATH


def invoke(*arguments: object) -> str:
    """Return the output of the command; raise its error."""
    result = CliRunner().invoke(cli, ["calibrate", *map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.parametrize("sketch", ["projection", "topk"])
def test_the_packaged_policy_is_calibrated(tmp_path: Path, sketch: str) -> None:
    out = tmp_path / "proof.json"
    quick = ("--rollouts", 400, "--pairs", "same,small-batches,eager-checked")
    text = invoke(*quick, "--out", out, "--sketch", sketch)
    for part in (
        "Honest distribution",
        "small-batches",
        "4-bit copy (same",
        "100.0% of windows of 16 groups",
        str(out),
    ):
        assert part in text
    proof = proof_file.read(out)
    assert [pair.name for pair in proof.measured.pairs] == ["same", "small-batches", "eager-checked"]
    assert proof.thresholds.sketch == sketch
    assert proof.thresholds.sketch_rate < 0.1
    assert proof.thresholds.margin_limit < 1e-3
    workspace.create(tmp_path / "run", Choices(), workspace.Pace(), proof=out)
    manifest = open_run((tmp_path / "run" / "run.manifest").read_bytes()).record
    assert manifest.proof == proof.thresholds


def test_another_policy_is_calibrated_with_prompts_of_a_file(policy: Policy, tmp_path: Path) -> None:
    lines = '{"prompt": "1+2="}\n\n{"prompt": "77+5=", "answer": "82"}\n'
    (tmp_path / "prompts.jsonl").write_text(lines)
    text = invoke(
        *("--policy", policy.directory, "--prompts", tmp_path / "prompts.jsonl", "--rollouts", 96, "--seed", 3),
        *("--pairs", "same,bfloat16-generated", "--temperature", 0.7, "--max-tokens", 5),
    )
    proof = proof_file.read(policy.directory / proof_file.NAME)
    assert "written: " in text
    assert (proof.measured.prompts, proof.measured.seed) == ("prompts.jsonl", 3)
    assert (proof.measured.temperature, proof.measured.max_tokens) == (0.7, 5)
    wide = {pair.name: pair.largest_shift for pair in proof.measured.pairs}
    assert wide["bfloat16-generated"] > 100 * wide["same"]


def test_a_too_wide_distribution_is_refused_and_not_written(tmp_path: Path) -> None:
    out = tmp_path / "proof.json"
    with pytest.raises(CalibrationError) as error_info:
        invoke("--rollouts", 64, "--pairs", "same", "--level", 1e-300, "--headroom", 16, "--out", out)
    line = explain(error_info.value)
    assert line is not None
    assert line.startswith("the honest distribution is too wide: of a 4-bit copy's windows")
    assert not out.exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"environment": "multiplication"}, "unknown environment 'multiplication'"),
        ({"environment": "math"}, "takes its problems from a data file: --data FILE"),
        ({"pairs": "same,other"}, "--pairs: no pair 'other'; there are: run, all, same, small-batches"),
        ({"device": "abacus"}, "--device abacus: torch cannot use it"),
    ],
)
def test_invalid_options_are_refused(changes: dict[str, str], message: str) -> None:
    with pytest.raises((CalibrationError, RequirementError)) as error_info:
        make_job(replace(OPTIONS, **changes))  # type: ignore[arg-type]
    assert message in str(error_info.value)
    assert "\n" not in str(error_info.value)


def test_prompts_come_from_the_problems_of_a_data_file(tmp_path: Path) -> None:
    data = tmp_path / "problems.jsonl"
    data.write_bytes(MATH)
    write_speaking_policy(tmp_path / "policy", ["<solution>4</solution>"])
    work = make_job(replace(OPTIONS, policy=tmp_path / "policy", environment="math", data=data)).work
    problems = environments.dataset("math", MATH)
    seeds = [bytes([number]) * 32 for number in range(100)]
    assert {work.prompt(seed) for seed in seeds} == {problem.prompt for problem in problems.training_problems}
    assert work.params.max_tokens == environments.requirements("math").tokens


def test_prompts_are_conversations_with_the_policys_chat_template(tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "1+1="}')
    template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"
    policy = write_speaking_policy(tmp_path / "policy", ["<solution>4</solution>"], template)
    options = replace(OPTIONS, policy=policy.directory, chat=True, system_prompt="Add.", environment="addition")
    for source in (options, replace(options, prompts=tmp_path / "prompts.jsonl")):
        work = make_job(source).work
        assert work.chat is not None
        assert work.chat.prompt("1+1=") == "[system]Add.[user]1+1=[assistant]"
    with pytest.raises(CalibrationError, match="--system-prompt belongs to a conversation"):
        make_job(replace(options, chat=None))


def test_a_missing_directory_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    with pytest.raises(CalibrationError, match="no such directory"):
        invoke("--out", tmp_path / "nowhere" / "proof.json")


def test_too_few_rollouts_are_refused_before_anything_is_measured() -> None:
    def progress(name: str, rollouts: int, total: int) -> None:
        raise AssertionError(f"{name} is measured")

    with pytest.raises(CalibrationError, match=r"^a pair needs at least 8 groups; ask for more --rollouts$"):
        trio.run(calibrate, make_job(replace(OPTIONS, rollouts=14)), progress, print)
