"""Keeps the served version while calls are under way: a commit waits for them, and later calls wait for the commit."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio


class VersionGate:
    """Calls of one version share the gate; a commit has it alone."""

    def __init__(self) -> None:
        self._calls = 0
        self._committing = False
        self._changed = trio.Condition()

    @asynccontextmanager
    async def shared(self) -> AsyncIterator[None]:
        """Hold the served version, beside other calls."""
        async with self._changed:
            while self._committing:
                await self._changed.wait()
            self._calls += 1
        try:
            yield
        finally:
            with trio.CancelScope(shield=True):
                async with self._changed:
                    self._calls -= 1
                    self._changed.notify_all()

    @asynccontextmanager
    async def exclusive(self) -> AsyncIterator[None]:
        """Wait until no call is under way, and let none begin."""
        self._committing = True
        try:
            async with self._changed:
                while self._calls:
                    await self._changed.wait()
            yield
        finally:
            self._committing = False
            with trio.CancelScope(shield=True):
                async with self._changed:
                    self._changed.notify_all()
