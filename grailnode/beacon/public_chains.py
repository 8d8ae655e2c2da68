"""The public beacon chains that a run can use, and the relays that serve them.

The run pins a chain by its key and its hash, so a relay can refuse answers, but not falsify them. `[beacon] relays` in
run.toml replaces the relays.
"""

from collections.abc import Mapping
from typing import Final

from protocol.beacon import ChainInfo, quicknet

CHAINS: Final[Mapping[str, ChainInfo]] = {"quicknet": quicknet}
"""Chains by the names that `grailnode init --beacon` accepts."""

RELAYS: Final[Mapping[bytes, tuple[str, ...]]] = {
    quicknet.chain_hash: (
        "https://api.drand.sh",
        "https://drand.cloudflare.com",
        "https://api2.drand.sh",
        "https://api3.drand.sh",
    )
}
"""Relays of several operators by chain hash, in the order in which they are asked (docs.drand.love)."""

MIN_WINDOW_ROUNDS: Final = 3
"""Rounds of a window (protocol/window.py)."""


def rounds_of(chain: ChainInfo, window: float) -> int:
    """Return the number of rounds nearest to `window` seconds; ValueError if it is less than MIN_WINDOW_ROUNDS."""
    rounds = round(window * 1000 / chain.period_ms)
    if rounds < MIN_WINDOW_ROUNDS:
        raise ValueError(
            f"a window is at least {MIN_WINDOW_ROUNDS} rounds, {MIN_WINDOW_ROUNDS * chain.period_ms / 1000:g} s here"
        )
    return rounds
