"""`grailnode init`: the title of a run, its beacon, its validators, and who is told to start."""

import json
import shutil
import time
import tomllib
from pathlib import Path

import pytest

from grailnode import UserError
from grailnode.config import TrainerSection, load
from grailnode.engine.policy import PACKAGED_POLICY
from grailnode.node.run_model import coordinator_settings, site_settings
from grailnode.node.stores import Storage
from grailnode.node.telemetry import NodeTelemetry
from grailnode.run import workspace
from grailnode.run.creation import open_run
from protocol.beacon import quicknet
from protocol.identity.signing import SigningKey
from protocol.run import RunManifest
from tests.support.builders.recipes import demo_recipe, demo_rules
from tests.support.processes.command_line import fail, run_command, succeed

STRANGER = SigningKey(b"s" * 32).public.hex()
OTHER = SigningKey(b"o" * 32).public.hex()


def rules(directory: Path) -> RunManifest:
    return open_run((directory / "run.manifest").read_bytes()).record


class TestPublicBeacon:
    def test_the_chain_is_pinned_and_windows_are_counted_in_its_rounds(self, tmp_path: Path):
        before = time.time()
        succeed("init", str(tmp_path), "--beacon", "quicknet")
        run = rules(tmp_path)
        assert run.beacon == quicknet
        schedule = run.schedule
        assert (schedule.rounds, schedule.commit_rounds, schedule.audit_rounds) == (20, 12, 15)  # a minute
        assert (schedule.seal_rounds, schedule.verdict_rounds) == (40, 60)
        assert before < run.opening_time(0) <= time.time() + 3  # window 0 opens with the next round
        assert not (tmp_path / "keys" / "beacon.key").exists()
        section = tomllib.loads((tmp_path / "run.toml").read_text())["beacon"]
        assert (section["key"], len(section["relays"]) >= 3) == ("", True)

    def test_a_member_knows_its_relays_and_may_name_others(self, tmp_path: Path):
        config = workspace.create(tmp_path, demo_recipe(beacon="quicknet")).config
        text = config.read_text()
        config.write_text(text[: text.index("relays = [")] + text[text.index("]\n", text.index("relays = [")) + 2 :])

        def names(*overrides: str, chain: bytes = quicknet.chain_hash) -> list[str]:
            storage = Storage(load(config, overrides), NodeTelemetry("test"))
            return [relay.name for relay in storage.relays(chain)]

        assert len(names()) >= 3
        assert len({name.split("/")[2] for name in names()}) == len(names())
        own = ["https://relay.example.org", "http://127.0.0.1:9"]
        assert names(f"beacon.relays={json.dumps(own)}") == own
        assert names(chain=bytes(32)) == []  # a run's own: its store has the rounds
        for wrong in ("http://api.drand.sh", "api.drand.sh"):
            with pytest.raises(UserError, match=r"beacon\.relays"):
                names(f'beacon.relays=["{wrong}"]')

    def test_a_window_shorter_than_three_rounds_is_refused_in_one_line(self, tmp_path: Path):
        error = fail("init", str(tmp_path), "--beacon", "quicknet", "--window", "5")
        assert error == "grailnode: a window is at least 3 rounds, 9 s here; raise --window\n"
        assert not list(tmp_path.iterdir())

    @pytest.mark.parametrize("rounds", [3, 4, 5, 7, 8, 20, 1200])
    def test_a_schedule_keeps_its_order_and_its_proportions(self, rounds: int):
        scaled = demo_rules().in_rounds(rounds)
        moments = (scaled.commit_rounds, scaled.audit_rounds, scaled.seal_rounds, scaled.verdict_rounds)
        assert list(moments) == sorted(set(moments))
        assert scaled.audit_rounds <= rounds
        for ours, theirs in zip(moments, (5, 6, 16, 24), strict=True):
            assert abs(ours / rounds - theirs / 8) <= 1 / rounds


class TestValidators:
    def test_keys_of_others_are_named_and_not_created(self, tmp_path: Path):
        succeed("init", str(tmp_path), "--validator", STRANGER, "--validator", OTHER, "--quorum", "3")
        own = SigningKey(bytes.fromhex((tmp_path / "keys" / "validator.key").read_text())).public
        assert rules(tmp_path).authority.validators == (own, bytes.fromhex(STRANGER), bytes.fromhex(OTHER))
        assert rules(tmp_path).authority.quorum == 3
        assert {file.name for file in (tmp_path / "keys").glob("validator*")} == {"validator.key"}

    def test_each_whose_key_is_here_has_a_start_command(self, tmp_path: Path):
        result = run_command("init", str(tmp_path), "--validators", "2", "--quorum", "2")
        starts = [line.strip() for line in result.stdout.splitlines() if "--role validator" in line]
        assert [start.partition("run.toml")[2] for start in starts] == ["", " --name validator-2"]
        assert all(start in (tmp_path / "run.toml").read_text() for start in starts)

    def test_all_of_them_may_be_somebody_elses(self, tmp_path: Path):
        output = succeed("init", str(tmp_path), "--validators", "0", "--validator", STRANGER)
        assert rules(tmp_path).authority.validators == (bytes.fromhex(STRANGER),)
        assert "--role validator" not in output
        assert STRANGER in output

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (("--validator", "no key"), "--validator no key: not a public key"),
            (("--validator", STRANGER[:-2]), "not a public key"),
            (("--validator", "00" * 32), "not a public key"),  # of small order
            (("--validator", STRANGER, "--validator", STRANGER), "named twice"),
            (("--validators", "0"), "without validators"),
            (("--validator", STRANGER, "--quorum", "3"), "3 of 2 validators can never accept"),
            (("--roots", "2", "--threshold", "3"), "3 of 2 root keys can never sign"),
        ],
    )
    def test_an_impossible_set_of_keys_is_refused(self, tmp_path: Path, arguments: tuple[str, ...], message: str):
        assert message in fail("init", str(tmp_path), *arguments)
        assert not list(tmp_path.iterdir())

    def test_a_member_keeps_a_key_that_it_has(self, tmp_path: Path):
        public = succeed("keys", "new", str(tmp_path / "keys" / "validator-2.key")).split()[-1]
        judge = ("--bucket", "judge", "--url", "https://judge.example.org", "--name", "validator-2")
        joining = ("--join", f"https://founder.example.org/runs/{'0' * 64}", "--meeting", "founder")
        assert f"validator-2 is {public}" in succeed("init", str(tmp_path), *judge, *joining)


class TestSites:
    def test_their_keys_are_workers_and_they_share_the_groups_of_a_window(self, tmp_path: Path):
        output = succeed("init", str(tmp_path), "--trainers", "2", "--window", "10")
        seeds = [(tmp_path / "keys" / f"worker-{number}.key").read_text() for number in (1, 2)]
        keys = sorted(SigningKey(bytes.fromhex(seed)).public for seed in seeds)
        assert rules(tmp_path).authority.workers == tuple(keys)
        starts = [line.strip() for line in output.splitlines() if "--role worker" in line]
        assert [start.partition("run.toml")[2] for start in starts] == ["", " --name worker-2"]
        config = load(tmp_path)
        assert config.trainer.groups_per_step == TrainerSection().groups_per_step // 2
        assert config.trainer.learning_rate == 2e-6
        settings = coordinator_settings(config, rules(tmp_path))
        assert settings.beacon_rounds == 2 * rules(tmp_path).schedule.rounds
        assert settings.rules.values == "grid"
        assert (settings.rules.local_steps, settings.rules.quorum) == (4, 1)
        site = site_settings(config, rules(tmp_path))
        assert site.upload_seconds == 4.0  # a fifth of a round
        assert settings.poll_seconds == site.poll_seconds == 0.5  # a fortieth

    def test_a_recipe_may_set_their_rules(self, tmp_path: Path):
        recipe = tmp_path / "recipe.toml"
        recipe.write_text('[trainer.outer]\nmethod = "sparseloco"\nchosen = 64\nlocal_steps = 15\nouter_rate = 0.8\n')
        succeed("init", str(tmp_path / "run"), "--trainers", "3", "--recipe", str(recipe))
        round_rules = coordinator_settings(load(tmp_path / "run"), rules(tmp_path / "run")).rules
        assert (round_rules.values, round_rules.chosen, round_rules.fraction) == ("chunked", 64, 0)
        assert (round_rules.momentum, round_rules.outer_rate, round_rules.local_steps) == (0.0, 0.8, 15)
        assert load(tmp_path / "run").trainer.outer.round_windows == 2  # type: ignore[union-attr]
        error = fail("init", str(tmp_path / "other"), "--recipe", str(recipe))
        assert "is for several sites; say how many with --trainers" in error
        assert not (tmp_path / "other").exists()

    def test_a_trainer_alone_has_neither_workers_nor_rounds(self, tmp_path: Path):
        run_command("init", str(tmp_path))
        assert rules(tmp_path).authority.workers == ()
        assert "outer" not in (tmp_path / "run.toml").read_text()
        with pytest.raises(UserError, match=r"trainer\.outer: missing"):
            coordinator_settings(load(tmp_path), rules(tmp_path))


@pytest.mark.parametrize(("admission", "miners"), [("open", 2), ("invite", 0), ("allowlist", 0)])
def test_no_miner_is_created_where_miners_must_be_admitted(tmp_path: Path, admission: str, miners: int):
    output = succeed("init", str(tmp_path), "--admission", admission)
    assert output.count("--role miner") == (tmp_path / "run.toml").read_text().count("--role miner") == miners
    assert ("`grailnode admit PUBLICKEY`" in output) == (not miners)
    assert len(list((tmp_path / "keys").glob("miner*"))) == miners


class TestTitle:
    def test_it_is_the_directorys_name(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        assert run_command("init", str(tmp_path / "my-run")).returncode == 0
        assert rules(tmp_path / "my-run").name == "my-run"
        (tmp_path / "other\n run").mkdir()
        monkeypatch.chdir(tmp_path / "other\n run")
        assert run_command("init", ".").returncode == 0
        assert rules(Path()).name == "other run"
        assert load(Path()).at("keys").is_dir()

    @pytest.mark.parametrize("title", ["a" * 65, "two\nlines"])
    def test_it_is_a_short_line(self, tmp_path: Path, title: str):
        result = run_command("init", str(tmp_path), "--title", title)
        assert (result.returncode, len(result.stderr.splitlines())) == (1, 1)
        assert result.stderr.startswith("grailnode: init: title: give 1 to 64 printable characters")


class TestRunToml:
    def test_values_are_quoted(self, tmp_path: Path):
        directory = tmp_path / 'it\'s "here"'
        shutil.copytree(PACKAGED_POLICY, directory)
        assert run_command("init", str(tmp_path / "run"), "--policy", str(directory)).returncode == 0
        assert load(tmp_path / "run").trainer.policy == str(directory)

    def test_each_key_stands_below_its_description(self, tmp_path: Path):
        assert run_command("init", str(tmp_path / "local")).returncode == 0
        assert run_command("init", str(tmp_path / "bucket"), "--bucket", "mine", "--beacon", "quicknet").returncode == 0
        local, bucket = ((tmp_path / name / "run.toml").read_text() for name in ("local", "bucket"))
        for lines in (
            '# The signed rules that all nodes share: a file or a URL.\nmanifest = "run.manifest"\n',
            "# Steps over which the learning rate rises to its peak.\nwarmup_steps = 10\n",
            "# Groups to aim for in a window, at most what the run allows.\ngroups = 16\n",
        ):
            assert lines in local
            assert lines in bucket
        assert 'read.\nurl = "https://mine.s3.us-east-1.amazonaws.com"\n' in bucket
        assert "[store.meeting]\n# Where participants announce themselves." in bucket
        for text in (local, bucket):
            assert not [line for line in text.splitlines() if line.startswith(("data =", "endpoint =", "prefix ="))]
