"""The process that has imported vLLM and forks servers (inside/launch.py), as seen from the node.

Importing takes most of the time that a server needs to start. A launcher that stays makes a restart short. If it does
not answer, it is killed as well and replaced by a new one.
"""

import json
import os
import signal
import subprocess
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

import trio

from roles.ports import EngineError

_PATIENCE_SECONDS: Final = 5.0
"""For the answer of a launcher that has already imported vLLM; a fork takes milliseconds."""


class ServerLauncher:
    """Starts and ends the servers of one `ChildServer`, one at a time.

    `spawn` starts the launcher. It is called in the thread of the event loop: the death signal is bound to the thread.
    """

    def __init__(self, spawn: Callable[[], "subprocess.Popen[bytes]"]) -> None:
        self._spawn = spawn
        self._process: subprocess.Popen[bytes] | None = None
        self._server: int | None = None
        self._has_forked = False

    @property
    def process_id(self) -> int | None:
        """The id of the launcher's process; None if it does not run."""
        return self._process.pid if self._process is not None and self._process.poll() is None else None

    @property
    def server_id(self) -> int | None:
        """The id of the server's first process, which is that of its group; None if it does not run."""
        if self._server is not None and self.process_id is not None:
            # The launcher waits for its server, so the id of one that has ended is free.
            with suppress(ProcessLookupError):
                os.kill(self._server, 0)
                return self._server
        return None

    async def fork(self, flags: Sequence[str]) -> None:
        """Start a server when vLLM is imported; EngineError if the launcher ends before it answers."""
        # A launcher that was stopped (SIGSTOP) never answers, so it is given up after a while and replaced.
        if self.process_id is not None and self._has_forked:
            with trio.move_on_after(_PATIENCE_SECONDS):
                if await self._ask(flags):
                    return
        self.close()
        self._process = self._spawn()
        if not await self._ask(flags):
            raise EngineError("vLLM's launcher ended while it imported vLLM")

    def kill_server(self) -> None:
        """End all processes of the server, however they are; the launcher stays."""
        server, self._server = self._server, None
        if server is not None:
            # The whole group, so that workers of a server whose first process is gone end too.
            with suppress(ProcessLookupError):  # all of them have ended
                os.killpg(server, signal.SIGKILL)

    def close(self) -> None:
        self.kill_server()
        process, self._process, self._has_forked = self._process, None, False
        if process is not None:
            process.kill()
            with suppress(BrokenPipeError):
                process.communicate()

    async def _ask(self, flags: Sequence[str]) -> bool:
        """Ask for a server, and return whether there is one."""
        assert self._process is not None
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(list(flags)).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            return False
        # A thread that is given up ends with the launcher.
        answer = await trio.to_thread.run_sync(self._process.stdout.readline, abandon_on_cancel=True)
        if answer:
            self._server, self._has_forked = int(answer), True
        return bool(answer)
