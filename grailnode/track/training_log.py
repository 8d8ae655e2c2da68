"""Follows the logs of a trainer's processes, and says what a tracker shows of their events."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

_MAX_BYTES: Final = 1 << 20  # read of one log at a time
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


class LogFollower:
    """The events that are written from now on."""

    def __init__(self, paths: Sequence[Path], *, from_start: bool = False) -> None:
        self._offsets = {path: 0 if from_start or not path.exists() else path.stat().st_size for path in paths}

    def read(self) -> Iterator[Mapping[str, Any]]:
        """Yield the events whose lines are complete, log by log."""
        for path, offset in self._offsets.items():
            if not path.exists():
                continue
            with path.open("rb") as file:
                begin = offset if path.stat().st_size >= offset else 0  # somebody may have emptied it
                file.seek(begin)
                data = file.read(_MAX_BYTES)
            end = data.rfind(b"\n") + 1 or (len(data) if len(data) == _MAX_BYTES else 0)
            self._offsets[path] = begin + end
            for line in data[:end].splitlines():
                try:
                    event = json.loads(line)
                except ValueError:
                    continue  # the end of a line that a killed process began
                if isinstance(event, dict):
                    yield event


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
