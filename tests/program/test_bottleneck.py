"""What `grailnode status` says about the trainer's time."""

import json
from pathlib import Path

import pytest

from grailnode.observe.bottleneck import TrainerTime, bottleneck, read_trainer_time
from grailnode.observe.judging_time import unjudged_cases
from grailnode.observe.state import MinerRow, NetworkState, VersionRow


def network(submitted: int, accepted: int, rejected: int, steps: tuple[int, ...] = (1, 2, 3)) -> NetworkState:
    miner = MinerRow("a1" * 32, "miner-1", "unknown", submitted, accepted, {"copied": rejected}, 1.0)
    versions = tuple(VersionRow(version, step, version, 10, None, 1, 100) for version, step in enumerate(steps))
    return NetworkState("ab" * 32, "run", 9.0, 3, None, 6.0, 0.0, 200, versions=versions, miners=(miner,))


@pytest.mark.parametrize(
    ("time", "state", "expected"),
    [
        (TrainerTime(0.86, 0.0), network(100, 90, 10), "waits 86% of its time for verified groups; add miners"),
        (TrainerTime(0.86, 0.0), network(100, 30, 10), "validators judge 40 of 100 groups: add validators"),
        (TrainerTime(0.5, 0.0), network(0, 0, 0), "add miners"),
        (TrainerTime(0.2, 0.0), network(9, 9, 0), "computes 80% of its time"),
        (TrainerTime(0.2, 0.0), network(9, 9, 0, (0, 3, 6)), "a version every 3.0 steps instead of 1"),
        (TrainerTime(0.1, 0.6), network(9, 9, 0), "storage is slower than steps; raise steps_per_version"),
        (TrainerTime(0.1, 0.0), network(9, 9, 0, (0,)), "computes 90% of its time"),
    ],
)
def test_the_line_names_the_bottleneck_and_what_to_add(time: TrainerTime, state: NetworkState, expected: str) -> None:
    line = bottleneck(time, state, steps_per_version=1, audit_share=0.9)
    assert expected in line
    assert "\n" not in line


def test_the_newest_step_in_a_log_counts(tmp_path: Path) -> None:
    assert read_trainer_time(tmp_path) is None
    log = tmp_path / "trainer-training.jsonl"
    log.write_text('{"event": "started"}\n')
    assert read_trainer_time(tmp_path) is None
    steps = [{"event": "step", "data_wait_fraction": share, "io_wait_fraction": 0} for share in (0.9, 0.25)]
    log.write_text("".join(json.dumps(step) + "\n" for step in steps) + '{"event": "st')
    assert read_trainer_time(tmp_path) == TrainerTime(0.25, 0.0)
    log.write_bytes(b"x" * (1 << 17) + log.read_bytes())
    assert read_trainer_time(tmp_path) == TrainerTime(0.25, 0.0)
    log.write_bytes(b"\xff\n[]\n")
    assert read_trainer_time(tmp_path) is None


def test_a_line_says_what_a_validator_had_no_time_for(tmp_path: Path) -> None:
    log = tmp_path / "validator-1.jsonl"
    left = {"left_earning": 0, "left_known": 2, "left_stranger": 1500, "left_rejected": 0}
    log.write_text(json.dumps({"event": "judged", "window": 6, "cases": 9, **left}) + "\n")
    assert unjudged_cases(tmp_path) == (
        "validator-1 judged 9 miners' groups of window 6 and left 2 of known miners, 1,500 of strangers: "
        "add validators, or faster ones",
    )
    newer = {"event": "judged", "window": 7, "cases": 9, **dict.fromkeys(left, 0)}
    log.write_text(log.read_text() + json.dumps(newer) + "\n")
    assert unjudged_cases(tmp_path) == ()
