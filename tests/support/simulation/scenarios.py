"""One trouble, or two at once, in an otherwise fine run: what the storage, the network, the disk, the clock or the
beacon does.
"""

from dataclasses import dataclass, field
from typing import Final

from tests.support.faults.store_faults import Fault, Link
from tests.support.simulation.stormy_network import TRAINER, Cut, Jump, Weather

_PROCESSES: Final = (*TRAINER, "miner-1", "validator-0")
_HOUR: Final = 3600.0
_CLOCKS: Final = {
    "the trainer's": ("trainer",),
    "the miner's": ("miner-1",),
    "the validator's": ("validator-0",),
    "everybody's": ("trainer", "miner-1", "validator-0"),
}


@dataclass(frozen=True)
class Trouble:
    """Something that goes wrong in the first windows, as Weather takes it."""

    rates: dict[Fault, float] = field(default_factory=dict)
    state_rates: dict[Fault, float] = field(default_factory=dict)
    cuts: tuple[Cut, ...] = ()
    jumps: tuple[Jump, ...] = ()
    beacon_away: float = 0.0
    beacon_lies: bool = False

    def __add__(self, other: "Trouble") -> "Trouble":
        """Both at once."""
        return Trouble(
            self.rates | other.rates,
            self.state_rates | other.state_rates,
            self.cuts + other.cuts,
            self.jumps + other.jumps,
            max(self.beacon_away, other.beacon_away),
            self.beacon_lies or other.beacon_lies,
        )

    def weather(self, seed: int) -> Weather:
        """A run of one miner and one validator in which this happens."""
        return Weather(
            seed=seed,
            miners=1,
            validators=1,
            quorum=1,
            anchor_interval=2,
            keep_patches=4,
            rates=self.rates,
            state_rates=self.state_rates,
            cuts=self.cuts,
            jumps=self.jumps,
            beacon_away=self.beacon_away,
            beacon_lies=self.beacon_lies,
        )


def _partition(link: Link) -> Trouble:
    return Trouble(cuts=tuple(Cut(process, 1.5, 2.5, link) for process in _PROCESSES))


def _jumps(seconds: float, *nodes: str) -> Trouble:
    return Trouble(jumps=tuple(Jump(node, 2.0, seconds) for node in nodes))


TROUBLES: Final[dict[str, Trouble]] = {
    **{
        f"storage: {fault.value}": Trouble(rates={fault: 0.6 if fault.name.startswith("LIST_") else 0.2})
        for fault in Fault
    },
    "network: partition": _partition(Link.NO_REQUESTS),
    "network: one-way partition": _partition(Link.NO_ANSWERS),
    "disk: errors (ENOSPC, EIO, EMFILE, read-only)": Trouble(state_rates={Fault.ERROR: 0.05}),
    "disk: done, and an error": Trouble(state_rates={Fault.LOST_ANSWER: 0.05}),
    **{f"clock: {name} an hour fast": _jumps(_HOUR, *nodes) for name, nodes in _CLOCKS.items()},
    **{f"clock: {name} an hour slow": _jumps(-_HOUR, *nodes) for name, nodes in _CLOCKS.items()},
    "beacon: late": Trouble(beacon_away=2.5),
    "beacon: wrong": Trouble(beacon_away=2.5, beacon_lies=True),
}
"""By name. What HTTP can do wrong (status codes, ETags, redirects, bodies) is turned into these by the adapters:
tests/store.
"""
