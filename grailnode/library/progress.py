"""Lines for people while a call takes long."""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

INTERVAL_SECONDS: Final = 30.0

Report = Callable[[str], None]
"""Takes lines for people; it may be called by another thread."""


def report_to_stderr(line: str) -> None:
    """Print a line on standard error."""
    print(line, file=sys.stderr)


@contextmanager
def progress(report: Report, doing: str) -> Iterator[Report]:
    """Report every 30 s what the block does, and for how long; yield what takes a text of what it does now."""
    over, began, texts = threading.Event(), time.monotonic(), [doing]

    def run() -> None:
        while not over.wait(INTERVAL_SECONDS):
            report(f"{texts[0]} after {time.monotonic() - began:.0f} s")

    threading.Thread(target=run, name="grailnode-progress", daemon=True).start()
    try:
        yield lambda text: texts.__setitem__(0, text)
    finally:
        over.set()
