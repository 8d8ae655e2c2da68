"""A small HTTP/1.1 server on loopback. A test decides every response, and where the connection breaks."""

import hashlib
import math
import re
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus
from queue import SimpleQueue
from typing import TypeVar
from urllib.parse import unquote

import trio

UNSAID = -1
T = TypeVar("T")


@dataclass(frozen=True)
class HttpRequest:
    """A request. `target` is the raw path and query; header names are in lower case."""

    method: str
    target: str
    headers: dict[str, str]
    body: bytes


@dataclass(frozen=True)
class Reply:
    """A response.

    Attributes:
        length: the value of Content-Length; None for the true one, UNSAID for no such header (the body then ends with
            the connection).
        cut: bytes of the body after which the connection is closed; negative: before the response.
        piece: bytes of the pieces in which the body is sent.
        pause: seconds between two pieces.
    """

    status: int = 200
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    length: int | None = None
    cut: int | None = None
    piece: int = 1 << 16
    pause: float = 0.0


Answer = Callable[[HttpRequest], Reply | Awaitable[Reply]]


async def serve(answer: Answer, *, task_status: trio.TaskStatus[str] = trio.TASK_STATUS_IGNORED) -> None:
    """Serve until cancelled. The task status receives the URL, such as 'http://127.0.0.1:40123'."""
    listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
    port = listeners[0].socket.getsockname()[1]
    task_status.started(f"http://127.0.0.1:{port}")
    handler: Callable[[trio.SocketStream], Awaitable[object]] = partial(_connection, answer)
    await trio.serve_listeners(handler, listeners)


@contextmanager
def in_thread(entered: AbstractAsyncContextManager[T]) -> Iterator[tuple[T, Callable[[], None]]]:
    """Enter a context in a thread of its own, for tests that are no tasks; yield its value, and what ends it."""
    started = SimpleQueue[tuple[T, trio.CancelScope, trio.lowlevel.TrioToken]]()

    async def main() -> None:
        with trio.CancelScope() as scope:
            async with entered as value:
                started.put((value, scope, trio.lowlevel.current_trio_token()))
                await trio.sleep_forever()

    thread = threading.Thread(target=trio.run, args=(main,))
    thread.start()
    value, scope, token = started.get(timeout=600)

    def stop() -> None:
        if thread.is_alive():
            token.run_sync_soon(scope.cancel)
            thread.join(30)

    yield value, stop
    stop()


@contextmanager
def serving(answer: Answer) -> Iterator[str]:
    """Serve in a thread of its own; yield the URL."""

    @asynccontextmanager
    async def served() -> AsyncIterator[str]:
        async with trio.open_nursery() as nursery:
            yield await nursery.start(serve, answer)
            nursery.cancel_scope.cancel()

    with in_thread(served()) as (url, _):
        yield url


async def _connection(answer: Answer, stream: trio.SocketStream) -> None:
    try:
        async with stream:
            buffer = b""
            while (message := await _read(stream, buffer)) is not None:
                request, buffer = message
                reply = answer(request)
                if not isinstance(reply, Reply):
                    reply = await reply
                if not await _send(stream, reply, request.method == "HEAD"):
                    return
    except trio.BrokenResourceError:
        pass  # the client has closed the connection


async def _read(stream: trio.SocketStream, buffer: bytes) -> tuple[HttpRequest, bytes] | None:
    while b"\r\n\r\n" not in buffer:
        piece = await stream.receive_some()
        if not piece:
            return None
        buffer += piece
    head, _, buffer = buffer.partition(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    method, target, _ = first.split(" ")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    if headers.get("expect"):
        await stream.send_all(b"HTTP/1.1 100 Continue\r\n\r\n")
    size = int(headers.get("content-length", "0"))
    while len(buffer) < size:
        buffer += await stream.receive_some()
    return HttpRequest(method, target, headers, buffer[:size]), buffer[size:]


async def _send(stream: trio.SocketStream, reply: Reply, head_only: bool) -> bool:
    """Send a response, and return whether the connection can be used again."""
    if reply.cut is not None and reply.cut < 0:
        return False
    length = len(reply.body) if reply.length is None else reply.length
    head = f"HTTP/1.1 {reply.status} {HTTPStatus(reply.status).phrase}\r\n"
    head += "Connection: close\r\n" if length == UNSAID else f"Content-Length: {length}\r\n"
    head += "".join(f"{name}: {value}\r\n" for name, value in reply.headers.items())
    await stream.send_all(head.encode() + b"\r\n")
    if head_only:
        return True
    stop = len(reply.body) if reply.cut is None else reply.cut
    for number in range(math.ceil(stop / reply.piece)):
        if number and reply.pause:
            await trio.sleep(reply.pause)
        await stream.send_all(reply.body[number * reply.piece : min(stop, (number + 1) * reply.piece)])
    return reply.cut is None and length == len(reply.body)


class FileServer:
    """Serves objects as a correct static file server does, with ranges and If-Range.

    Attributes:
        objects: by URL path.
        requests: all requests so far.
    """

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.requests: list[HttpRequest] = []

    def answer(self, request: HttpRequest) -> Reply:
        self.requests.append(request)
        data = self.objects.get(unquote(request.target.partition("?")[0]))
        if data is None:
            return Reply(404, b"no")
        etag = f'"{hashlib.sha256(data).hexdigest()[:16]}"'
        headers = {"ETag": etag, "Accept-Ranges": "bytes"}
        match = re.fullmatch(r"bytes=(\d+)-(\d*)", request.headers.get("range", ""))
        if match is None or request.headers.get("if-range", etag) != etag:
            return Reply(200, data, headers)
        start, last = int(match[1]), min(int(match[2] or len(data)), len(data) - 1)
        if start >= len(data):
            return Reply(416, b"", {"Content-Range": f"bytes */{len(data)}"})
        headers["Content-Range"] = f"bytes {start}-{last}/{len(data)}"
        return Reply(206, data[start : last + 1], headers)
