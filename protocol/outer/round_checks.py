"""Which site trains on which group in a round, and what a round manifest and a contribution must be, given the manifest
that opened the round (docs/spec/outer-round.md). No I/O.

Order of checks of a round manifest whose envelope is verified: run, number, link, epoch, beacon round, workers, quorum,
state and version. Of a contribution: run, number, opening, beacon round, state, groups.
"""

from collections.abc import Collection, Sequence
from hashlib import sha256
from typing import Final

from protocol import limits
from protocol.errors import ChainError, ForkError, GapError, ProtocolError, RollbackError
from protocol.identity.signing import Signed
from protocol.outer.round_records import RefusalReason, RoundContribution, RoundManifest

_DOMAIN: Final = b"grailnode/1 deal"
_SENDER_DOMAIN: Final = b"grailnode/1 sender"

DELAYED_TURN: Final = 4
"""Rounds with a delay that deal groups alike."""


def turn_of(number: int, delay: int) -> int:
    """Return the turn in which the groups of a round are dealt: the round or, with a delay, several rounds."""
    return number // DELAYED_TURN if delay else number


def owner(run: bytes, turn: int, group: bytes, workers: Sequence[bytes]) -> bytes:
    """Return the key of the worker, of at least one, to which a group (its digest) belongs in a turn (`turn_of`). The
    work does not grow with their number.
    """
    drawn = sha256(_DOMAIN + run + turn.to_bytes(8, "little") + group).digest()
    return workers[int.from_bytes(drawn[:16], "little") % len(workers)]


def most_groups(sites: int) -> int:
    """Return how many groups each of so many sites may use in a round."""
    return min(limits.MAX_ROUND_GROUPS, limits.MAX_ALL_ROUND_GROUPS // sites)


def sender_digest(opening: bytes, worker: bytes) -> bytes:
    """Return the 32 bytes in the head of a payload that bind it to its site and its round, by the SHA-256 of the body
    of the opening manifest, so that nobody else can send the same bytes.
    """
    return sha256(_SENDER_DOMAIN + opening + worker).digest()


class RefusedContributionError(ProtocolError):
    """A contribution must not count, for the reason that the round manifest gives."""

    def __init__(self, what: str, where: str = "contribution", reason: RefusalReason = RefusalReason.MALFORMED) -> None:
        super().__init__(what, where)
        self.reason = reason


def check_next_manifest(trusted: Signed[RoundManifest], following: Signed[RoundManifest]) -> None:
    """Check a round manifest against the trusted one before it. ChainError: it is of another run, or contradicts itself
    or that manifest. RollbackError, GapError: it is not the next one, or its epoch is lower. ForkError: it does not
    continue the trusted one.
    """
    opening, closing = trusted.record, following.record
    place = f"round manifest {closing.number}"
    if closing.run != opening.run:
        raise ChainError("of another run", place)
    if closing.number != opening.number + 1:
        kind = RollbackError if closing.number <= opening.number else GapError
        raise kind(f"not the one that follows {opening.number}", place)
    if closing.previous != trusted.digest:
        raise ForkError("does not continue the round manifest before it", place)
    if closing.epoch < opening.epoch:
        raise RollbackError(f"epoch {closing.epoch} after {opening.epoch}", place)
    if closing.beacon_round < opening.closes:
        raise ChainError("closes a round before its time", place)
    workers = sorted([*(item.worker for item in closing.counted), *(item.worker for item in closing.refused)])
    if workers != list(opening.workers):
        raise ChainError("does not say what became of each worker", place)
    if 0 < len(closing.counted) < opening.rules.quorum:
        raise ChainError(f"{len(closing.counted)} contributions where {opening.rules.quorum} are needed", place)
    if not {key for share in closing.aggregated for key in (share.worker, share.checker)} <= set(workers):
        raise ChainError("names an aggregator that is no worker", place)
    if closing.aggregated and not opening.rules.spread:
        raise ChainError("names aggregators of a round without", place)
    growth = 1 if closing.counted else 0
    if closing.state.step != opening.state.step + growth or closing.version != opening.version + growth:
        raise ChainError("a step or a version that does not follow", place)
    if not growth and closing.state.weights != opening.state.weights:
        raise ChainError("other weights without a contribution", place)


def check_contribution(
    opening: Signed[RoundManifest], contribution: RoundContribution, used_groups: Collection[bytes]
) -> None:
    """Check a contribution's record against the manifest that opened its round and the groups that earlier ones named;
    the `reason` of a RefusedContributionError says why it must not count.
    """
    manifest = opening.record
    if contribution.run != manifest.run or contribution.number != manifest.number + 1:
        raise RefusedContributionError("of another run or round")
    if contribution.opening != opening.digest:
        raise RefusedContributionError("to a round that another manifest opened", reason=RefusalReason.OTHER_STATE)
    if contribution.beacon_round >= manifest.closes:
        raise RefusedContributionError("signed after the round was closed", reason=RefusalReason.LATE)
    if contribution.state != manifest.state:
        raise RefusedContributionError("starts from another state", reason=RefusalReason.OTHER_STATE)
    if len(contribution.groups) > most_groups(len(manifest.workers)):
        raise RefusedContributionError(f"{len(contribution.groups)} groups of a round with so many sites")
    turn = turn_of(contribution.number, manifest.rules.delay)
    for group in contribution.groups:
        if group in used_groups:
            raise RefusedContributionError(f"group {group.hex()[:16]} is used up", reason=RefusalReason.UNDEALT)
        if owner(manifest.run, turn, group, manifest.workers) != contribution.worker:
            raise RefusedContributionError(
                f"group {group.hex()[:16]} is another worker's", reason=RefusalReason.UNDEALT
            )
