"""An HTTP proxy that injects network faults and latency into streams, between nodes and an S3 server, as a command.

    python -m bench.fault_proxy --port 9000=10.0.0.1:8000 --share 0.05 --latency 0.04

It forwards bodies of any size piece by piece. Each request meets a fault with the given probability; all kinds of
faults are equally likely. The latency delays each connection once and each request once. The rate is not limited: `tc`
does that (bench/wan.py). SIGUSR1 ends the faults. When it is stopped, it prints its counts as JSON.

tests/support/faults/http_scenarios.py injects the faults of services: it reads whole requests and responses, so
that it can change listings and ETags and return old objects, and is not for large bodies.
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


class StreamFault(Enum):
    """What can happen to a request in the network."""

    ERROR = "500 without effect"
    SLOW_DOWN = "503 SlowDown without effect"
    LOST_REQUEST = "a reset before the server receives the request"
    LOST_ANSWER = "a reset in place of the response, after the request took effect"
    RESET = "a reset in the middle of the response"
    TRUNCATION = "a response that ends early, with an orderly close"
    BIT_FLIP = "one flipped bit in the body of the response"
    DRIP = "a response of 4 KiB a second"
    HANG = "no response"


@dataclass
class NetworkConditions:
    """The faults and the latency of the network, and counts of what passed.

    Attributes:
        share: probability that a request meets a fault.
        latency: seconds of a round trip.
        kinds: the faults that can occur.
        counts: requests by the name of their fault, or 'OK'.
        bytes_up, bytes_down: bytes of the bodies that were forwarded.
    """

    share: float = 0.0
    latency: float = 0.0
    kinds: tuple[StreamFault, ...] = tuple(StreamFault)
    rng: random.Random = field(default_factory=random.Random)
    counts: Counter[str] = field(default_factory=Counter)
    bytes_up: int = 0
    bytes_down: int = 0

    def draw(self) -> StreamFault | None:
        """Return the fault of the next request; None for no fault."""
        fault = self.rng.choice(self.kinds) if self.rng.random() < self.share else None
        self.counts[fault.name if fault else "OK"] += 1
        return fault


class _BrokenError(Exception):
    """The exchange ends with a reset."""


class _Peer:
    """The client or the server: its stream, and the state of HTTP on it."""

    def __init__(self, stream: trio.SocketStream, http: h11.Connection) -> None:
        self.stream = stream
        self.http = http

    async def next(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        """Return the next event, which is never NEED_DATA."""
        while (event := self.http.next_event()) is h11.NEED_DATA:
            self.http.receive_data(await self.stream.receive_some(_PIECE))
        return event

    async def send(self, event: h11.Event) -> None:
        data = self.http.send(event)
        if data:
            await self.stream.send_all(data)

    def reset(self) -> None:
        """Make the following close send a reset."""
        self.stream.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_NONE)


async def forward(conditions: NetworkConditions, host: str, port: int, stream: trio.SocketStream) -> None:
    """Forward one connection of a client to `host`:`port`, with a fault drawn for each request."""
    client = _Peer(stream, h11.Connection(h11.SERVER))
    async with stream:
        try:
            await trio.sleep(conditions.latency)  # the handshake's round trip
            async with await trio.open_tcp_stream(host, port) as upstream:
                server = _Peer(upstream, h11.Connection(h11.CLIENT))
                while isinstance(request := await client.next(), h11.Request):
                    await _exchange(conditions, client, server, request)
                    if client.http.our_state is not h11.DONE or server.http.our_state is not h11.DONE:
                        return
                    client.http.start_next_cycle()
                    server.http.start_next_cycle()
        except (OSError, trio.BrokenResourceError, trio.ClosedResourceError, h11.ProtocolError, _BrokenError):
            client.reset()


async def _exchange(conditions: NetworkConditions, client: _Peer, server: _Peer, request: h11.Request) -> None:
    fault = conditions.draw()
    await trio.sleep(conditions.latency / 2)
    if fault is StreamFault.LOST_REQUEST:
        raise _BrokenError
    if fault is StreamFault.HANG:
        await trio.sleep(_HANG_SECONDS)
        raise _BrokenError
    if fault in {StreamFault.ERROR, StreamFault.SLOW_DOWN}:
        await _refuse(client, 500 if fault is StreamFault.ERROR else 503)
        raise _BrokenError
    await _send_up(conditions, client, server, request)
    answer = await server.next()
    while isinstance(answer, h11.InformationalResponse):
        answer = await server.next()
    if fault is StreamFault.LOST_ANSWER or not isinstance(answer, h11.Response):
        raise _BrokenError
    await trio.sleep(conditions.latency / 2)
    await client.send(answer)
    await _send_down(conditions, client, server, fault)


async def _refuse(client: _Peer, status: int) -> None:
    """Send an error in S3's format. The body of the request is not read, so the connection must end."""
    code = "InternalError" if status == 500 else "SlowDown"
    body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>injected</Message></Error>".encode()
    headers = [("Content-Type", "application/xml"), ("Content-Length", str(len(body))), ("Connection", "close")]
    await client.send(h11.Response(status_code=status, headers=headers))
    await client.send(h11.Data(data=body))
    await client.send(h11.EndOfMessage())
    with trio.move_on_after(5):  # the client reads the error before the reset
        while not isinstance(await client.next(), h11.ConnectionClosed):
            pass


async def _send_up(conditions: NetworkConditions, client: _Peer, server: _Peer, request: h11.Request) -> None:
    if client.http.they_are_waiting_for_100_continue:
        await client.send(h11.InformationalResponse(status_code=100, headers=[]))
    headers = [(name, value) for name, value in request.headers.raw_items() if name.lower() != b"expect"]
    await server.send(h11.Request(method=request.method, target=request.target, headers=headers))
    while isinstance(piece := await client.next(), h11.Data):
        conditions.bytes_up += len(piece.data)
        await server.send(h11.Data(data=piece.data))
    await server.send(h11.EndOfMessage())


async def _send_down(conditions: NetworkConditions, client: _Peer, server: _Peer, fault: StreamFault | None) -> None:
    """Forward the body of the response with its fault. Bodies break off in the middle of their first piece."""
    while isinstance(piece := await server.next(), h11.Data):
        data = bytes(piece.data)
        conditions.bytes_down += len(data)
        if fault is StreamFault.BIT_FLIP:
            place = conditions.rng.randrange(len(data))
            data = data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]
            fault = None
        if fault in {StreamFault.RESET, StreamFault.TRUNCATION}:
            await client.send(h11.Data(data=data[: len(data) // 2]))
            if fault is StreamFault.TRUNCATION:
                return  # an incomplete response; the connection is closed without a reset
            raise _BrokenError
        step = _DRIP_BYTES if fault is StreamFault.DRIP else len(data)
        for start in range(0, len(data), step):
            await trio.sleep(_DRIP_SECONDS if fault is StreamFault.DRIP else 0.0)
            await client.send(h11.Data(data=data[start : start + step]))
    await client.send(h11.EndOfMessage())


async def serve(
    conditions: NetworkConditions,
    routes: dict[int, tuple[str, int]],
    *,
    address: str = "127.0.0.1",
    task_status: trio.TaskStatus[list[int]] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve until cancelled.

    Args:
        routes: by port of `address`, the host and port to forward to; port 0 for any free port.
        task_status: receives the ports, in order.
    """
    async with trio.open_nursery() as nursery:
        ports = []
        for port, (host, target) in routes.items():
            listeners = await trio.open_tcp_listeners(port, host=address)
            ports.append(listeners[0].socket.getsockname()[1])
            nursery.start_soon(partial(trio.serve_listeners, partial(forward, conditions, host, target), listeners))
        task_status.started(ports)


async def _run_until_stopped(conditions: NetworkConditions, routes: dict[int, tuple[str, int]]) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(serve, conditions, routes)
        with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT, signal.SIGUSR1) as signals:
            async for number in signals:
                conditions.share = 0.0
                if number != signal.SIGUSR1:
                    nursery.cancel_scope.cancel()
                    break
    print(
        json.dumps(
            {"requests": conditions.counts, "bytes_up": conditions.bytes_up, "bytes_down": conditions.bytes_down}
        ),
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--port", action="append", required=True, metavar="PORT=HOST:PORT", help="port of 127.0.0.1, and target"
    )
    parser.add_argument("--share", type=float, default=0.0, help="probability of a fault for each request")
    parser.add_argument("--latency", type=float, default=0.0, help="seconds of a round trip")
    parser.add_argument(
        "--kinds", default=",".join(kind.name for kind in StreamFault), help="names of faults, separated by commas"
    )
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    routes = {}
    for route in arguments.port:
        port, _, target = route.partition("=")
        host, _, number = target.rpartition(":")
        routes[int(port)] = (host, int(number))
    kinds = tuple(StreamFault[name] for name in arguments.kinds.split(","))
    conditions = NetworkConditions(arguments.share, arguments.latency, kinds, random.Random(arguments.seed))
    trio.run(_run_until_stopped, conditions, routes)


if __name__ == "__main__":
    main()
