"""Machines of a small internet, as network namespaces of this one: each on a link of its own to a hub, with its own
rate.

The hub is a bridge. A machine is a namespace with one veth pair to it; a token bucket (`tc` tbf) on each end of the
pair limits what the machine sends and what it is sent. Needs root. Nothing outside the namespaces is touched, and they
are removed at the end.
"""

import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

HUB: Final = "10.77.0.1"
_QUEUE: Final = "100ms"
_BURST_SECONDS: Final = 0.002
_LEAST_BURST_BYTES: Final = 16_384


class NamespaceError(Exception):
    """This machine gives no namespaces or no token buckets: says which command it refused."""


@dataclass
class Internet:
    """Namespaces and their links.

    Attributes:
        name: of the hub's namespace, and what the others' names begin with.
    """

    name: str
    _links: dict[str, tuple[str, str]] = field(default_factory=dict)

    @classmethod
    @contextmanager
    def open(cls, machines: Sequence[str]) -> Iterator["Internet"]:
        """A hub and so many machines, their links without limits.

        Raises:
            NamespaceError: it cannot be made.
        """
        net = cls(f"grailnode-{os.getpid()}")
        try:
            _run("ip", "netns", "add", net.name)
            _hub(net.name, "link", "add", "hub", "type", "bridge")
            _hub(net.name, "addr", "add", f"{HUB}/24", "dev", "hub")
            _hub(net.name, "link", "set", "hub", "up")
            _hub(net.name, "link", "set", "lo", "up")
            for number, machine in enumerate(machines):
                net._add(machine, number)
            yield net
        finally:
            for space in (net.name, *(net.space(machine) for machine in net._links)):
                subprocess.run(["ip", "netns", "delete", space], check=False, capture_output=True)

    def space(self, machine: str) -> str:
        """The namespace of a machine."""
        return f"{self.name}-{machine}"

    def within(self, machine: str | None = None) -> tuple[str, ...]:
        """The command that starts a command on a machine; without a name, on the hub."""
        return ("ip", "netns", "exec", self.name if machine is None else self.space(machine))

    def _add(self, machine: str, number: int) -> None:
        space, near, far = self.space(machine), f"to{number}", "link0"
        _run("ip", "netns", "add", space)
        self._links[machine] = (near, far)
        _hub(self.name, "link", "add", near, "type", "veth", "peer", "name", far, "netns", space)
        _hub(self.name, "link", "set", near, "master", "hub", "up")
        _hub(space, "addr", "add", f"10.77.0.{10 + number}/24", "dev", far)
        _hub(space, "link", "set", "dev", far, "up")
        _hub(space, "link", "set", "lo", "up")

    def limit(self, machine: str, mbps: float) -> None:
        """Limit a machine's link to so many megabits a second, each way."""
        near, far = self._links[machine]
        burst = max(_LEAST_BURST_BYTES, round(mbps * 1e6 / 8 * _BURST_SECONDS))
        for space, device in ((self.name, near), (self.space(machine), far)):
            bucket = ("tbf", "rate", f"{mbps}mbit", "burst", str(burst), "latency", _QUEUE)
            _run("tc", "-n", space, "qdisc", "replace", "dev", device, "root", *bucket)

    def passed(self, machine: str) -> tuple[int, int]:
        """Bytes that a machine's link has carried: sent and received, with all headers."""
        text = _run(*self.within(machine), "cat", "/proc/net/dev")
        line = next(line for line in text.splitlines() if line.strip().startswith("link0:"))
        fields = line.partition(":")[2].split()
        return int(fields[8]), int(fields[0])


def _hub(space: str, *arguments: str) -> None:
    _run("ip", "-n", space, *arguments)


def _run(*command: str) -> str:
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise NamespaceError(f"{' '.join(command)}: {done.stderr.strip() or f'exit code {done.returncode}'}")
    return done.stdout
