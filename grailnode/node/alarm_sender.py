"""Tells an operator's own address (`node.alarm_url`) of the events that should wake somebody."""

import json
import queue
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Final

import httpx

ALARMS: Final = {
    "alarm": "a contradiction was signed: somebody has a key of this run, or is dishonest",
    "epoch-contested": "a second trainer runs with this key",
    "canary-failure": "a validator judged a canary's work wrongly",
    "validators-disagree": "two validators judged one group differently",
    "validator-excluded": "a validator did not seal or reveal in time",
    "beacon-late": "windows wait for the beacon",
    "cannot-follow": "this node keeps an older version",
    "disk-failing": "the disk refuses this node's state",
    "failed": "a process has ended",
}
"""The events that are alarms, by kind, with what they mean (docs/guide/operate.md)."""

THROTTLE_SECONDS: Final = 600.0
"""From one message of a kind to the next; each says how many events there were."""
_ANSWER_SECONDS: Final = 10.0
_HEADERS: Final = {"Content-Type": "application/json"}


class AlarmSender:
    """Sends messages from a thread of its own: nobody waits for the address, and a process that ends still sends.

    Args:
        url: receives a POST of JSON: time, node, kind, meaning, count and the event's fields.
        name: of the process.
        now: never goes back.
    """

    def __init__(self, url: str, name: str, now: Callable[[], float] = time.monotonic) -> None:
        self._url = url
        self._name = name
        self._now = now
        self._sent: dict[str, float] = {}  # when the last message of a kind was
        self._counts: dict[str, int] = {}  # events of a kind since then
        self._messages: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._send_all, name="grailnode-alarms", daemon=True)

    def take(self, kind: str, fields: Mapping[str, str | int | float]) -> None:
        """Send an event if it is an alarm, unless one of its kind was sent lately."""
        if kind not in ALARMS:
            return
        self._counts[kind] = self._counts.get(kind, 0) + 1
        now = self._now()
        if now - self._sent.get(kind, -THROTTLE_SECONDS) < THROTTLE_SECONDS:
            return
        head = {"time": round(time.time(), 3), "node": self._name, "kind": kind, "meaning": ALARMS[kind]}
        message = head | {"count": self._counts.pop(kind), "fields": dict(fields)}
        self._sent[kind] = now
        if self._thread.ident is None:
            self._thread.start()
        self._messages.put(json.dumps(message).encode())

    def close(self) -> None:
        """Wait for the messages that are on their way, at most as long as one may take."""
        if self._thread.ident is not None:
            self._messages.put(None)
            self._thread.join(_ANSWER_SECONDS)

    def _send_all(self) -> None:
        while (message := self._messages.get()) is not None:
            # The log has the event: a node does not stop because somebody's pager does not answer.
            with suppress(httpx.HTTPError, httpx.InvalidURL):
                httpx.post(self._url, content=message, headers=_HEADERS, timeout=_ANSWER_SECONDS)
