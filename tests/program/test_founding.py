"""What `grailnode init` founds: whose beacon a run listens to, and who judges in it."""

import time
import tomllib
from pathlib import Path

import pytest

from grailnode.cli.init import ValidatorSet, init_run
from grailnode.config import load
from grailnode.node.stores import Storage
from grailnode.node.telemetry import NodeTelemetry
from grailnode.run import workspace
from grailnode.run.creation import Choices, open_run
from protocol.beacon import quicknet
from protocol.identity.signing import SigningKey
from protocol.run import RunManifest
from tests.support.command_line import run_command

STRANGER = SigningKey(b"s" * 32).public.hex()
OTHER = SigningKey(b"o" * 32).public.hex()


def rules(directory: Path) -> RunManifest:
    return open_run((directory / "run.manifest").read_bytes()).record


class TestPublicBeacon:
    def test_the_chain_is_pinned_and_windows_are_counted_in_its_rounds(self, tmp_path: Path):
        before = time.time()
        done = run_command("init", str(tmp_path), "--beacon", "quicknet")
        assert done.returncode == 0, done.stderr
        run = rules(tmp_path)
        assert run.beacon == quicknet
        schedule = run.schedule
        assert (schedule.rounds, schedule.commit_rounds, schedule.audit_rounds) == (20, 12, 15)  # a minute
        assert (schedule.seal_rounds, schedule.verdict_rounds) == (40, 60)
        assert before < run.opening_time(0) <= time.time() + 3  # window 0 opens with the next round

    def test_nobody_runs_it_and_nobody_holds_a_key_of_it(self, tmp_path: Path):
        init_run(tmp_path, None, None, "addition", None, None, beacon="quicknet")
        assert not (tmp_path / "keys" / "beacon.key").exists()
        section = tomllib.loads((tmp_path / "run.toml").read_text())["beacon"]
        assert section["key"] == ""
        assert len(section["relays"]) >= 3

    def test_who_joins_knows_its_relays_and_may_name_others(self, tmp_path: Path):
        made = workspace.create(tmp_path, Choices().in_rounds(20), workspace.Pace(), beacon=quicknet)
        text = made.config.read_text()
        made.config.write_text(
            text[: text.index("relays = [")] + text[text.index("]\n", text.index("relays = [")) + 2 :]
        )

        def names(*overrides: str, chain: bytes = quicknet.chain_hash) -> list[str]:
            storage = Storage(load(made.config, overrides), NodeTelemetry("test"))
            return [relay.name for relay in storage.relays(chain)]

        assert len(names()) >= 3
        assert len({name.split("/")[2] for name in names()}) == len(names())
        assert names('beacon.relays=["https://relay.example.org"]') == ["https://relay.example.org"]
        assert names(chain=bytes(32)) == []  # a run's own: its store has the rounds

    def test_a_window_shorter_than_three_rounds_is_refused_in_one_line(self, tmp_path: Path):
        done = run_command("init", str(tmp_path), "--beacon", "quicknet", "--window", "5")
        assert done.returncode == 1
        assert done.stderr == "grailnode: a window is at least 3 rounds, 9 s here; raise --window\n"
        assert not list(tmp_path.iterdir())

    @pytest.mark.parametrize("rounds", [3, 4, 5, 7, 8, 20, 1200])
    def test_a_schedule_keeps_its_order_and_its_proportions(self, rounds: int):
        scaled = Choices().in_rounds(rounds)
        moments = (scaled.commit_rounds, scaled.audit_rounds, scaled.seal_rounds, scaled.verdict_rounds)
        assert list(moments) == sorted(set(moments))
        assert scaled.audit_rounds <= rounds
        for ours, theirs in zip(moments, (5, 6, 16, 24), strict=True):
            assert abs(ours / rounds - theirs / 8) <= 1 / rounds


class TestJudges:
    def test_keys_that_others_hold_are_named_and_not_made(self, tmp_path: Path):
        done = run_command("init", str(tmp_path), "--validator", STRANGER, "--validator", OTHER, "--quorum", "3")
        assert done.returncode == 0, done.stderr
        own = SigningKey(bytes.fromhex((tmp_path / "keys" / "validator.key").read_text())).public
        assert rules(tmp_path).authority.validators == (own, bytes.fromhex(STRANGER), bytes.fromhex(OTHER))
        assert rules(tmp_path).authority.quorum == 3
        assert {file.name for file in (tmp_path / "keys").glob("validator*")} == {"validator.key"}

    def test_each_whose_key_is_here_is_started_by_its_name(self, tmp_path: Path):
        done = run_command("init", str(tmp_path), "--validators", "2", "--quorum", "2")
        starts = [line.strip() for line in done.stdout.splitlines() if "--role validator" in line]
        assert [start.partition("run.toml")[2] for start in starts] == ["", " --name validator-2"]
        assert all(start in (tmp_path / "run.toml").read_text() for start in starts)

    def test_all_of_them_may_be_others(self, tmp_path: Path):
        done = run_command("init", str(tmp_path), "--validators", "0", "--validator", STRANGER)
        assert done.returncode == 0, done.stderr
        assert rules(tmp_path).authority.validators == (bytes.fromhex(STRANGER),)
        assert "--role validator" not in done.stdout
        assert STRANGER in done.stdout

    @pytest.mark.parametrize(
        ("made", "named", "says"),
        [
            (1, ["no key"], "not a public key"),
            (1, [STRANGER[:-2]], "not a public key"),
            (1, ["00" * 32], "not a public key"),  # of small order
            (1, [STRANGER, STRANGER], "named twice"),
            (0, [], "without validators"),
        ],
    )
    def test_what_cannot_judge_is_refused(self, made: int, named: list[str], says: str):
        with pytest.raises(workspace.WorkspaceError, match=says):
            ValidatorSet.parse(made, named, 1)

    def test_a_quorum_that_cannot_be_reached_is_refused(self, tmp_path: Path):
        with pytest.raises(workspace.WorkspaceError, match="3 of 2 validators can never accept"):
            init_run(tmp_path, None, None, "addition", None, None, judges=ValidatorSet.parse(1, [STRANGER], 3))

    def test_who_joins_with_a_key_made_before_keeps_it(self, tmp_path: Path):
        made = run_command("keys", "new", str(tmp_path / "keys" / "validator-2.key"))
        public = made.stdout.split()[-1]
        joined = run_command(
            *(
                "init",
                str(tmp_path),
                "--bucket",
                "judge",
                "--url",
                "https://judge.example.org",
                "--name",
                "validator-2",
            ),
            *("--join", f"https://founder.example.org/runs/{'0' * 64}", "--meeting", "founder"),
        )
        assert joined.returncode == 0, joined.stderr
        assert f"validator-2 is {public}" in joined.stdout
