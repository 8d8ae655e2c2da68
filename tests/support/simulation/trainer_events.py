"""What a trainer's events say: which judgements of a window do not count, and what it has trained on."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from math import inf
from typing import Any

NOT_SEALED = "not sealed in time"


class Exclusions:
    """The exclusions that the download process has logged.

    Args:
        excluded: its events `validator-excluded`; sealed_again: its events `validator-sealed-again`, in their order.
    """

    def __init__(self, excluded: Iterable[Mapping[str, Any]], sealed_again: Iterable[Mapping[str, Any]]) -> None:
        self._reasons = {(event["window"], event["validator"]): str(event["error"]) for event in excluded}
        self._returns: defaultdict[str, set[int]] = defaultdict(set)
        for event in sealed_again:
            self._returns[event["validator"]].add(event["window"])

    def reason(self, window: int, validator: str) -> str:
        """Return why the judgements of a validator (8 hexadecimal digits) do not count, or ''.

        The first window of an absence stands for the windows up to the one that the validator seals again.
        """
        if (window, validator) in self._reasons:
            return self._reasons[window, validator]
        for (first_window, name), reason in self._reasons.items():
            if name == validator and reason == NOT_SEALED and first_window < window:
                end = min((item for item in self._returns[validator] if item > first_window), default=inf)
                if window < end:
                    return reason
        return ""

    def of_window(self, window: int) -> list[tuple[str, str]]:
        """Return the validators that do not count for a window, each with the reason, sorted."""
        names = {validator for _, validator in self._reasons}
        return [(name, reason) for name in sorted(names) if (reason := self.reason(window, name))]


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
