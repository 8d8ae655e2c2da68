"""The public beacons that a run can be founded on, and the relays that serve them.

A chain is pinned by its key and its hash, so relays are trusted with nothing but answering; `[beacon] relays` names
others.
"""

from collections.abc import Mapping
from typing import Final

from protocol.beacon import ChainInfo, quicknet

CHAINS: Final[Mapping[str, ChainInfo]] = {"quicknet": quicknet}
"""By the name that `grailnode init --beacon` takes."""

RELAYS: Final[Mapping[bytes, tuple[str, ...]]] = {
    quicknet.chain_hash: (
        "https://api.drand.sh",
        "https://drand.cloudflare.com",
        "https://api2.drand.sh",
        "https://api3.drand.sh",
    )
}
"""By chain hash, relays of several operators in the order in which they are asked (docs.drand.love,
developer/http-api).
"""

LEAST_ROUNDS: Final = 3
"""Of a window (protocol/window.py)."""


def rounds_of(chain: ChainInfo, window: float) -> int:
    """How many rounds of a chain make a window of about so many seconds.

    Raises:
        ValueError: fewer than a window has.
    """
    rounds = round(window * 1000 / chain.period_ms)
    if rounds < LEAST_ROUNDS:
        raise ValueError(
            f"a window is at least {LEAST_ROUNDS} rounds, {LEAST_ROUNDS * chain.period_ms / 1000:g} s here"
        )
    return rounds
