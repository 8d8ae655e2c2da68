"""Table (b): in how many of 100 first windows each adversary is refused in each profile.

An adversary computes as the nodes of the profile do. Results are appended to a file line by line; a second call adds
those that are missing.
"""

import json
import sys
from pathlib import Path
from typing import Any

from bench.proofs.profiles import PROFILES, Profile, select
from bench.proofs.setting import Setting
from protocol.judging.evidence import NO_EVIDENCE, Counts, advance, exceeded
from protocol.proof import Thresholds
from protocol.rollout.batch import Commitment, assemble
from roles.gather import gather
from tests.support.adversaries.harness import TrialHarness, TrialOutcome
from tests.support.adversaries.miners import ADVERSARIES, Adversary

GROUPS = 2
SPARSE_GROUPS = 13  # 104 rollouts, of which 1% is one rollout
_CONCURRENT_WINDOWS = 8
SPARSE_NAMES = ("one edited token in 1% of rollouts", "one edited token in 10% of rollouts")


async def table(setting: Setting, tries: int, only: str, profiles: str) -> None:
    """Run the windows that are missing, then print the table of all that have results.

    Args:
        setting: the policy and the folder of results.
        tries: windows of each adversary.
        only: part of the names of the adversaries that run; empty for all.
        profiles: part of the names of the profiles in which they run; empty for all.
    """
    for profile in select(profiles):
        row = await profile.thresholds(setting)
        path = _path(setting, profile)
        for groups, names in (
            (GROUPS, [name for name in ADVERSARIES if name not in SPARSE_NAMES]),
            (SPARSE_GROUPS, list(SPARSE_NAMES)),
        ):
            harness = profile.harness(setting, row, groups)
            for name in names:
                if only in name:
                    await _run_missing_windows(harness, ADVERSARIES[name], tries, path)
    await show(setting, tries)


def _path(setting: Setting, profile: Profile) -> Path:
    return setting.cache / f"adversaries-{profile.name.replace(' ', '-')}.jsonl"


async def _run_missing_windows(harness: TrialHarness, adversary: Adversary, tries: int, path: Path) -> None:
    done = _read_lines(path)
    missing = [window for window in range(tries) if (adversary.name, window) not in done]
    for start in range(0, len(missing), _CONCURRENT_WINDOWS):
        lines = await _judge_windows(harness, adversary, missing[start : start + _CONCURRENT_WINDOWS])
        with path.open("a", encoding="utf-8") as file:
            file.write("".join(json.dumps(line) + "\n" for line in lines))
    if missing:
        print(f"  {path.stem}: {adversary.name}", file=sys.stderr, flush=True)


async def _judge_windows(harness: TrialHarness, adversary: Adversary, windows: list[int]) -> list[dict[str, Any]]:
    """Return the outcomes of an adversary's windows, a line for each."""
    harness.accepted_work.clear()

    async def produce(window: int) -> tuple[bytes, Commitment]:
        groups = await adversary.producer(harness).produce(harness.mining_window(window), range(harness.groups))
        return assemble(groups, harness.arithmetic)

    deliveries = await gather(produce, windows)
    outcomes = await gather(lambda item: harness.judge(*item, harness.miner), deliveries)
    return [
        {"adversary": adversary.name, "window": window, **_as_json(outcome)}
        for window, outcome in zip(windows, outcomes, strict=True)
    ]


def _as_json(outcome: TrialOutcome) -> dict[str, Any]:
    counts = outcome.counts.model_dump(mode="json")
    return {"reasons": dict(outcome.reasons), "accepted": outcome.accepted, "tokens": outcome.tokens, "counts": counts}


def _read_lines(path: Path) -> dict[tuple[str, int], dict[str, Any]]:
    if not path.is_file():
        return {}
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return {(line["adversary"], line["window"]): line for line in lines}


def _first_refused_window(lines: list[dict[str, Any]], thresholds: Thresholds) -> str:
    """Return the number of the first refused window of one miner that has all windows, from 1 on, or a dash."""
    evidence = NO_EVIDENCE
    for number, line in enumerate(lines, 1):
        evidence = advance(evidence, Counts.model_validate_json(json.dumps(line["counts"])), thresholds)
        if line["reasons"] or exceeded(evidence, thresholds):
            return str(number)
    return "-"


async def show(setting: Setting, tries: int) -> None:
    """Print the table of the windows that have results.

    A line has, for each profile, how many windows are refused by themselves for a reason that fits, and by which window
    a miner that continues in this way is refused.
    """
    profiles = [profile for profile in PROFILES if _path(setting, profile).is_file()]
    rows = [await profile.thresholds(setting) for profile in profiles]
    results = [_read_lines(_path(setting, profile)) for profile in profiles]
    print(f"{'adversary':45} {'tokens':>6}" + "".join(f"  {profile.name:>14} {'by':>3}" for profile in profiles))
    for name, adversary in ADVERSARIES.items():
        line = ""
        for row, lines_by_case in zip(rows, results, strict=True):
            lines = [lines_by_case[name, window] for window in range(tries) if (name, window) in lines_by_case]
            if not lines:
                line += f"  {'':14} {'':3}"
                continue
            line = line or f" {sum(item['tokens'] for item in lines) // len(lines):6}"
            count = f"{sum(adversary.explains(item['reasons']) for item in lines)} of {len(lines)}"
            line += f"  {count:>14} {_first_refused_window(lines, row):>3}"
        print(f"{name:45}{line}")
