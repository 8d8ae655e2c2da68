"""Scenarios with one fault, or two at once: of storage, the network, disks, clocks or the beacon."""

from dataclasses import dataclass, field
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


@dataclass(frozen=True)
class FaultScenario:
    """Faults in the first windows of a network; the fields are those of FaultSchedule."""

    rates: dict[Fault, float] = field(default_factory=dict)
    state_rates: dict[Fault, float] = field(default_factory=dict)
    cuts: tuple[LinkCut, ...] = ()
    jumps: tuple[ClockJump, ...] = ()
    beacon_outage: float = 0.0
    beacon_is_false: bool = False

    def __add__(self, other: "FaultScenario") -> "FaultScenario":
        """Return the scenario with the faults of both."""
        return FaultScenario(
            self.rates | other.rates,
            self.state_rates | other.state_rates,
            self.cuts + other.cuts,
            self.jumps + other.jumps,
            max(self.beacon_outage, other.beacon_outage),
            self.beacon_is_false or other.beacon_is_false,
        )

    def schedule(self, seed: int) -> FaultSchedule:
        """Return the schedule of a network with one miner, one validator and these faults."""
        return FaultSchedule(
            seed=seed,
            miners=1,
            validators=1,
            quorum=1,
            anchor_interval=2,
            keep_patches=4,
            **vars(self),
        )


def _partition(link: Link) -> FaultScenario:
    return FaultScenario(cuts=tuple(LinkCut(process, 1.5, 2.5, link) for process in _PROCESSES))


def _jumps(seconds: float, *nodes: str) -> FaultScenario:
    return FaultScenario(jumps=tuple(ClockJump(node, 2.0, seconds) for node in nodes))


SCENARIOS: Final[dict[str, FaultScenario]] = {
    **{
        f"storage: {fault.value}": FaultScenario(rates={fault: 0.6 if fault.name.startswith("LIST_") else 0.2})
        for fault in Fault
    },
    "network: partition": _partition(Link.NO_REQUESTS),
    "network: one-way partition": _partition(Link.NO_ANSWERS),
    "disk: errors (ENOSPC, EIO, EMFILE, read-only)": FaultScenario(state_rates={Fault.ERROR: 0.05}),
    "disk: done, and an error": FaultScenario(state_rates={Fault.LOST_ANSWER: 0.05}),
    **{f"clock: {name} an hour fast": _jumps(_HOUR, *nodes) for name, nodes in _CLOCKS.items()},
    **{f"clock: {name} an hour slow": _jumps(-_HOUR, *nodes) for name, nodes in _CLOCKS.items()},
    "beacon: late": FaultScenario(beacon_outage=2.5),
    "beacon: wrong": FaultScenario(beacon_outage=2.5, beacon_is_false=True),
}
"""The scenarios by name. The adapters turn faults of HTTP into these faults (tests/store)."""
