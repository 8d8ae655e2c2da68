"""run.toml: what is accepted, and the messages about what is not."""

from pathlib import Path

import pytest

from grailnode.config import ConfigError, EngineSection, TrainerSection, load
from grailnode.node.settings import trainer_settings
from grailnode.run import workspace
from protocol.rollout.sampling import SamplingParams
from roles.miner.miner_settings import MinerSettings
from tests.support.builders.recipes import demo_recipe

SAMPLING = SamplingParams(1.0, 8, (1,))


def test_the_file_of_init_is_complete_and_true(run_toml: Path):
    config = load(run_toml)
    assert config.at(config.run.manifest).is_file()
    assert config.trainer == TrainerSection()
    assert config.miner == MinerSettings()
    assert config.engine == EngineSection()


def test_every_key_can_be_overridden_on_the_command_line(run_toml: Path):
    overrides = ["miner.groups=3", "trainer.learning_rate=2e-6", "store.path=elsewhere", "engine.device=cuda"]
    config = load(run_toml, overrides)
    assert config.miner.groups == 3
    assert trainer_settings(config, SAMPLING).learner.optimizer.learning_rate == 2e-6
    assert config.at(config.store.path) == run_toml.parent / "elsewhere"
    assert config.engine.device == "cuda"


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
        ("[trainer]\ngpus = 1\noptimizer = 'muon'\nhosts.meeting = 'a:1'\n", "trainer: 2 processes need optimizer"),
        ("[engine]\ndtype = 'int4'\n", "engine.dtype: input should be 'float32' or 'bfloat16'"),
        ("[engine]\nflags = ['--pipeline-parallel-size', '2']\n", "engine.flags: --pipeline-parallel-size 2: pipeline"),
        ("[engine]\nflags = ['--pipeline_parallel_size=2']\n", "engine.flags: --pipeline-parallel-size 2: pipeline"),
        ("[engine]\nflags = ['-pp', '4']\n", "engine.flags: --pipeline-parallel-size 4: pipeline"),
        ("[engine]\nflags = ['--pipeline-par', '4']\n", "one GPU has only some layers; drop it, and set engine.ranks"),
        ("[engine]\nflags = ['--data-parallel-size', '2']\n", "engine.flags: --data-parallel-size 2: data parallelism"),
        ("[engine]\nflags = ['-dp=2']\n", "set engine.replicas instead"),
        ("miner = 3\n", "miner: is a section: write [miner], and its keys below it"),
        ("[beacon]\nrelays = 'https://a.example'\n", "beacon.relays: a list is needed: write [ ] around it"),
        ("not toml", "not TOML"),
        ("[store.meeting]\npth = 'x'\n", "unknown key store.meeting.pth; known here: addressing, attempts"),
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
    with pytest.raises(ConfigError) as error_info:
        load(file)
    line = str(error_info.value)
    assert message in line
    assert str(file) in line
    assert len(line.splitlines()) == 1


@pytest.mark.parametrize(
    "flags", [(), ("--pipeline-parallel-size", "1"), ("-dp=1",), ("--data-parallel-backend", "mp")]
)
def test_other_flags_of_vllm_are_taken_as_they_are(run_toml: Path, flags: tuple[str, ...]):
    assert load(run_toml, [f"engine.flags={list(flags)}"]).engine.flags == flags


def test_the_keys_of_the_meeting_point_are_not_those_of_the_store(tmp_path: Path):
    (tmp_path / "run.toml").write_text("[store.meeting]\npth = 'x'\n")
    with pytest.raises(ConfigError) as error_info:
        load(tmp_path)
    assert "peers" not in str(error_info.value)


@pytest.mark.parametrize("override", ["miner", "miner.groups", "=3", "miner.=3", "groups=3"])
def test_a_wrong_override_says_how_to_write_one(run_toml: Path, override: str):
    with pytest.raises(ConfigError, match=r"write --set section\.key=value"):
        load(run_toml, [override])


def test_a_missing_file_says_how_to_get_one(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"no such file; `grailnode init DIR` writes one"):
        load(tmp_path / "run.toml")


def test_the_directory_of_a_run_may_be_given_for_its_file(run_toml: Path):
    assert load(run_toml.parent) == load(run_toml)


def test_a_run_is_never_created_over_another(run_toml: Path):
    with pytest.raises(workspace.WorkspaceError, match="there is a run already"):
        workspace.create(run_toml.parent, demo_recipe())


def test_the_same_seed_gives_the_same_keys_and_no_seed_gives_new_ones(tmp_path: Path):
    runs = [
        workspace.create(tmp_path / name, demo_recipe(), seed=seed, begin=1e9)
        for name, seed in (("a", 1), ("b", 1), ("c", 2), ("d", None), ("e", None))
    ]
    assert runs[0].keys == runs[1].keys
    assert runs[0].run_id == runs[1].run_id
    assert len({run.keys["trainer"] for run in runs}) == 4
