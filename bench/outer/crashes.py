"""A site or the coordinator is killed at many operations, with many seeds: lost and doubled updates."""

from typing import Final

from bench.tables import print_table
from tests.support.simulation.outer_crashes import DELAYED, RULES, STREAMED, STREAMED_AND_DELAYED, kill, operations_of

_WAYS: Final = {"plain": RULES, "delay": DELAYED, "streams": STREAMED, "delay and streams": STREAMED_AND_DELAYED}
"""By name: the rules, which take turns over the seeds."""


def crashes(seeds: int, points: int) -> bool:
    """Kill each process at some points with each seed, print the table, and return whether nothing was violated.

    A point is before or after one of the process's writes and deletions, in its own state or in storage. The checks
    are those of tests/support/simulation/outer_crashes.py: all sites compute the states that the manifests name, no
    group is used twice, no signed object changes, and what a site sent, what counted and its error feedback add up to
    its local updates.
    """
    rows, sound = [], True
    for victim in ("site-0", "coordinator"):
        kills, violations = [0, 0], 0
        for seed in range(seeds):
            rules = list(_WAYS.values())[seed % len(_WAYS)]
            places = len(operations_of(victim, rules, seed))
            for point in range(points):
                place, after = (point * places + seed * places // seeds) // points, point % 2 == 1
                kills[after] += 1
                try:
                    kill(victim, place, after=after, rules=rules, seed=seed)
                except* AssertionError as error:
                    violations += 1
                    print(
                        f"{victim}, seed {seed}, operation {place}, after {after}: {error.exceptions[0]!r}", flush=True
                    )
        rows.append([victim, str(sum(kills)), str(kills[0]), str(kills[1]), str(violations)])
        sound = sound and not violations
        print(f"{victim}: {sum(kills)} kills, {violations} violations", flush=True)
    print_table(f"{points} points, {seeds} seeds", ("killed", "kills", "before", "after", "violations"), rows)
    return sound
