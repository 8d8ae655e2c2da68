"""Options of `grailnode calibrate` for tests of what it does with them."""

import shutil
import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import trio
from click.testing import CliRunner
from safetensors.torch import save_file
from torch import Tensor

from grailnode import UserError
from grailnode.calibration import proof_file
from grailnode.calibration.pairs import Submission, drawn_from, generate_groups, read_prompts
from grailnode.calibration.procedure import calibrate, quantized, random_adapters
from grailnode.calibration.proof_file import ProofFileError
from grailnode.calibration.variants import Variant
from grailnode.cli.actions.calibration_run import Options, make_job
from grailnode.cli.main import cli
from grailnode.config import validate
from grailnode.engine.lora_model import LoraModel, merged_weights
from grailnode.engine.models import build
from grailnode.engine.policy import PACKAGED_POLICY, Policy, load_weights
from grailnode.engine.torch_engine import TorchEngine
from grailnode.engine.vllm.installation import InstallationError
from grailnode.node.user_errors import explain
from grailnode.run import workspace
from grailnode.run.base_files import LoraStart, start_lora
from grailnode.run.creation import open_run
from grailnode.run.rules import Rules
from grailnode.run.run_toml import Recipe
from protocol import environments, limits
from protocol.digest import Weights
from protocol.environments import Problem
from protocol.environments.wordle import Wordle, WordleEpisode
from protocol.lora import DOWN, PREFIX, UP
from protocol.proof import RATE_UNIT, Arithmetic, Thresholds
from tests.support.builders.policies import PARAMS, requests_of_many_lengths, write_speaking_policy
from tests.support.builders.proofs import FLOAT32
from tests.support.builders.recipes import demo_recipe, demo_rules
from tests.support.builders.tasks import MATH
from tests.support.pytest_options.few_daily import few_daily
from tests.support.simulation.network import inline

OPTIONS = Options(
    rules=Rules(),
    policy=None,
    prompts=None,
    rollouts=100,
    pairs="same,eager-checked",
    miner="torch-float32",
    validator="torch-float32",
    device="cpu",
    sketch="projection",
    level=1e-9,
    headroom=4.0,
    seed=0,
    out=None,
)


def options_with(**changes: Any) -> Options:
    """Return the options with other values for some of them, or of their rules."""
    rules = {name: value for name, value in changes.items() if name in Rules.model_fields}
    others = {name: value for name, value in changes.items() if name not in rules}
    return replace(OPTIONS, rules=validate(Rules, rules, "calibrate"), **others)


# `grailnode calibrate` from its options to its file, and its errors


def invoke(*arguments: object) -> str:
    """Return the output of the command; raise its error."""
    result = CliRunner().invoke(cli, ["calibrate", *map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.parametrize("sketch", few_daily(["projection", "topk"], 2))
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
    (row,) = (item for item in proof.table if item.thresholds.pair == FLOAT32)
    assert [pair.name for pair in row.measured.pairs] == ["same", "small-batches", "eager-checked"]
    assert proof.subject.sketch == sketch
    assert row.thresholds.pair == FLOAT32
    assert row.thresholds.margin.rates[0] < 0.05 * RATE_UNIT
    workspace.create(tmp_path / "run", demo_recipe(), proof=out)
    manifest = open_run((tmp_path / "run" / "run.manifest").read_bytes()).record
    assert (manifest.proof.sketch, manifest.proof.table) == (sketch, (row.thresholds,))


def test_another_policy_is_calibrated_with_prompts_of_a_file(policy: Policy, tmp_path: Path) -> None:
    lines = '{"prompt": "1+2="}\n\n{"prompt": "77+5=", "answer": "82"}\n'
    (tmp_path / "prompts.jsonl").write_text(lines)
    text = invoke(
        *("--policy", policy.directory, "--prompts", tmp_path / "prompts.jsonl", "--rollouts", 96, "--seed", 3),
        *("--pairs", "same", "--temperature", 0.7, "--max-tokens", 5),
    )
    proof = proof_file.read(policy.directory / proof_file.NAME)
    assert "written: " in text
    assert (proof.subject.prompts, proof.table[0].measured.seed) == ("prompts.jsonl", 3)
    assert (proof.subject.temperature, proof.subject.max_tokens) == (0.7, 5)


def test_whole_episodes_are_measured_where_the_environment_replies(tmp_path: Path) -> None:
    out = tmp_path / "proof.json"
    invoke("--environment", "wordle", "--turns", 4, "--rollouts", 96, "--pairs", "same", "--out", out)
    proof = proof_file.read(out)
    assert (proof.subject.prompts, proof.subject.turns, proof.subject.max_tokens) == ("wordle", 4, 12)
    (pair,) = proof.table[0].measured.pairs
    assert pair.tokens > 3 * 96  # a turn of the packaged policy has less than two tokens


class WatchedWordle(Wordle):
    """Wordle whose replies are not exact, as a sandbox computes them, with the threads that asked it."""

    exact = False

    def __init__(self) -> None:
        super().__init__()
        self.threads: set[threading.Thread] = set()

    def problem(self, seed: bytes) -> Problem:
        self.threads.add(threading.current_thread())
        return super().problem(seed)

    def begin(self, problem: Problem, seed: bytes) -> WordleEpisode:
        self.threads.add(threading.current_thread())
        return super().begin(problem, seed)


def test_prompts_episodes_and_replays_are_not_computed_on_the_event_loop() -> None:
    work, wordle = make_job(options_with(environment="wordle", turns=2), Path()).work, WatchedWordle()
    assert work.task is not None
    watched = replace(
        work, task=replace(work.task, environment=wordle), prompt=lambda seed: wordle.problem(seed).prompt
    )

    async def scenario() -> list[Submission]:
        engine = await Variant().serve(work.policy, load_weights(PACKAGED_POLICY))
        return [item async for chunk in generate_groups(watched, engine, 1) for item in chunk]

    (group,) = trio.run(scenario)
    assert group.reproduced == (True,) * work.group_size
    assert wordle.threads and threading.main_thread() not in wordle.threads


def _last_margin(row: Thresholds) -> int:
    """Return the first step that honest work reaches less often than once in 10^9 tokens."""
    steps = zip(row.margin.beyond, row.margin.rates, strict=True)
    return next((beyond for beyond, rate in steps if rate < RATE_UNIT // 10**9), row.margin.beyond[-1])


def test_each_pair_of_arithmetics_gets_a_row_of_its_own(tmp_path: Path) -> None:
    """A row is added to those that were measured on the same subject; other subjects begin a new table."""
    out = tmp_path / "proof.json"
    across: tuple[Arithmetic, Arithmetic] = ("torch-float32", "torch-bfloat16")
    packaged = proof_file.read(PACKAGED_POLICY / proof_file.NAME)
    quick = ("--rollouts", 160, "--pairs", "same", "--out", out)
    invoke(*quick, "--validator", "torch-bfloat16")
    proof = proof_file.read(out)
    rows = {row.thresholds.pair: row.thresholds for row in proof.table}
    measured = rows.pop(across)
    assert {row.thresholds.pair: row.thresholds for row in packaged.table if row.thresholds.pair != across} == rows
    assert _last_margin(measured) > 100 * _last_margin(rows[FLOAT32])
    assert measured.logprob_tolerance > 100 * rows[FLOAT32].logprob_tolerance
    assert "replaced: " in invoke(*quick, "--temperature", 0.9)
    assert [row.thresholds.pair for row in proof_file.read(out).table] == [FLOAT32]


def test_a_file_of_another_format_is_not_overwritten(tmp_path: Path) -> None:
    out = tmp_path / "proof.json"
    out.write_text('{"thresholds": {}}')
    with pytest.raises(UserError, match=r"not an object with a table.*move it away"):
        invoke("--rollouts", 160, "--pairs", "same", "--out", out)
    assert out.read_text() == '{"thresholds": {}}'


def test_a_too_wide_distribution_is_refused_and_not_written(tmp_path: Path) -> None:
    """The weights of this policy have few bits already: a copy with as few computes the same, and nothing shows it."""
    policy, out = tmp_path / "policy", tmp_path / "proof.json"
    shutil.copytree(PACKAGED_POLICY, policy, ignore=shutil.ignore_patterns("proof.json"))
    save_file(quantized(quantized(load_weights(PACKAGED_POLICY), 4), 4), policy / "model.safetensors")
    with pytest.raises(UserError) as error_info:
        invoke("--rollouts", 64, "--pairs", "same", "--policy", policy, "--out", out)
    line = explain(error_info.value)
    assert line is not None
    assert line.startswith("the honest distribution is too wide: of a 4-bit copy's windows")
    assert not out.exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"environment": "multiplication"}, "unknown environment 'multiplication'"),
        ({"environment": "math"}, "takes its problems from a data file: --data FILE"),
        ({"pairs": "same,other"}, "--pairs: no pair 'other'; there are: run, same, small-batches"),
        ({"miner": "vllm-bfloat16"}, "vllm-bfloat16: no vLLM in "),
        ({"validator": "vllm-float32", "python": Path("nowhere")}, "--python nowhere: no such file"),
        ({"python": Path("/bin/true")}, "--python belongs to vLLM: give --miner or --validator vllm-bfloat16"),
        ({"device": "abacus"}, "--device: torch cannot use 'abacus'"),
        ({"lora_rank": 4}, "calibrate: lora_rank and lora_targets go together"),
        ({"lora_targets": "q_proj"}, "calibrate: lora_rank and lora_targets go together"),
        ({"lora_alpha": 4.0}, "calibrate: lora_alpha belongs to adapters: set lora_rank as well"),
        ({"lora_rank": 4, "lora_targets": "q proj"}, "--lora-targets: String should match"),
        ({"lora_rank": 65, "lora_targets": "v_proj"}, "rank 65 is more than model.layers.0"),
        ({"system_prompt": "Add."}, "calibrate: a system prompt belongs to a conversation: set chat as well"),
    ],
)
def test_invalid_options_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as error_info:
        make_job(options_with(**changes), Path())
    assert message in str(error_info.value)
    assert "\n" not in str(error_info.value)


def interpreter(path: Path, without_vllm: str, version: str = "") -> Path:
    """Write a program in place of an interpreter, which says that it has a version of vLLM, or fails with a line."""
    path.write_text(f"""#!/bin/sh
test "$1" = -I && test "{version}" && echo "{version}" && exit
echo "{without_vllm}" >&2
exit 1
""")
    path.chmod(0o755)
    return path


def test_an_interpreter_without_vllm_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    options = options_with(miner="vllm-float32", python=interpreter(tmp_path / "python", "no such package"))
    with pytest.raises(InstallationError, match=r"/python: no interpreter with vLLM, .*: no such package$"):
        make_job(options, tmp_path)
    (tmp_path / "python").chmod(0o644)
    with pytest.raises(InstallationError, match=r"/python: no interpreter with vLLM, .*: Permission denied$"):
        make_job(options, tmp_path)


def test_a_vllm_that_does_not_start_is_one_line_and_its_log_is_kept(tmp_path: Path) -> None:
    out, python = tmp_path / "proof.json", interpreter(tmp_path / "python", "no kernels", "vllm 0.32.0")
    with pytest.raises(UserError) as error_info:
        invoke("--miner", "vllm-float32", "--python", python, "--rollouts", 64, "--out", out)
    assert explain(error_info.value) == (
        f"vLLM's launcher ended while it imported vLLM; its log is {tmp_path / 'vllm.log'}"
    )
    assert (tmp_path / "vllm.log").read_text().rstrip() == "no kernels"
    assert not out.exists()


def test_prompts_come_from_the_problems_of_a_data_file(tmp_path: Path) -> None:
    data = tmp_path / "problems.jsonl"
    data.write_bytes(MATH)
    write_speaking_policy(tmp_path / "policy", ["<solution>4</solution>"])
    work = make_job(options_with(policy=tmp_path / "policy", environment="math", data=data), Path()).work
    problems = environments.dataset("math", MATH)
    seeds = [bytes([number]) * 32 for number in range(100)]
    assert {work.prompt(seed) for seed in seeds} == {problem.prompt for problem in problems.training_problems}
    assert work.params.max_tokens == environments.requirements("math").tokens


def test_prompts_are_conversations_with_the_policys_chat_template(tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "1+1="}')
    template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"
    policy = write_speaking_policy(tmp_path / "policy", ["<solution>4</solution>"], template)
    options = options_with(policy=policy.directory, chat=True, system_prompt="Add.", environment="addition")
    for source in (options, replace(options, prompts=tmp_path / "prompts.jsonl")):
        work = make_job(source, Path()).work
        assert work.chat is not None
        assert work.chat.prompt("1+1=") == "[system]Add.[user]1+1=[assistant]"


def test_a_missing_directory_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such directory"):
        invoke("--out", tmp_path / "nowhere" / "proof.json")


def test_pairs_that_generate_in_one_way_check_the_same_rollouts(policy: Policy) -> None:
    steps: list[str] = []

    def progress(name: str, rollouts: int, total: int) -> None:
        if rollouts == total:
            steps.append(name)

    options = options_with(
        policy=policy.directory, rollouts=64, pairs="same,small-batches,eager-checked", max_tokens=20
    )
    job = make_job(options, Path())
    rows = trio.run(calibrate, job, progress, lambda _: None).table[0].measured.pairs
    same, small = (f"generating with {job.pairs[place].generating}" for place in (0, 1))
    assert steps[:5] == [same, "same", "eager-checked", small, "small-batches"]
    assert steps[5:7] == [f"3-bit copy, {same}", "3-bit copy, same"]
    assert len(set(steps)) == len(steps)
    assert [row.name for row in rows] == ["same", "small-batches", "eager-checked"]
    assert rows[0].tokens == rows[2].tokens


def test_a_window_of_a_calibration_has_no_more_groups_than_a_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    rules: dict[str, Any] = {"groups": 100, "audit_floor_ppm": 500_000, "group_size": 4, "max_tokens": 64}
    assert make_job(options_with(**rules), Path()).demands.window == 50
    monkeypatch.setattr(limits, "MAX_VERDICT_BYTES", 1024 + 7 * (4 * (4 * 64 + 1024) + 1024))
    assert make_job(options_with(**rules), Path()).demands.window == 7


def test_too_few_rollouts_are_refused_before_anything_is_measured() -> None:
    def progress(name: str, rollouts: int, total: int) -> None:
        raise AssertionError(f"{name} is measured")

    with pytest.raises(UserError, match=r"^a pair needs at least 8 groups; ask for more --rollouts$"):
        trio.run(calibrate, make_job(options_with(rollouts=14), Path()), progress, print)


# Prompts from a file


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "contains no prompt"),
        ('{"prompt": "1+1="}\n{', "line 2: not JSON"),
        ('"1+1="', "line 1: not {"),
        ('{"prompt": 5}', "line 1: not {"),
        ('{"prompt": ""}', "with at least one token"),
        ("[" * 50, "line 1: JSON nested deeper"),
    ],
)
def test_the_error_for_a_broken_file_names_the_line(policy: Policy, tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(text)
    with pytest.raises(UserError) as error_info:
        read_prompts(path, policy.tokenizer)
    assert str(error_info.value).startswith(f"{path}: ")
    assert message in str(error_info.value)


def test_every_prompt_of_a_file_is_used(policy: Policy, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(f'{{"prompt": "{number}"}}\n' for number in range(5)))
    prompt = drawn_from(read_prompts(path, policy.tokenizer))
    assert {prompt(bytes([number]) * 32) for number in range(50)} == {str(number) for number in range(5)}


# The calibration of a LoRA run: base and adapters on both sides, copies of the merged weights, a proof of its own


SHARE = 0.1
TARGETS = ("down_proj", "q_proj", "v_proj")
VARIANTS = {"sdpa": Variant(), "eager": Variant(attention="eager")}


@pytest.fixture(scope="module")
def start(policy: Policy) -> LoraStart:
    """Return what a run of adapters on the policy begins with."""
    start = start_lora(policy, 4, 8.0, TARGETS)
    assert start is not None
    return start


@pytest.fixture(scope="module")
def adapters(policy: Policy, weights: Weights, start: LoraStart) -> dict[str, Tensor]:
    return random_adapters(weights, build(policy, lora=start.spec).shapes, start.spec.scale, SHARE, seed=0)


def test_random_adapters_are_those_of_the_run_and_change_each_matrix_by_a_share(
    weights: Weights, start: LoraStart, adapters: Mapping[str, Tensor]
) -> None:
    assert {name: tensor.shape for name, tensor in adapters.items()} == {
        name: tensor.shape for name, tensor in start.adapters.items()
    }
    wide = {name: tensor.to(torch.float32) for name, tensor in weights.items()}
    changes = [
        float((merged - wide[name]).norm() / wide[name].norm())
        for name, merged in merged_weights(wide, adapters, start.spec.scale).items()
        if merged is not wide[name]
    ]
    assert len(changes) == len(adapters) / 2
    assert changes == pytest.approx([SHARE] * len(changes), rel=0.01)


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
async def test_a_side_computes_what_a_nodes_model_of_base_and_adapters_computes(
    policy: Policy, weights: Weights, start: LoraStart, adapters: Mapping[str, Tensor], variant: Variant
) -> None:
    node = TorchEngine(LoraModel(build(policy, lora=start.spec), weights), run_sync=inline)
    await node.stage(0, adapters)
    await node.commit()
    beside = {name.removeprefix(PREFIX): tensor for name, tensor in adapters.items()}
    side = await variant.serve(policy, {**weights, **beside}, start.spec)
    params = replace(PARAMS, max_tokens=5)
    requests = requests_of_many_lengths(8)
    expected, own = await node.generate(requests, params), await side.generate(requests, params)
    without = await (await variant.serve(policy, weights)).generate(requests, params)
    for one, two, three in zip(expected, own, without, strict=True):
        assert one.tokens == two.tokens
        torch.testing.assert_close(one.hidden, two.hidden, rtol=0, atol=1e-4)
        assert variant is not VARIANTS["sdpa"] or torch.equal(one.hidden, two.hidden)
        assert three.tokens != two.tokens or not torch.allclose(three.hidden, two.hidden, rtol=0, atol=1e-3)
    assert all(name.endswith((DOWN, UP)) for name in beside)


def test_the_thresholds_of_a_run_of_adapters_are_for_that_run_alone(tmp_path: Path) -> None:
    out, options = tmp_path / "proof.json", ("--lora-rank", "4", "--lora-targets", "v_proj,q_proj")
    invoke("--rollouts", 400, "--pairs", "same,eager-checked", "--adapter-share", 0.1, "--out", out, *options)
    measured = proof_file.read(out).subject.lora
    assert measured is not None
    assert (measured.rank, measured.alpha, measured.targets, measured.share) == (4, 8.0, ("q_proj", "v_proj"), SHARE)
    run = demo_rules(lora_rank=4, lora_targets=("q_proj", "v_proj"))
    workspace.create(tmp_path / "run", Recipe(rules=run), proof=out)
    manifest = open_run((tmp_path / "run" / "run.manifest").read_bytes()).record
    assert manifest.proof.table == tuple(row.thresholds for row in proof_file.read(out).table)
    for rules, proof, message in (
        (demo_rules(), out, r"adapters of rank 4.*the run has all weights.*calibrate` without --lora-rank"),
        (run.changed(lora_alpha=4.0), out, "alpha 8, of q_proj, v_proj, the run has .* rank 4, alpha 4"),
        (run, None, "all weights, the run .* --lora-rank 4 --lora-alpha 8 --lora-targets q_proj,v_proj"),
    ):
        with pytest.raises(ProofFileError, match=message):
            workspace.create(tmp_path / "other", Recipe(rules=rules), proof=proof)
    assert not (tmp_path / "other").exists()
