"""The kinds of objects in a node's state, and what each holds: for the line that says that one is damaged."""

from typing import Final

_CONTENTS: Final = {
    ".names": "the names of all objects of this state",
    "trust": "the oldest chain that this node may follow",
    "authority/": "who may act in the run",
    "announcements/": "where another participant is",
    "proof-of-work": "this miner's proof of work",
    "ledger/": "a window of this validator's ledger, from which its scores follow",
    "ledger-floor": "the newest window that this validator must not seal again",
    "sealed/": "a verdict of a window that is sealed and not revealed",
    "pending/": "a window that is sealed and not revealed",
    "witness/": "the witness of a window that is sealed and not revealed",
    "weights/": "the weights of a version, which this trainer publishes or makes its next patch from",
    "chain/": "what this trainer has published and must not sign twice",
    "training/": "the note of a checkpoint with which training goes on",
    "checkpoints/": "the weights, the optimizer's state or the waiting groups with which training goes on",
    "outbox/": "a version that is not published yet",
    "inbox/": "verified groups that are not trained on yet",
    "intents/": "a decision on groups that is not carried out yet",
    "outcomes/": "the record by which no group is trained on twice",
    "collector-progress": "the record by which no group is trained on twice",
    "outer/": "the rounds of sites that train together",
    "canaries/": "the log-probabilities of a true group of this trainer's canary",
    "distrusted/": "the reason why a validator's verdicts do not count",
}

REMAKEABLE: Final = ("announcements/", "proof-of-work", "canaries/")
"""Kinds that a node makes again by itself, or works without, when one is missing or damaged."""


def contents(path: str) -> str:
    """Return what an object of a node's state holds, as a noun phrase."""
    prefixes = [prefix for prefix in _CONTENTS if path.startswith(prefix)]
    return _CONTENTS[max(prefixes, key=len)] if prefixes else "a part of this node's state"
