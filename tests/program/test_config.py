"""run.toml and recipes: what is accepted, the messages about what is not, and the constants of the paper."""

import math
import tomllib
from pathlib import Path
from typing import Any

import pytest

from grailnode import UserError
from grailnode.config import EngineSection, TrainerSection, load
from grailnode.demo import smollm2
from grailnode.engine.policy import PACKAGED_POLICY, load_weights
from grailnode.node.run_model import learner_settings, publisher_settings
from grailnode.run import workspace
from grailnode.run.creation import open_run
from grailnode.run.run_toml import read_recipe
from roles.miner.miner_settings import MinerSettings
from roles.trainer.learn.learner import LearnerSettings
from tests.support.builders.policies import write_policy
from tests.support.builders.recipes import demo_recipe
from tests.support.processes.command_line import run_command, succeed


def test_the_file_of_init_is_complete_and_true(run_toml: Path):
    config = load(run_toml)
    assert config.at(config.run.manifest).is_file()
    assert config.trainer == TrainerSection()
    assert config.miner == MinerSettings()
    assert config.engine == EngineSection()
    assert tomllib.loads(run_toml.read_text())["trainer"]["loss"] == "token-mean"


def test_a_heads_expiry_tells_its_age_to_a_second_and_differs_from_start_to_start(run_toml: Path):
    run = open_run((run_toml.parent / "run.manifest").read_bytes()).record
    offsets = [publisher_settings(load(run_toml), run).expiry_offset_ms for _ in range(20)]
    assert max(offsets) < 1000
    assert len(set(offsets)) > 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[miner]\ngroup = 3\n", "unknown key miner.group; known here: chunk, groups"),
        ("[minre]\n", "unknown key minre; known here: beacon, engine"),
        ("[miner]\ngroups = 'many'\n", "miner.groups: input should be a valid integer"),
        ("[miner]\ngroups = 0\n", "miner.groups: input should be greater than or equal to 1"),
        ("[trainer]\ndecay = 1.5\n", "trainer.decay: input should be less than or equal to 1"),
        ("[trainer.hosts]\nmeeting = 'somewhere'\n", "trainer.hosts.meeting: string should match pattern"),
        ("[trainer.hosts]\n", "trainer: hosts: `number` is below `count`, and `meeting` is the ADDRESS:PORT of host 0"),
        ("[trainer.hosts]\nnumber = 2\nmeeting = 'a:1'\n", "trainer: hosts: `number` is below `count`"),
        ("[trainer.hosts]\nmeeting = 'a:65535'\n", "ADDRESS:PORT of host 0, with a port from 1 to 65534"),
        ("[trainer]\ngpus = 2\noptimizer = 'adamw-8bit'\n", "trainer: 2 processes need another optimizer"),
        ("[engine]\ndtype = 'int4'\n", "engine.dtype: input should be 'float32' or 'bfloat16'"),
        ("miner = 3\n", "miner: is a section: write [miner], and its keys below it"),
        ("[beacon]\nrelays = 'https://a.example'\n", "beacon.relays: a list is needed: write [ ] around it"),
        ("not toml", "not TOML"),
        ("[node]\nalarm_url = 'file:///etc/passwd'\n", "node.alarm_url: string should match pattern"),
        ("[store.meeting]\npth = 'x'\n", "unknown key store.meeting.pth; known here: addressing, attempts"),
        ("[store.meeting]\npth = 'x'\n", " path, prefix, "),  # not `peers`, which the store has
        ("[trainer.canary_store.meeting]\npth = 'x'\n", "canary_store.meeting.pth; known here: addressing, attempts"),
        ("[trainer.canary_store]\npth = 'x'\n", "canary_store.pth; known here: addressing, attempts"),
        ("[store]\nprefix = '/a'\n", "store.prefix: string should match pattern '^([A-Za-z0-9_~-]"),
        ("[trainer.outer]\nstep = 1\n", "unknown key trainer.outer.step; known here: chosen, delay, fraction"),
        ("[trainer.outer]\nmethod = 'dipaco'\n", "trainer.outer.method: input should be 'pulseloco'"),
        ("[trainer]\ncanaries = 1\n[trainer.outer]\n", "canaries need a trainer that collects groups itself"),
        (f"[store.peers.{'ab' * 32}]\npth = 'x'\n", f"peers.{'ab' * 32}.pth; known here: addressing, attempts"),
    ],
)
def test_a_wrong_file_is_reported_in_one_line_that_names_the_key(tmp_path: Path, text: str, message: str):
    file = tmp_path / "run.toml"
    file.write_text(text)
    with pytest.raises(UserError) as error_info:
        load(file)
    line = str(error_info.value)
    assert message in line
    assert str(file) in line
    assert len(line.splitlines()) == 1


@pytest.mark.parametrize("override", ["miner", "miner.groups", "=3", "miner.=3", "groups=3"])
def test_a_wrong_override_says_how_to_write_one(run_toml: Path, override: str):
    with pytest.raises(UserError, match=r"write --set section\.key=value"):
        load(run_toml, [override])


def test_a_run_is_never_created_over_another(run_toml: Path):
    with pytest.raises(UserError, match="there is a run already"):
        workspace.create(run_toml.parent, demo_recipe())


def test_the_same_seed_gives_the_same_keys_and_no_seed_gives_new_ones(tmp_path: Path):
    runs = [
        workspace.create(tmp_path / name, demo_recipe(), seed=seed, begin=1e9)
        for name, seed in (("a", 1), ("b", 1), ("c", 2), ("d", None), ("e", None))
    ]
    assert runs[0].keys == runs[1].keys
    assert runs[0].run_id == runs[1].run_id
    assert len({run.keys["trainer"] for run in runs}) == 4


# Recipes: the constants of a run in one file, the paper's among them


PAPER = Path(__file__).parents[2] / "docs" / "examples" / "qwen2.5-1.5b-math.toml"
TABLE_8 = {  # and appendices F.4 and G.4 of arXiv 2602.03839; learning rate and beta2 are those of the deployment
    "rules.group_size": 16,
    "rules.max_tokens": 2048,
    "rules.environment": "math",
    "engine.dtype": "bfloat16",
    "trainer.loss": "grpo",
    "trainer.advantage": "standardized",
    "trainer.clip_low": 0.2,
    "trainer.clip_high": 0.28,
    "trainer.truncation": math.inf,
    "trainer.kl_coefficient": 0.0,
    "trainer.groups_per_step": 32,
    "trainer.training_steps": 400,
    "trainer.learning_rate": 1e-6,
    "trainer.schedule": "constant",
    "trainer.warmup_steps": 20,
    "trainer.beta1": 0.9,
    "trainer.beta2": 0.95,
    "trainer.weight_decay": 0.0,
    "trainer.max_grad_norm": 1.0,
}
OPEN_IN_THE_PAPER = {
    "rules.chat": True,
    "rules.groups": 32,
    "rules.temperature": 1.0,
    "rules.top_k": 0,
    "rules.top_p": 1.0,
    "rules.min_p": 0.0,
    "engine.device": "cuda",
    "trainer.overlong_filtering": False,
    "trainer.dynamic_filtering": True,
    "trainer.steps_per_version": 1,
    "trainer.max_uses": 1,
    "trainer.decay": 0.7,
    "trainer.max_staleness": 8,
    "miner.groups": 32,
}


def test_the_example_has_the_constants_of_the_paper_and_says_nothing_else():
    recipe = read_recipe(PAPER).model_dump(mode="python", exclude_unset=True)
    values = {f"{section}.{key}": value for section, keys in recipe.items() for key, value in keys.items()}
    assert values == TABLE_8 | OPEN_IN_THE_PAPER


@pytest.mark.parametrize("path", [*PAPER.parent.glob("*.toml"), smollm2.DATA / "demo.toml"], ids=lambda path: path.stem)
def test_every_recipe_of_ours_can_be_read(path: Path) -> None:
    assert read_recipe(path).rules.environment in ("math", "sums")


def _write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_init_signs_the_rules_and_writes_the_other_sections(tmp_path: Path):
    recipe = _write(
        tmp_path / "recipe.toml",
        "[rules]\ngroup_size = 12\ntop_p = 0.9\nmax_lag = 3\nseal_rounds = 20\nhead_ttl = 60\n"
        '[trainer]\nloss = "gspo"\nclip_low = 3e-4\nclip_high = 4e-4\n'
        'truncation = inf\nkl_coefficient = 0.1\nadvantage = "centered"\nbeta2 = 0.99\nschedule = "cosine"\n'
        "training_steps = 50\nwarmup_steps = 5\nfinal_share = 0.1\nweight_decay = 0.01\n[miner]\ngroups = 3\n",
    )
    succeed("init", str(tmp_path / "run"), "--recipe", str(recipe), "--group-size", "4", "--min-p", "0.05")
    run = open_run((tmp_path / "run" / "run.manifest").read_bytes()).record
    assert (run.group_size, run.groups) == (4, 16)
    assert (run.sampling.top_k, run.sampling.top_p, run.sampling.min_p) == (0, 0.9, 0.05)
    assert (run.schedule.max_lag, run.schedule.seal_rounds, run.schedule.rounds, run.head_ttl) == (3, 20, 8, 60)
    config = load(tmp_path / "run")
    assert config.miner.groups == 3
    settings = learner_settings(config, run)
    loss, optimizer = settings.loss, settings.optimizer
    assert (loss.loss, loss.clip_low, loss.clip_high, loss.truncation) == ("gspo", 3e-4, 4e-4, math.inf)
    assert (loss.kl_coefficient, loss.advantage) == (0.1, "centered")
    assert (optimizer.beta2, optimizer.weight_decay) == (0.99, 0.01)
    assert [optimizer.share(step) for step in (5, 50)] == pytest.approx([1.0, 0.1])
    assert config.trainer.training_steps == 50
    assert settings.sampling == run.sampling.params()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "[rules]\ngroupsize = 4\n",
            "unknown key rules.groupsize; known here: admission, audit_floor_ppm, audit_halving",
        ),
        ("[store]\n", "unknown key store"),
        ("[rules]\ntemperature = 0\n", "rules.temperature"),
        ("[rules]\nseal_rounds = 6\n", "rules: commit_rounds < audit_rounds < seal_rounds < verdict_rounds must hold"),
        ("[rules]\nlead = 0\n", "rules: lead: input should be greater than or equal to 1"),
        ("[rules]\nquorum = 2\n", "rules: 2 of 1 validators can never accept; lower --quorum"),
        ('[trainer]\nschedule = "linear"\n', "needs training_steps above warmup_steps = 10"),
        ("[trainer]\ntruncation = 1.2\n", "truncation must be above 1 + clip_high"),
        ("[rules\n", "not TOML"),
    ],
)
def test_a_recipe_that_cannot_be_used_is_refused_with_the_key(tmp_path: Path, text: str, message: str):
    path = _write(tmp_path / "recipe.toml", text)
    with pytest.raises(UserError, match=r"recipe\.toml") as raises:
        read_recipe(path)
    assert message in str(raises.value)


def test_an_option_replaces_a_rule_and_is_checked_with_the_others():
    rules = read_recipe(PAPER, {"group_size": 4, "lora_targets": "q_proj,v_proj", "lora_rank": 8}).rules
    assert (rules.group_size, rules.top_p, rules.lora_targets) == (4, 1.0, ("q_proj", "v_proj"))
    with pytest.raises(UserError, match="init: group_size: input should be greater than or equal to 2"):
        read_recipe(PAPER, {"group_size": 1})
    with pytest.raises(UserError, match="init: pass_at = 2 needs evaluation_samples of at least as many"):
        read_recipe(PAPER, {"pass_at": 2})


def test_more_rounds_than_milliseconds_are_refused(tmp_path: Path):
    recipe = _write(tmp_path / "recipe.toml", "[rules]\nrounds = 5000\n")
    result = run_command("init", str(tmp_path / "run"), "--recipe", str(recipe))
    assert result.stderr == ("grailnode: 5000 rounds in a window of this length: lower rounds, or raise --window\n")
    assert not (tmp_path / "run").exists()


def test_a_loss_that_cannot_be_computed_is_refused_with_its_key(tmp_path: Path) -> None:
    workspace.create(tmp_path / "run", demo_recipe())
    run = open_run((tmp_path / "run" / "run.manifest").read_bytes()).record

    def settings(trainer: dict[str, Any]) -> LearnerSettings:
        config = load(tmp_path / "run")
        section = TrainerSection.model_validate(config.trainer.model_dump(exclude_unset=True) | trainer)
        return learner_settings(config.model_copy(update={"trainer": section}), run)

    with pytest.raises(UserError, match=r"^trainer\.loss: no_module:loss cannot be imported"):
        settings({"loss": "no_module:loss"})
    read = settings({"kl_coefficient": 0.1, "reference": PACKAGED_POLICY}).read_reference
    assert read is not None
    assert read().keys() == load_weights(PACKAGED_POLICY).keys()
    other = settings({"kl_coefficient": 0.1, "reference": write_policy(tmp_path / "other").directory}).read_reference
    assert other is not None
    with pytest.raises(UserError, match=r"^trainer\.reference: "):
        other()
    with pytest.raises(UserError, match=r"^trainer\.reference: the reference of a run of LoRA adapters"):
        settings({"reference": PACKAGED_POLICY, "adapters": tmp_path})
