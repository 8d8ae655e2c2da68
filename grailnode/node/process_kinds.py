"""The kinds of processes that nodes have."""

from typing import Final, Literal

Kind = Literal[
    "beacon", "training", "upload", "download", "canary", "tracking", "coordinator", "site", "miner", "validator"
]
TRAINER_KINDS: Final[tuple[Kind, ...]] = (
    "beacon",
    "training",
    "upload",
    "download",
    "canary",
    "tracking",
    "coordinator",
)
