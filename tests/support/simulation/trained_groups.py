"""What a trainer has trained on, from the events of its training process."""

from collections.abc import Sequence
from typing import Any


def trained_groups(events: Sequence[tuple[str, dict[str, Any]]]) -> list[str]:
    """Return the groups of the steps in the newest masters, without the steps that crashes have undone.

    Args:
        events: names and fields, in order.
    """
    steps: list[list[str]] = []
    for event, fields in events:
        if event == "started":
            steps = []
        elif event == "resumed":
            del steps[fields["step"] :]
        elif event == "step":
            steps.append(fields["groups"].split(","))
    return [group for step in steps for group in step]
