"""Simulated machines as network namespaces, each with a link of its own rate to a hub.

The hub is a bridge. A machine is a namespace with one veth pair to the hub; a token bucket (`tc` tbf) on each end of
the pair limits what the machine sends and receives. This needs root. It changes nothing outside the namespaces and
removes them at the end.
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
_MIN_BURST_BYTES: Final = 16_384


class NamespaceError(Exception):
    """This machine does not allow namespaces or token buckets. The message has the command that failed."""


@dataclass
class NamespaceNetwork:
    """Namespaces and their links.

    Attributes:
        name: name of the hub's namespace, and prefix of the machines' namespaces.
    """

    name: str
    _links: dict[str, tuple[str, str]] = field(default_factory=dict)

    @classmethod
    @contextmanager
    def open(cls, machines: Sequence[str]) -> Iterator["NamespaceNetwork"]:
        """Make a hub and the machines with these names, with unlimited links, for the length of the block."""
        network = cls(f"grailnode-{os.getpid()}")
        try:
            _run("ip", "netns", "add", network.name)
            _ip(network.name, "link", "add", "hub", "type", "bridge")
            _ip(network.name, "addr", "add", f"{HUB}/24", "dev", "hub")
            _ip(network.name, "link", "set", "hub", "up")
            _ip(network.name, "link", "set", "lo", "up")
            for number, machine in enumerate(machines):
                network._add(machine, number)
            yield network
        finally:
            for namespace in (network.name, *(network.namespace(machine) for machine in network._links)):
                subprocess.run(["ip", "netns", "delete", namespace], check=False, capture_output=True)

    def namespace(self, machine: str) -> str:
        """Return the name of a machine's namespace."""
        return f"{self.name}-{machine}"

    def command_prefix(self, machine: str | None = None) -> tuple[str, ...]:
        """Return the command that runs the command behind it on a machine, or on the hub if there is no name."""
        return ("ip", "netns", "exec", self.name if machine is None else self.namespace(machine))

    def _add(self, machine: str, number: int) -> None:
        namespace, hub_device, machine_device = self.namespace(machine), f"to{number}", "link0"
        _run("ip", "netns", "add", namespace)
        self._links[machine] = (hub_device, machine_device)
        _ip(self.name, "link", "add", hub_device, "type", "veth", "peer", "name", machine_device, "netns", namespace)
        _ip(self.name, "link", "set", hub_device, "master", "hub", "up")
        _ip(namespace, "addr", "add", f"10.77.0.{10 + number}/24", "dev", machine_device)
        _ip(namespace, "link", "set", "dev", machine_device, "up")
        _ip(namespace, "link", "set", "lo", "up")

    def connect(self, machine: str, *, on: bool) -> None:
        """Cut a machine's link without a word to either end, or mend it."""
        _ip(self.name, "link", "set", "dev", self._links[machine][0], "up" if on else "down")

    def limit(self, machine: str, mbps: float) -> None:
        """Limit a machine's link to `mbps` megabits a second in each direction."""
        hub_device, machine_device = self._links[machine]
        burst = max(_MIN_BURST_BYTES, round(mbps * 1e6 / 8 * _BURST_SECONDS))
        for namespace, device in ((self.name, hub_device), (self.namespace(machine), machine_device)):
            bucket = ("tbf", "rate", f"{mbps}mbit", "burst", str(burst), "latency", _QUEUE)
            _run("tc", "-n", namespace, "qdisc", "replace", "dev", device, "root", *bucket)

    def carried_bytes(self, machine: str) -> tuple[int, int]:
        """Return the bytes that a machine has sent and received over its link, with all headers."""
        text = _run(*self.command_prefix(machine), "cat", "/proc/net/dev")
        line = next(line for line in text.splitlines() if line.strip().startswith("link0:"))
        columns = line.partition(":")[2].split()
        return int(columns[8]), int(columns[0])


def _ip(namespace: str, *arguments: str) -> None:
    _run("ip", "-n", namespace, *arguments)


def _run(*command: str) -> str:
    result = subprocess.run(command, check=False, capture_output=True, text=True)
    if result.returncode:
        raise NamespaceError(f"{' '.join(command)}: {result.stderr.strip() or f'exit code {result.returncode}'}")
    return result.stdout
