"""The trackers behind one small interface, each of which needs a package that is an extra of this one; and the process
that feeds one. It reads the trainer's logs and the run's public rollouts, so a tracker that is slow, full or broken
costs the trainer nothing.
"""

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import trio

from grailnode import UserError
from grailnode.config import Config, TrackerName
from grailnode.engine.policy import Tokenizer
from grailnode.observe.node_logs import LogFollower
from grailnode.observe.observer import newest_summarized
from grailnode.observe.rollout_reader import PublishedRollout, find_miners, read_rollouts
from protocol.errors import ProtocolError
from roles.node.identity import Node
from roles.ports import StoreError

_POLL_SECONDS: Final = 1.0
_SAMPLE_SECONDS: Final = 60.0
_SAMPLES: Final = 4  # best rollouts of a table, and as many of the worst
_LOGS: Final = ("training", "upload")
_MAX_CHARACTERS: Final = 4000  # of a prompt or a completion in a table

_MODULES: Final[Mapping[TrackerName, str]] = {
    "tensorboard": "torch.utils.tensorboard",
    "wandb": "wandb",
    "trackio": "trackio",
}
_STEP: Final = {  # field of the event 'step': name of the curve
    "reward": "step/reward",
    "loss": "step/loss",
    "entropy": "step/entropy",
    "clipped": "step/clip_fraction",
    "grad_norm": "step/grad_norm",
    "divergence": "step/divergence",
    "overlong": "step/overlong",
    "learning_rate": "step/learning_rate",
    "length": "step/completion_tokens",
    "staleness": "step/staleness",
    "buffered": "step/groups_in_buffer",
    "data_wait_fraction": "step/wait_for_data",
    "io_wait_fraction": "step/wait_for_hand_over",
}


class TensorBoard:
    """Writes event files into a directory, which it creates."""

    def __init__(self, module: ModuleType, directory: Path) -> None:
        self._writer: Any = module.SummaryWriter(str(directory))

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def samples(self, step: int, rows: Sequence[PublishedRollout]) -> None:
        """Record rollouts as a text in Markdown, with the words of strangers as code."""
        parts = [
            f"{row.place}, reward {row.reward:g}, {row.status}\n\n{_as_code(row.prompt)}\n\n{_as_code(row.completion)}"
            for row in rows
        ]
        self._writer.add_text("samples", "\n\n".join(parts), step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class ExperimentRun:
    """A run of Weights & Biases or of Trackio, which has the same interface."""

    def __init__(self, module: ModuleType, name: str, directory: Path) -> None:
        self._module = module
        directory.mkdir(parents=True, exist_ok=True)
        options = {"dir": str(directory), "resume": "allow"} if module.__name__ == "wandb" else {}
        self._run: Any = module.init(project="grailnode", name=name, **options)

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Record values by name; the step is a value of its own, as versions and windows come between steps."""
        axis = next(iter(values)).partition("/")[0]
        self._run.log({f"{axis}/number": step, **values})

    def samples(self, step: int, rows: Sequence[PublishedRollout]) -> None:
        columns = ["place", "prompt", "completion", "reward", "status"]
        data = [[getattr(row, column) for column in columns] for row in rows]
        if self._module.__name__ == "wandb":
            table = self._module.Table(columns=columns, data=data)
        else:
            pandas = importlib.import_module("pandas")  # which trackio needs itself
            table = self._module.Table(dataframe=pandas.DataFrame(data, columns=columns))
        self._run.log({"samples/number": step, "samples": table})

    def close(self) -> None:
        self._run.finish()


Tracker = TensorBoard | ExperimentRun
"""Takes numbers and samples. Whatever its package raises comes through: the caller goes on without it."""


def check_tracker(name: TrackerName) -> ModuleType:
    """Return the module of a tracker; UserError if its package is not installed."""
    try:
        return importlib.import_module(_MODULES[name])
    except ImportError as error:
        raise UserError(
            f"trainer.track: {name} is not installed here ({error}); pip install 'grailnode[{name}]', or leave the key "
            "out"
        ) from error


def open_tracker(name: TrackerName, run: str, directory: Path) -> Tracker:
    """Open a tracker, which shows the run under this name."""
    module = check_tracker(name)
    return TensorBoard(module, directory) if name == "tensorboard" else ExperimentRun(module, run, directory)


def _as_code(text: str) -> str:
    """Return a text as a block of code in Markdown, which no text can end."""
    lines = "".join(character if character.isprintable() or character == "\n" else " " for character in text)
    return "\n".join(f"    {line}" for line in lines.split("\n"))


def curves(event: Mapping[str, Any]) -> tuple[int, dict[str, float]] | None:
    """Return the step of an event and its values by the names of their curves; None for an event without any."""
    name = event.get("event")
    if name == "step" and isinstance(event.get("step"), int):
        fields = {field: curve for field, curve in _STEP.items() if isinstance(event.get(field), int | float)}
        return event["step"], {curve: float(event[field]) for field, curve in fields.items()}
    if name == "published" and isinstance(event.get("version"), int):
        changed, elements, patch = (event.get(field, 0) for field in ("changed", "elements", "patch_bytes"))
        values = {"version/patch_bytes": float(patch)}
        if patch and elements:
            values["version/sparsity"] = 1.0 - changed / elements
        return event["version"], values
    return None


async def track(node: Node, config: Config, tokenizer: Tokenizer) -> None:
    """Feed the tracker until cancelled. When it fails, one event says so, and nothing is tracked until a new start."""
    assert config.trainer.track is not None
    logs = config.at(config.node.logs)
    directory = logs / config.trainer.track
    name = f"{node.run.name} {node.run_id.hex()[:8]}"
    follower = LogFollower([logs / f"{node.name}-{process}.jsonl" for process in _LOGS])
    try:
        tracker = await trio.to_thread.run_sync(open_tracker, config.trainer.track, name, directory)
        node.telemetry.event("tracking", tracker=config.trainer.track, directory=str(directory))
        try:
            window, next_samples = -1, trio.current_time() + _POLL_SECONDS
            while True:
                for event in follower.read():
                    curve = curves(event)
                    if curve is not None:
                        await trio.to_thread.run_sync(tracker.scalars, *curve)
                if trio.current_time() >= next_samples:
                    window = await _track_samples(node, tokenizer, tracker, window)
                    next_samples = trio.current_time() + _SAMPLE_SECONDS
                await trio.sleep(_POLL_SECONDS)
        finally:
            with trio.CancelScope(shield=True):
                await trio.to_thread.run_sync(tracker.close)
    except Exception as error:  # noqa: BLE001 - a tracker is foreign code, and no reason to stop a trainer
        first_line = (str(error).splitlines() or [""])[0][:300]
        node.telemetry.event("tracker-failed", error=f"{type(error).__name__}: {first_line}")
    await trio.sleep_forever()


async def _track_samples(node: Node, tokenizer: Tokenizer, tracker: Tracker, last_window: int) -> int:
    """Record rollouts of the newest judged window if it is a new one; return the newest window recorded."""
    try:
        window = await newest_summarized(node)
        if window is None or window <= last_window:
            return last_window
        rollouts = (await read_rollouts(node, tokenizer, window, await find_miners(node))).rollouts
    except (StoreError, ProtocolError):
        return last_window  # the next turn reads a newer one
    rows = samples(rollouts)
    if rows:
        await trio.to_thread.run_sync(partial(tracker.samples, window, rows))
    return window


def samples(rollouts: Sequence[PublishedRollout]) -> list[PublishedRollout]:
    """Return the best and the worst rollouts of a window, the best first, with the beginnings of their texts."""
    ordered = sorted(rollouts, key=lambda rollout: -rollout.reward)
    extremes = ordered if len(ordered) <= 2 * _SAMPLES else ordered[:_SAMPLES] + ordered[-_SAMPLES:]
    most = slice(_MAX_CHARACTERS)
    return [replace(item, prompt=item.prompt[most], completion=item.completion[most]) for item in extremes]
