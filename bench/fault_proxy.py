"""The proxy of network faults as a command (tests/support/faults/stream_fault_proxy.py).

    python -m bench.fault_proxy --port 9000=10.0.0.1:8000 --share 0.05 --latency 0.04

The rate is not limited: `tc` does that (bench/wan.py). SIGUSR1 ends the faults. When it is stopped, it prints its
counts as JSON.
"""

import argparse
import json
import random
import signal

import trio

from tests.support.faults.stream_fault_proxy import NetworkConditions, StreamFault, serve


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
