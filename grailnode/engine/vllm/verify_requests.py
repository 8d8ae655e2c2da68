"""Verification on demand: another process of this machine asks a node to read its engine's tensors back.

Only the node talks to its engine, since a second controller would replace what is being staged. Whoever connects to a
Unix socket in the engine's directory, which only the node's user can, gets one line of JSON when the tensors have been
read back. A directory whose path is longer than the address of a socket may be is reached through /proc.
"""

import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import trio
from pydantic import TypeAdapter

from grailnode import UserError
from roles.gather import first_failure
from roles.ports import EngineError

_SOCKET: Final = "verify"
_MAX_ADDRESS_BYTES: Final = 103  # of a path, on the systems that allow least
_MAX_NAMES: Final = 20  # of tensors in a line
_MAX_ANSWER_BYTES: Final = 16 << 20  # with the names of all tensors


class NoAnswerError(UserError):
    """No node with an engine of vLLM answers, or it ended meanwhile."""


@dataclass(frozen=True)
class Verification:
    """What was found when all tensors were read back."""

    version: int = 0
    digest: str = ""  # of the version's weights, as the trainer signed it, in hexadecimal digits
    tensors: int = 0
    seconds: float = 0.0
    different: tuple[str, ...] = ()  # the names of the tensors that differed from the signed ones
    failure: str = ""  # why the engine was restarted; the numbers were found after that
    error: str = ""  # why nothing was verified

    def finding(self) -> str:
        """Say in a line that all tensors are the signed ones; UserError if they were not, or nothing was verified."""
        if self.error:
            raise UserError(f"nothing was verified: {self.error}")
        if self.failure:
            raise UserError(f"{self._difference()}; vLLM was started again and equals the signed weights now")
        return (
            f"version {self.version} equals its signed weights: {self.tensors} tensors read back from vLLM in "
            f"{self.seconds:.1f} s, digest {self.digest}"
        )

    def _difference(self) -> str:
        if not self.different:
            return f"version {self.version} was not in vLLM ({self.failure})"
        names = ", ".join(self.different[:_MAX_NAMES]) + (", ..." if len(self.different) > _MAX_NAMES else "")
        count = f"{len(self.different)} of {self.tensors} tensors"
        return f"version {self.version} differed from its signed weights in {count}: {names}"


_line: Final = TypeAdapter(Verification)


async def first_fault(verifications: Sequence[Callable[[], Awaitable[Verification]]]) -> Verification:
    """Verify engines of one version; return what was found in the first one with a fault, or in the last."""
    result = Verification()
    # One after the other: reading back takes memory and time from the serving.
    for verify in verifications:
        result = await verify()
        if result.different or result.failure:
            break
    return result


@asynccontextmanager
async def serve_verifications(
    directory: Path, verify: Callable[[], Awaitable[Verification]], report: Callable[..., None]
) -> AsyncIterator[None]:
    """Answer requests for a verification while the block runs; where that is impossible, the node works without."""
    async with AsyncExitStack() as stack:
        try:
            # A node that cannot listen works on, because only a person asks here.
            listener = _listener(stack.enter_context(_address(directory)), directory)
        except OSError as error:
            report("verify-unavailable", error=f"{directory / _SOCKET}: {error}")
        else:
            stack.callback((directory / _SOCKET).unlink, missing_ok=True)
            tasks = await stack.enter_async_context(first_failure(Exception))
            tasks.start_soon(partial(trio.serve_listeners, partial(_answer, verify), [listener]))
            stack.callback(tasks.cancel_scope.cancel)
        yield


async def request_verification(directory: Path) -> Verification:
    """Have the node with an engine in a directory read all tensors back; NoAnswerError if no node answers."""
    try:
        with _address(directory) as address:
            async with await trio.open_unix_socket(address) as stream:
                line = bytearray()
                # Whatever listens there, it cannot fill the memory.
                while len(line) <= _MAX_ANSWER_BYTES and (data := await stream.receive_some()):
                    line += data
        return _line.validate_json(line)
    except (OSError, trio.BrokenResourceError) as error:
        raise NoAnswerError(f"{directory}: {error}") from error
    except ValueError as error:
        raise NoAnswerError(f"{directory}: the node ended before it answered, or it is no node") from error


async def _answer(verify: Callable[[], Awaitable[Verification]], stream: trio.SocketStream) -> None:
    async with stream:
        try:
            result = await verify()
        except EngineError as error:
            result = Verification(error=str(error).partition("\n")[0])
        with suppress(trio.BrokenResourceError):  # whoever asked has gone
            await stream.send_all(_line.dump_json(result) + b"\n")


def _listener(address: str, directory: Path) -> trio.SocketListener:
    listener = socket.socket(socket.AF_UNIX)
    try:
        (directory / _SOCKET).unlink(missing_ok=True)  # of a process that was killed
        listener.bind(address)
        (directory / _SOCKET).chmod(0o600)  # before it listens
        listener.listen()
    except OSError:
        listener.close()
        raise
    return trio.SocketListener(trio.socket.from_stdlib_socket(listener))


@contextmanager
def _address(directory: Path) -> Iterator[str]:
    """Yield a path of the socket that is short enough for its address."""
    path = str(directory / _SOCKET)
    if len(os.fsencode(path)) <= _MAX_ADDRESS_BYTES:
        yield path
        return
    # The descriptor of the directory is a short name for it.
    folder = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{_SOCKET}"
    finally:
        os.close(folder)
