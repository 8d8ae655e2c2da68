"""What a validator counts by stratum: the groups that it accepts, and the uneven ones (docs/spec/difficulty.md)."""

from collections.abc import Callable, Iterable, Iterator, Sequence

from protocol.environments.mixture import drawn_member
from protocol.judging.verdict import Verdict
from protocol.rollout import challenge

SharesOf = Callable[[int], Sequence[int]]
"""Returns the share of each stratum, in millionths, by which the groups of a version draw; empty in a run without."""


def accepted_groups(
    run_id: bytes, randomness: bytes, verdicts: Iterable[Verdict], shares_of: SharesOf
) -> Iterator[tuple[int, bool]]:
    """Yield the number of the stratum of each accepted group, and whether its rewards are not all equal. The randomness
    is that of the round that opened the verdicts' window.
    """
    for verdict in verdicts:
        accepted = [judgement for judgement in verdict.judgements if judgement.accepted]
        shares = shares_of(verdict.version) if accepted else ()
        for judgement in accepted:
            seed = challenge.group_seed(run_id, verdict.window, randomness, verdict.miner, judgement.index)
            yield drawn_member(shares, seed), len(set(judgement.rewards)) > 1
