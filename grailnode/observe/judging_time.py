"""What the validators of this machine had no time to judge, by their own logs."""

from pathlib import Path
from typing import Final

from grailnode.observe.bottleneck import tail_events

_REPUTATIONS: Final = {
    "earning": "miners that earn",
    "known": "known miners",
    "stranger": "strangers",
    "rejected": "rejected miners",
}


def unjudged_cases(logs: Path) -> tuple[str, ...]:
    """Return a line for each validator of this machine that left cases of its newest window unjudged.

    Args:
        logs: the directory of the nodes' logs.
    """
    lines = []
    for path in sorted(logs.glob("*.jsonl")):
        event = next((item for item in tail_events(path) if item.get("event") == "judged"), None)
        if event is None:
            continue
        left = {name: event.get(f"left_{reputation}", 0) for reputation, name in _REPUTATIONS.items()}
        parts = [f"{count:,} of {name}" for name, count in left.items() if isinstance(count, int) and count > 0]
        if parts:
            lines.append(
                f"{path.stem} judged {event.get('cases')} miners' groups of window {event.get('window')} and left "
                f"{', '.join(parts)}: add validators, or faster ones"
            )
    return tuple(lines)
