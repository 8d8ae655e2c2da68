"""Tells an operator's own address (`node.alarm_url`) of the events that should wake somebody."""

import json
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Final

import httpx
import trio

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
"""From one message of a kind to the next; each has the fields of the last event and says how many there were."""
_ANSWER_SECONDS: Final = 10.0
_HEADERS: Final = {"Content-Type": "application/json"}


class AlarmSender:
    """Sends messages from a thread of its own: nobody waits for the address, and a process that ends still sends."""

    def __init__(self, url: str, name: str, now: Callable[[], float] = time.monotonic) -> None:
        self._url = url
        self._name = name
        self._now = now
        self._due: dict[str, float] = {}  # when the next message of a kind may be sent
        self._waiting: dict[str, dict[str, Any]] = {}  # by kind, the message that waits for this
        self._ready: deque[dict[str, Any]] = deque()
        self._is_closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._send_all, name="grailnode-alarms", daemon=True)

    def take(self, kind: str, fields: Mapping[str, str | int | float]) -> None:
        """Send an event if it is an alarm: at once, or when the last message of its kind is long enough ago."""
        if kind not in ALARMS:
            return
        with self._changed:
            count = self._waiting.get(kind, {"count": 0})["count"] + 1
            head = {"time": round(time.time(), 3), "node": self._name, "kind": kind, "meaning": ALARMS[kind]}
            self._waiting[kind] = head | {"count": count, "fields": dict(fields)}
            self._move_due()
            if self._thread.ident is None:
                self._thread.start()
            self._changed.notify()

    def close(self) -> None:
        """Send what waits, and wait for the messages that are on their way, at most as long as one may take."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        if self._thread.ident is not None:
            self._thread.join(_ANSWER_SECONDS)

    def _move_due(self) -> None:
        now = self._now()
        for kind in [kind for kind in self._waiting if self._is_closed or self._due.get(kind, now) <= now]:
            self._due[kind] = now + THROTTLE_SECONDS
            self._ready.append(self._waiting.pop(kind))

    def _next(self) -> dict[str, Any] | None:
        """Wait for the next message; None when there is none any more."""
        with self._changed:
            while True:
                self._move_due()
                if self._ready or self._is_closed:
                    return self._ready.popleft() if self._ready else None
                soonest = min((self._due[kind] for kind in self._waiting), default=None)
                self._changed.wait(None if soonest is None else soonest - self._now())

    def _send_all(self) -> None:
        while (message := self._next()) is not None:
            # The log has the event: a node does not stop because somebody's pager does not answer.
            with suppress(Exception):
                trio.run(self._send, json.dumps(message).encode())

    async def _send(self, message: bytes) -> None:
        """Send a message. The answer is not read, and its head must be complete in time, however slowly it comes."""
        client = httpx.AsyncClient(timeout=_ANSWER_SECONDS)  # which reads certificates first
        with trio.move_on_after(_ANSWER_SECONDS):
            async with client, client.stream("POST", self._url, content=message, headers=_HEADERS):
                pass
