"""What a tracker shows of the events in a trainer's logs."""

from collections.abc import Mapping
from typing import Any, Final

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


def curves(event: Mapping[str, Any]) -> tuple[int, dict[str, float]] | None:
    """Return the step of an event and its values by the names of their curves; None for an event without any."""
    name = event.get("event")
    if name == "step" and isinstance(event.get("step"), int):
        numbers = {curve: event[field] for field, curve in _STEP.items() if isinstance(event.get(field), int | float)}
        return event["step"], {curve: float(number) for curve, number in numbers.items()}
    if name == "published" and isinstance(event.get("version"), int):
        changed, elements, patch = (event.get(field, 0) for field in ("changed", "elements", "patch_bytes"))
        values = {"version/patch_bytes": float(patch)}
        if patch and elements:
            values["version/sparsity"] = 1.0 - changed / elements
        return event["version"], values
    return None
