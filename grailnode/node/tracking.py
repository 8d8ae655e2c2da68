"""The process that feeds a tracker. It reads the trainer's logs and the run's public rollouts, so a tracker that is
slow, full or broken costs the trainer nothing.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Final

import trio

from grailnode.config import Config
from grailnode.engine.policy import Tokenizer
from grailnode.observe.node_logs import LogFollower
from grailnode.observe.observer import newest_summarized
from grailnode.observe.rollout_reader import PublishedRollout, find_miners, read_rollouts
from grailnode.track.tracker import Tracker, curves, open_tracker
from protocol.errors import ProtocolError
from roles.node.identity import Node
from roles.ports import StoreError

_POLL_SECONDS: Final = 1.0
_SAMPLE_SECONDS: Final = 60.0
_SAMPLES: Final = 4  # best rollouts of a table, and as many of the worst
_LOGS: Final = ("training", "upload")
_MAX_CHARACTERS: Final = 4000  # of a prompt or a completion in a table


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
