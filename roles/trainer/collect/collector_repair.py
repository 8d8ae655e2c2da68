"""Repairs the collector's part of a trainer's state after objects of it were lost (docs/guide/operate.md).

The collector hands each accepted group to the learner once, and notes it in the outcome log of the group's window. If
such a log is lost, the collector would read the verdicts of that window again and hand the same groups over a second
time. So a window whose log is lost is closed, and so are all windows before it, because only one number says where the
collector goes on: the oldest window for which verdicts still count. Groups of these windows that were not handed over
yet are lost; training goes on with the next window.
"""

from collections.abc import Set

from protocol import paths
from roles.ports import LineReporter, NotFoundError, ObjectStore
from roles.trainer.collect.logprob_bias import LOGPROB_BIAS
from roles.trainer.collect.validator_monitor import DISTRUSTED
from roles.trainer.spool import COLLECTOR_PROGRESS, INBOX, INTENTS, OUTCOMES
from roles.trainer.verified_batch import CollectorProgress


async def repair_collector(state: ObjectStore, lost_paths: Set[str], say: LineReporter) -> None:
    """Close the windows whose outcome log or write-ahead log is lost, and keep validators distrusted, in the state of a
    trainer, or of a site that trains with others.
    """
    for path in sorted(lost_paths):
        if path.startswith(INBOX):
            say(f"{path}: its groups are not trained on")
        elif path.startswith(DISTRUSTED):
            await state.put(path, b"")
            say(f"{path}: stays distrusted; the verdict that shows why is in storage")
        elif path == LOGPROB_BIAS:
            say(f"{path}: log-probabilities that differ to one side are counted anew")
    # Windows before `oldest` are closed already; what is lost of them changes nothing.
    try:
        data = await state.get(COLLECTOR_PROGRESS, CollectorProgress.max_bytes)
        oldest = CollectorProgress.from_bytes(data).oldest_window
    except NotFoundError:
        oldest = 0
    # Without its outcome log it is not known which groups of a window were handed over; without its write-ahead log,
    # whether the last ones have reached the inbox. If the progress itself is lost, verdicts may have been read for all
    # windows that have an outcome log, so the collector goes on after the newest of these.
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
