"""A bad wire between nodes and an S3 server: `python -m tests.support.faults.fault_proxy --port 9000=10.0.0.1:8000
--share 0.05 --latency 0.04`.

An HTTP proxy that passes everything on as it comes. Every request meets a fault with the given probability; which one
is drawn evenly. All traffic is late by the given round trip: once for a connection, once for a request. It has no limit
of rate: that is what `tc` is for (bench/wan.py). SIGUSR1 ends the faults. Prints what it did as JSON when it is told to
stop. What a service that means harm does to listings, ETags and old objects is
tests/support/faults/http_fault_proxy.py, which sees whole exchanges and not streams.
"""

import argparse
import json
import random
import signal
import socket
import struct
from collections import Counter
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Final

import h11
import trio

_PIECE: Final = 1 << 16
_DRIP_BYTES: Final = 1024
_DRIP_SECONDS: Final = 0.25
_HANG_SECONDS: Final = 600.0
_LINGER_NONE: Final = struct.pack("ii", 1, 0)


class Wire(Enum):
    """What can go wrong with one request on its way."""

    ERROR = "500, nothing done"
    SLOW_DOWN = "503 SlowDown, nothing done"
    LOST = "a reset before the server has heard of it"
    LOST_ANSWER = "done, and a reset in place of the answer"
    RESET = "a reset in the middle of the answer"
    TRUNCATED = "an answer that ends early, in good order"
    FLIPPED = "one bit of the answer's body differs"
    DRIP = "4 KiB a second"
    HANG = "no answer at all"


@dataclass
class Weather:
    """How bad the way is.

    Attributes:
        share: probability that a request meets a fault; kinds: of which faults.
        latency: seconds of a round trip.
        met: requests by what they met.
        bytes_up, bytes_down: of the bodies that passed.
    """

    share: float = 0.0
    latency: float = 0.0
    kinds: tuple[Wire, ...] = tuple(Wire)
    rng: random.Random = field(default_factory=random.Random)
    met: Counter[str] = field(default_factory=Counter)
    bytes_up: int = 0
    bytes_down: int = 0

    def draw(self) -> Wire | None:
        """The fault of the next request."""
        fault = self.rng.choice(self.kinds) if self.rng.random() < self.share else None
        self.met[fault.name if fault else "OK"] += 1
        return fault


class _BrokenError(Exception):
    """This exchange ends with a reset."""


class _End:
    """One side of a connection."""

    def __init__(self, stream: trio.SocketStream, http: h11.Connection) -> None:
        self.stream = stream
        self.http = http

    async def next(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        """The next event, which is never NEED_DATA."""
        while (event := self.http.next_event()) is h11.NEED_DATA:
            self.http.receive_data(await self.stream.receive_some(_PIECE))
        return event

    async def send(self, event: h11.Event) -> None:
        data = self.http.send(event)
        if data:
            await self.stream.send_all(data)

    def reset(self) -> None:
        """Make the close that follows a reset."""
        self.stream.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_NONE)


async def forward(weather: Weather, host: str, port: int, stream: trio.SocketStream) -> None:
    """Serve one connection of a client: each request goes to `host`:`port` and meets what the weather brings."""
    client = _End(stream, h11.Connection(h11.SERVER))
    async with stream:
        try:
            await trio.sleep(weather.latency)  # the handshake's round trip
            async with await trio.open_tcp_stream(host, port) as upstream:
                server = _End(upstream, h11.Connection(h11.CLIENT))
                while isinstance(request := await client.next(), h11.Request):
                    await _exchange(weather, client, server, request)
                    if client.http.our_state is not h11.DONE or server.http.our_state is not h11.DONE:
                        return
                    client.http.start_next_cycle()
                    server.http.start_next_cycle()
        except (OSError, trio.BrokenResourceError, trio.ClosedResourceError, h11.ProtocolError, _BrokenError):
            client.reset()


async def _exchange(weather: Weather, client: _End, server: _End, request: h11.Request) -> None:
    fault = weather.draw()
    await trio.sleep(weather.latency / 2)
    if fault is Wire.LOST:
        raise _BrokenError
    if fault is Wire.HANG:
        await trio.sleep(_HANG_SECONDS)
        raise _BrokenError
    if fault in {Wire.ERROR, Wire.SLOW_DOWN}:
        await _refuse(client, 500 if fault is Wire.ERROR else 503)
        raise _BrokenError
    await _send_up(weather, client, server, request)
    answer = await server.next()
    while isinstance(answer, h11.InformationalResponse):
        answer = await server.next()
    if fault is Wire.LOST_ANSWER or not isinstance(answer, h11.Response):
        raise _BrokenError
    await trio.sleep(weather.latency / 2)
    await client.send(answer)
    await _send_down(weather, client, server, fault)


async def _refuse(client: _End, status: int) -> None:
    """An error as S3 says it; the request's body is not read, so the connection ends."""
    code = "InternalError" if status == 500 else "SlowDown"
    body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>injected</Message></Error>".encode()
    headers = [("Content-Type", "application/xml"), ("Content-Length", str(len(body))), ("Connection", "close")]
    await client.send(h11.Response(status_code=status, headers=headers))
    await client.send(h11.Data(data=body))
    await client.send(h11.EndOfMessage())
    with trio.move_on_after(5):  # let it be read before the reset
        while not isinstance(await client.next(), h11.ConnectionClosed):
            pass


async def _send_up(weather: Weather, client: _End, server: _End, request: h11.Request) -> None:
    if client.http.they_are_waiting_for_100_continue:
        await client.send(h11.InformationalResponse(status_code=100, headers=[]))
    headers = [(name, value) for name, value in request.headers.raw_items() if name.lower() != b"expect"]
    await server.send(h11.Request(method=request.method, target=request.target, headers=headers))
    while isinstance(piece := await client.next(), h11.Data):
        weather.bytes_up += len(piece.data)
        await server.send(h11.Data(data=piece.data))
    await server.send(h11.EndOfMessage())


async def _send_down(weather: Weather, client: _End, server: _End, fault: Wire | None) -> None:
    """The body of the answer, as the fault leaves it. What breaks off, does so in the middle of its first piece."""
    while isinstance(piece := await server.next(), h11.Data):
        data = bytes(piece.data)
        weather.bytes_down += len(data)
        if fault is Wire.FLIPPED:
            place = weather.rng.randrange(len(data))
            data = data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]
            fault = None
        if fault in {Wire.RESET, Wire.TRUNCATED}:
            await client.send(h11.Data(data=data[: len(data) // 2]))
            if fault is Wire.TRUNCATED:
                return  # an answer that is not whole: the connection is closed, in good order
            raise _BrokenError
        step = _DRIP_BYTES if fault is Wire.DRIP else len(data)
        for start in range(0, len(data), step):
            await trio.sleep(_DRIP_SECONDS if fault is Wire.DRIP else 0.0)
            await client.send(h11.Data(data=data[start : start + step]))
    await client.send(h11.EndOfMessage())


async def serve(
    weather: Weather,
    routes: dict[int, tuple[str, int]],
    *,
    address: str = "127.0.0.1",
    task_status: trio.TaskStatus[list[int]] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve until cancelled.

    Args:
        routes: by port of `address`, where to forward to; port 0 for any that is free.
        task_status: told the ports, in order.
    """
    async with trio.open_nursery() as nursery:
        ports = []
        for port, (host, target) in routes.items():
            listeners = await trio.open_tcp_listeners(port, host=address)
            ports.append(listeners[0].socket.getsockname()[1])
            nursery.start_soon(partial(trio.serve_listeners, partial(forward, weather, host, target), listeners))
        task_status.started(ports)


async def _until_told(weather: Weather, routes: dict[int, tuple[str, int]]) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(serve, weather, routes)
        with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT, signal.SIGUSR1) as signals:
            async for told in signals:
                weather.share = 0.0
                if told != signal.SIGUSR1:
                    nursery.cancel_scope.cancel()
                    break
    print(json.dumps({"met": weather.met, "bytes_up": weather.bytes_up, "bytes_down": weather.bytes_down}), flush=True)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--port", action="append", required=True, metavar="PORT=HOST:PORT", help="of 127.0.0.1, and where to"
    )
    parser.add_argument("--share", type=float, default=0.0, help="of requests that meet a fault")
    parser.add_argument("--latency", type=float, default=0.0, help="seconds of a round trip")
    parser.add_argument("--kinds", default=",".join(kind.name for kind in Wire), help="of faults, with commas")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    routes = {}
    for route in arguments.port:
        port, _, target = route.partition("=")
        host, _, number = target.rpartition(":")
        routes[int(port)] = (host, int(number))
    kinds = tuple(Wire[name] for name in arguments.kinds.split(","))
    weather = Weather(arguments.share, arguments.latency, kinds, random.Random(arguments.seed))
    trio.run(_until_told, weather, routes)


if __name__ == "__main__":
    main()
