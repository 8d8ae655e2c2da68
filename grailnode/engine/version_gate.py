"""Keeps the served version while calls are under way: a commit waits for them, and later calls wait for the commit."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio


class VersionGate:
    """Calls of one version share the gate; a commit has it alone.

    Nothing waits at a free gate, not even for an event loop, so that engines compute without one as well.
    """

    def __init__(self) -> None:
        self._calls = 0
        self._commits: list[object] = []  # that wait or are under way, in order
        self._waiting = trio.lowlevel.ParkingLot()

    @asynccontextmanager
    async def shared(self) -> AsyncIterator[None]:
        """Hold the served version, beside other calls."""
        # Also behind a commit that only waits, so that calls that follow each other cannot hold it up for ever.
        while self._commits:
            await self._waiting.park()
        self._calls += 1
        try:
            yield
        finally:
            self._calls -= 1
            self._waiting.unpark_all()

    @asynccontextmanager
    async def exclusive(self) -> AsyncIterator[None]:
        """Wait until no call is under way, and let none begin."""
        commit = object()
        self._commits.append(commit)
        try:
            # Commits take their turns in the order in which they came.
            while self._calls or self._commits[0] is not commit:
                await self._waiting.park()
            yield
        finally:
            self._commits.remove(commit)
            self._waiting.unpark_all()
