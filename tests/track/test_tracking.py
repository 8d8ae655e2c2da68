"""Trackers: TensorBoard's own reader finds what was recorded, and a tracker that fails stops nothing."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio

from grailnode import UserError
from grailnode.config import Config, load
from grailnode.node.process_launch import process_kinds
from grailnode.observe.node_logs import LogFollower
from grailnode.observe.rollout_reader import PublishedRollout
from grailnode.run import workspace
from grailnode.track.tracker import check_tracker, curves, open_tracker, samples, track
from tests.support.builders.recipes import demo_recipe, demo_rules
from tests.support.simulation.network import Network
from tests.support.simulation.virtual_clock import running

STEP = {"event": "step", "step": 3, "reward": 0.5, "loss": -0.25, "entropy": 1.5, "clipped": 0.125, "staleness": 2.0}
PUBLISHED = {"event": "published", "version": 2, "patch_bytes": 100, "changed": 25, "elements": 100}
HOSTILE = "</pre><script>alert(1)</script>\n```\n\x1b[2J"


def scalars(directory: Path) -> dict[str, list[tuple[int, float]]]:
    """Return the curves in event files by TensorBoard's own reader: (step, value) by name."""
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = reader.EventAccumulator(str(directory)).Reload()
    return {name: [(item.step, item.value) for item in events.Scalars(name)] for name in events.Tags()["scalars"]}


def texts(directory: Path, name: str) -> list[str]:
    """Return the texts of a name in event files."""
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = reader.EventAccumulator(str(directory)).Reload()
    return [item.tensor_proto.string_val[0].decode() for item in events.Tensors(f"{name}/text_summary")]


def test_tensorboard_reads_curves_and_samples(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    tracker = open_tracker("tensorboard", "run", tmp_path / "events")
    for step in (1, 2):
        tracker.scalars(step, {"step/reward": step / 4, "step/loss": -step})
    tracker.samples(7, [PublishedRollout(b"\xab" * 32, 7, 0, 0, 1, "1+1=", HOSTILE, 3, 0.5, (), 1, 1)])
    tracker.close()
    assert scalars(tmp_path / "events") == {"step/reward": [(1, 0.25), (2, 0.5)], "step/loss": [(1, -1.0), (2, -2.0)]}
    (text,) = texts(tmp_path / "events", "samples")
    assert "abababababababab/7/0, reward 0.5, accepted by 1" in text
    assert all(line.startswith("    ") for line in text.splitlines() if "script" in line or "```" in line)
    assert "\x1b" not in text


def test_curves_of_the_trainers_events() -> None:
    values = {"reward": 0.5, "loss": -0.25, "entropy": 1.5, "clip_fraction": 0.125, "staleness": 2.0}
    assert curves(STEP) == (3, {f"step/{name}": value for name, value in values.items()})
    assert curves(PUBLISHED) == (2, {"version/patch_bytes": 100.0, "version/sparsity": 0.75})
    assert curves({"event": "published", "version": 0}) == (0, {"version/patch_bytes": 0.0})
    assert curves({"event": "started"}) is None
    assert curves({"event": "step", "step": "3"}) is None


def test_a_log_is_read_from_its_end_line_by_line(tmp_path: Path) -> None:
    log, missing = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    log.write_text('{"event": "old"}\n')
    follower = LogFollower([log, missing])
    with log.open("a") as file:
        file.write('{"event": "one"}\nnot JSON\n[1]\n{"event": "t')
    assert list(follower.read()) == [{"event": "one"}]
    with log.open("a") as file:
        file.write('wo"}\n')
    missing.write_text('{"event": "three"}\n')
    assert list(follower.read()) == [{"event": "two"}, {"event": "three"}]
    log.write_text('{"event": "new"}\n')
    assert list(follower.read()) == [{"event": "new"}]
    assert list(LogFollower([log], from_start=True).read()) == [{"event": "new"}]


async def track_until(config: Config, has_happened: Callable[[Network], Any]) -> Network:
    """Feed a tracker from the logs of a trainer until something has happened."""
    network = Network(demo_rules())
    node = network.node("trainer")
    async with running(track, node, config, network.policy.tokenizer):
        with trio.fail_after(300):
            while not has_happened(network):
                await trio.sleep(0.05)
    return network


@pytest.fixture
def config(tmp_path: Path) -> Config:
    run = workspace.create(tmp_path, demo_recipe())
    return load(run.config, ['trainer.track="tensorboard"'])


def test_the_tracking_process_feeds_tensorboard(config: Config, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    log = tmp_path / "logs" / "trainer-training.jsonl"
    log.parent.mkdir(exist_ok=True)

    def has_happened(network: Network) -> bool:
        if network.events("trainer", "tracking"):
            with log.open("a") as file:
                file.write(json.dumps(STEP) + "\n")
        return bool(list(log.parent.glob("tensorboard/*"))) and "step/reward" in scalars(log.parent / "tensorboard")

    trio.run(track_until, config, has_happened)
    assert scalars(log.parent / "tensorboard")["step/clip_fraction"][0] == (3, 0.125)


def test_a_tracker_that_fails_is_one_event_and_stops_nothing(config: Config, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    (tmp_path / "logs").mkdir(exist_ok=True)
    (tmp_path / "logs" / "tensorboard").write_text("a file where the tracker wants a directory")
    network = trio.run(track_until, config, lambda network: network.events("trainer", "tracker-failed"))
    (event,) = network.events("trainer", "tracker-failed")
    assert "\n" not in event["error"]


def test_a_trainer_with_a_tracker_has_a_process_for_it(config: Config, tmp_path: Path) -> None:
    assert process_kinds(config, "trainer")[-1] == "tracking"
    assert "tracking" not in process_kinds(load(tmp_path), "trainer")
    assert "tracking" not in process_kinds(config, "validator")


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "trackio"])
def test_a_package_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch, name: Any) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard" if name == "tensorboard" else name, None)
    with pytest.raises(UserError, match=rf"^trainer\.track: {name} is not installed here .*'grailnode\[{name}\]'"):
        check_tracker(name)


def test_a_table_has_the_best_and_the_worst_rollouts() -> None:
    rollouts = [
        PublishedRollout(b"k" * 32, 1, group, 0, 1, "1+1=", "x" * 5000, 3, group / 10, (), 1, 1) for group in range(20)
    ]
    rows = samples(rollouts)
    assert [row.reward for row in rows] == pytest.approx([1.9, 1.8, 1.7, 1.6, 0.3, 0.2, 0.1, 0.0])
    assert all(len(row.completion) == 4000 for row in rows)
    assert len(samples(rollouts[:5])) == 5
