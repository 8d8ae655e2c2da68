"""Scenarios with one fault: of storage, the network, disks, clocks or the beacon."""

from typing import Final

from tests.support.faults.faulty_store import Fault, Link
from tests.support.simulation.faulty_network import TRAINER, ClockJump, FaultSchedule, LinkCut

_PROCESSES: Final = (*TRAINER, "miner-1", "validator-0")
_HOUR: Final = 3600.0
_CLOCKS: Final = {
    "the trainer's": ("trainer",),
    "the miner's": ("miner-1",),
    "the validator's": ("validator-0",),
    "everybody's": ("trainer", "miner-1", "validator-0"),
}


def _partition(link: Link) -> FaultSchedule:
    return FaultSchedule(cuts=tuple(LinkCut(process, 1.5, 2.5, link) for process in _PROCESSES))


def _jumps(seconds: float, *nodes: str) -> FaultSchedule:
    return FaultSchedule(jumps=tuple(ClockJump(node, 2.0, seconds) for node in nodes))


SCENARIOS: Final[dict[str, FaultSchedule]] = {
    **{
        f"storage: {fault.value}": FaultSchedule(rates={fault: 0.6 if fault.name.startswith("LIST_") else 0.2})
        for fault in Fault
    },
    "network: partition": _partition(Link.NO_REQUESTS),
    "network: one-way partition": _partition(Link.NO_ANSWERS),
    "disk: errors (ENOSPC, EIO, EMFILE, read-only)": FaultSchedule(state_rates={Fault.ERROR: 0.05}),
    "disk: done, and an error": FaultSchedule(state_rates={Fault.LOST_ANSWER: 0.05}),
    **{f"clock: {name} an hour fast": _jumps(_HOUR, *nodes) for name, nodes in _CLOCKS.items()},
    **{f"clock: {name} an hour slow": _jumps(-_HOUR, *nodes) for name, nodes in _CLOCKS.items()},
    "beacon: late": FaultSchedule(beacon_outage=2.5),
    "beacon: wrong": FaultSchedule(beacon_outage=2.5, beacon_is_false=True),
}
"""The scenarios by name, of a network with one miner and one validator. The adapters turn faults of HTTP into these
faults (tests/store).
"""
