"""Table (b): in how many of 100 first windows each adversary is refused under each set of thresholds, and for what.

An adversary works once, and the validators of both profiles judge the same bytes. Results are appended to a file line
by line; a second call adds those that are missing.
"""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import trio

from bench.proofs.setting import Setting
from protocol.judging.evidence import Counts, history_surprisal, surprisal_threshold
from protocol.proof import Thresholds
from protocol.rollout.batch import Commitment, assemble
from roles.gather import gather
from tests.support.adversaries.harness import TrialHarness, TrialOutcome
from tests.support.adversaries.miners import ADVERSARIES, Adversary
from tests.support.builders.proofs import windows_of

GROUPS = 2
SPARSE_GROUPS = 13  # 104 rollouts, of which 1% is one rollout
_CONCURRENT_WINDOWS = 8
SPARSE_NAMES = ("one edited token in 1% of rollouts", "one edited token in 10% of rollouts")


async def table(setting: Setting, tries: int, calibration: int, only: str) -> None:
    """Run the windows that are missing, then print the table.

    Args:
        setting: the policy and the folder of results.
        tries: windows of each adversary.
        calibration: groups of each pair for the thresholds.
        only: part of the names of the adversaries that run; empty for all.
    """
    specs = {profile.name: await setting.proof(profile, calibration) for profile in setting.profiles()}
    path = setting.cache / "adversaries.jsonl"
    lines_by_case = _read_lines(path)
    for groups, names in (
        (GROUPS, [n for n in ADVERSARIES if n not in SPARSE_NAMES]),
        (SPARSE_GROUPS, list(SPARSE_NAMES)),
    ):
        harnesses = _make_harnesses(setting, specs, groups)
        for name in names:
            if only in name:
                await _run_missing_windows(harnesses, ADVERSARIES[name], tries, path, lines_by_case)
    show(_read_lines(path), tries, specs)


def _make_harnesses(setting: Setting, specs: dict[str, Thresholds], groups: int) -> dict[str, TrialHarness]:
    """Return a harness for each profile; all use the same engines and honest work."""
    first_harness: TrialHarness | None = None
    harnesses = {}
    for name, spec in specs.items():
        harness = setting.harness(spec, groups, concurrent=True)
        if first_harness is not None:
            harness.share_engines(first_harness)
        harnesses[name], first_harness = harness, first_harness or harness
    return harnesses


async def _run_missing_windows(
    harnesses: dict[str, TrialHarness],
    adversary: Adversary,
    tries: int,
    path: Path,
    lines_by_case: dict[tuple[str, int], dict[str, Any]],
) -> None:
    missing_windows = [window for window in range(tries) if (adversary.name, window) not in lines_by_case]
    for start in range(0, len(missing_windows), _CONCURRENT_WINDOWS):
        lines = await _judge_windows(harnesses, adversary, missing_windows[start : start + _CONCURRENT_WINDOWS])
        with path.open("a", encoding="utf-8") as file:
            file.write("".join(json.dumps(line) + "\n" for line in lines))
    print(f"  {adversary.name}", flush=True)


async def _judge_windows(
    harnesses: dict[str, TrialHarness], adversary: Adversary, windows: list[int]
) -> list[dict[str, Any]]:
    """Return the outcomes of an adversary's windows, a line for each window with an entry for each profile."""
    first_harness = next(iter(harnesses.values()))
    first_harness.accepted_work.clear()

    async def produce(window: int) -> tuple[bytes, Commitment]:
        mining_window = first_harness.mining_window(window)
        groups = await adversary.producer(first_harness).produce(mining_window, range(first_harness.groups))
        return assemble(groups, first_harness.arithmetic)

    deliveries = await gather(produce, windows)
    accepted_work = dict(first_harness.accepted_work)
    lines: list[dict[str, Any]] = [{"adversary": adversary.name, "window": window} for window in windows]

    async def judge(name: str) -> None:
        harness = harnesses[name]
        harness.accepted_work = dict(accepted_work)
        outcomes = await gather(lambda item: harness.judge(*item, harness.miner), deliveries)
        for line, outcome in zip(lines, outcomes, strict=True):
            line[name] = _as_json(outcome)

    async with trio.open_nursery() as nursery:
        for name in harnesses:
            nursery.start_soon(judge, name)
    return lines


def _as_json(outcome: TrialOutcome) -> dict[str, Any]:
    counts = list(vars(outcome.counts).values())
    return {"reasons": dict(outcome.reasons), "accepted": outcome.accepted, "tokens": outcome.tokens, "counts": counts}


def _read_lines(path: Path) -> dict[tuple[str, int], dict[str, Any]]:
    if not path.is_file():
        return {}
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return {(line["adversary"], line["window"]): line for line in lines}


def _first_refused_window(lines: list[dict[str, Any]], thresholds: Thresholds) -> str:
    """Return the number of the first refused window of one miner that has all windows, from 1 on, or a dash."""
    history: list[Counts] = []
    for number, line in enumerate(lines, 1):
        history.append(Counts(*line["counts"]))
        if line["reasons"] or history_surprisal(windows_of(history, thresholds)) > surprisal_threshold(thresholds):
            return str(number)
    return "-"


def show(lines_by_case: dict[tuple[str, int], dict[str, Any]], tries: int, specs: dict[str, Thresholds]) -> None:
    """Print the table of the windows that have results.

    A row has how many windows are refused by themselves for a reason that fits, and by which window a miner that
    continues in this way is refused.
    """
    profile_columns = f"{'float32':>7} {'by':>3}  {'mixed':>5} {'by':>3}"
    print(f"{'adversary':45} {'tries':>5} {'tokens':>6}  {profile_columns}  reasons (float32)")
    for name, adversary in ADVERSARIES.items():
        lines = [lines_by_case[name, window] for window in range(tries) if (name, window) in lines_by_case]
        if not lines:
            continue
        row = f"{name:45} {len(lines):5} {sum(line['float32']['tokens'] for line in lines) // len(lines):6}"
        for profile, width in (("float32", 7), ("mixed", 5)):
            outcomes = [line[profile] for line in lines]
            count = sum(adversary.explains(outcome["reasons"]) for outcome in outcomes)
            row += f"  {count:{width}} {_first_refused_window(outcomes, specs[profile]):>3}"
        reasons: Counter[str] = Counter()
        for line in lines:
            reasons.update(line["float32"]["reasons"])
        print(f"{row}  {', '.join(f'{reason} {count}' for reason, count in reasons.most_common())}")
