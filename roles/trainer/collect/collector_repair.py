"""Repairs what the download process keeps, so that no group is trained on twice (docs/guide/operate.md)."""

from collections.abc import Set

from protocol import paths
from roles.ports import LineReporter, NotFoundError, ObjectStore
from roles.trainer.collect.validator_monitor import DISTRUSTED
from roles.trainer.spool import COLLECTOR_PROGRESS, INBOX, INTENTS, OUTCOMES
from roles.trainer.verified_batch import CollectorProgress


async def repair_collector(state: ObjectStore, lost_paths: Set[str], say: LineReporter) -> None:
    """Give up the windows of which it is not certain what was trained on.

    Args:
        lost_paths: the paths of the objects that the state has lost.
    """
    for path in sorted(lost_paths):
        if path.startswith(INBOX):
            say(f"{path}: its groups are not trained on")
        elif path.startswith(DISTRUSTED):
            await state.put(path, b"")
            say(f"{path}: stays distrusted; the verdict that shows why is in storage")
    try:
        data = await state.get(COLLECTOR_PROGRESS, CollectorProgress.max_bytes)
        oldest = CollectorProgress.from_bytes(data).oldest_window
    except NotFoundError:
        oldest = 0
    doubtful = [path for path in lost_paths if path.startswith((OUTCOMES, INTENTS))]
    if COLLECTOR_PROGRESS in lost_paths:
        doubtful += [item.path async for item in state.list(OUTCOMES)]
    windows = [window for path in doubtful if (window := paths.window_of(path)) >= oldest]
    if not windows:
        if COLLECTOR_PROGRESS in lost_paths:
            say(f"{COLLECTOR_PROGRESS}: nothing was collected; it begins with the windows that are open")
        return
    first = max(windows) + 1
    await state.put(COLLECTOR_PROGRESS, CollectorProgress(oldest_window=first).to_bytes())
    say(f"{COLLECTOR_PROGRESS}: verdicts count from window {first} on, so that no group is trained on twice")
