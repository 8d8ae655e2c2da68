"""Keeps the served version while calls are under way: a commit waits for them, and later calls wait for the commit."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio


class VersionGate:
    """Calls of one version share the gate; a commit has it alone."""

    def __init__(self) -> None:
        self._calls = 0
        self._entrance = trio.Lock()
        self._ended = trio.Event()

    @asynccontextmanager
    async def shared(self) -> AsyncIterator[None]:
        """Hold the served version, beside other calls."""
        async with self._entrance:
            self._calls += 1
        try:
            yield
        finally:
            self._calls -= 1
            self._ended.set()

    @asynccontextmanager
    async def exclusive(self) -> AsyncIterator[None]:
        """Wait until no call is under way, and let none begin."""
        async with self._entrance:
            while self._calls:
                self._ended = trio.Event()
                await self._ended.wait()
            yield
