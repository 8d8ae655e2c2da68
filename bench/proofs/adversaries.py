"""Table (b): in how many of 100 windows each animal is caught, its first, by the thresholds of either profile, and what
for.

An animal works once; both validators judge the same bytes. Results go line by line into a file, which a second call
goes on with.
"""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import trio

from bench.proofs.setting import Setting
from protocol.judging.evidence import Counts, history_surprisal, surprisal_threshold
from protocol.rollout.batch import Commitment, assemble
from protocol.run import ProofSpec
from roles.gather import gather
from tests.support.adversaries.harness import Field, Outcome
from tests.support.adversaries.miners import ANIMALS, Animal

GROUPS = 2
SPARSE_GROUPS = 13  # 104 rollouts, so that one of a hundred is one
_AT_ONCE = 8  # windows side by side
SPARSE = ("one edited token in 1% of rollouts", "one edited token in 10% of rollouts")


async def table(setting: Setting, tries: int, calibration: int, only: str) -> None:
    """Run what is missing, then print."""
    specs = {profile.name: await setting.proof(profile, calibration) for profile in setting.profiles()}
    path = setting.cache / "animals.jsonl"
    done = _read(path)
    for groups, names in ((GROUPS, [n for n in ANIMALS if n not in SPARSE]), (SPARSE_GROUPS, list(SPARSE))):
        fields = _fields(setting, specs, groups)
        for name in names:
            if only in name:
                await _tries(fields, ANIMALS[name], tries, path, done)
    show(_read(path), tries, specs)


def _fields(setting: Setting, specs: dict[str, ProofSpec], groups: int) -> dict[str, Field]:
    """One field for each profile; engines and honest work are shared."""
    first: Field | None = None
    fields = {}
    for name, spec in specs.items():
        field = setting.field(spec, groups, together=True)
        if first is not None:
            field.share(first)
        fields[name], first = field, first or field
    return fields


async def _tries(
    fields: dict[str, Field], animal: Animal, tries: int, path: Path, done: dict[tuple[str, int], dict[str, Any]]
) -> None:
    missing = [window for window in range(tries) if (animal.name, window) not in done]
    for begin in range(0, len(missing), _AT_ONCE):
        lines = await _windows(fields, animal, missing[begin : begin + _AT_ONCE])
        with path.open("a", encoding="utf-8") as file:
            file.write("".join(json.dumps(line) + "\n" for line in lines))
    print(f"  {animal.name}", flush=True)


async def _windows(fields: dict[str, Field], animal: Animal, windows: list[int]) -> list[dict[str, Any]]:
    """What is said of the animal in these windows, by window and profile."""
    home = next(iter(fields.values()))
    home.works.clear()

    async def produce(window: int) -> tuple[bytes, Commitment]:
        return assemble(await animal.at(home).produce(home.mining_window(window), range(home.groups)))

    delivered = await gather(produce, windows)
    works = dict(home.works)
    lines: list[dict[str, Any]] = [{"animal": animal.name, "window": window} for window in windows]

    async def judge(name: str) -> None:
        field = fields[name]
        field.works = dict(works)
        outcomes = await gather(lambda item: field.judge(*item, field.miner), delivered)
        for line, outcome in zip(lines, outcomes, strict=True):
            line[name] = _said(outcome)

    async with trio.open_nursery() as nursery:
        for name in fields:
            nursery.start_soon(judge, name)
    return lines


def _said(outcome: Outcome) -> dict[str, Any]:
    counts = list(vars(outcome.counts).values())
    return {"reasons": dict(outcome.reasons), "accepted": outcome.accepted, "tokens": outcome.tokens, "counts": counts}


def _read(path: Path) -> dict[tuple[str, int], dict[str, Any]]:
    if not path.is_file():
        return {}
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return {(line["animal"], line["window"]): line for line in lines}


def _windows_until_refused(lines: list[dict[str, Any]], proof: ProofSpec) -> str:
    """The window, the first being 1, in which a miner that goes on like this is refused; a dash where it never is."""
    history: list[Counts] = []
    for number, line in enumerate(lines, 1):
        history.append(Counts(*line["counts"]))
        if line["reasons"] or history_surprisal(history, proof) > surprisal_threshold(proof):
            return str(number)
    return "-"


def show(done: dict[tuple[str, int], dict[str, Any]], tries: int, specs: dict[str, ProofSpec]) -> None:
    """Print the table of what is there: of so many tries (windows) caught in the first, and by which window at last."""
    print(
        f"{'animal':45} {'tries':>5} {'tokens':>6}  {'float32':>7} {'by':>3}  {'mixed':>5} {'by':>3}  reasons (float32)"
    )
    for name, animal in ANIMALS.items():
        lines = [done[name, window] for window in range(tries) if (name, window) in done]
        if not lines:
            continue
        caught = {
            profile: sum(animal.fits(line[profile]["reasons"]) for line in lines) for profile in ("float32", "mixed")
        }
        reasons: Counter[str] = Counter()
        for line in lines:
            reasons.update(line["float32"]["reasons"])
        tokens = sum(line["float32"]["tokens"] for line in lines) // len(lines)
        said = ", ".join(f"{reason} {count}" for reason, count in reasons.most_common())
        latest = {
            profile: _windows_until_refused([line[profile] for line in lines], specs[profile]) for profile in caught
        }
        print(
            f"{name:45} {len(lines):5} {tokens:6}  {caught['float32']:7} {latest['float32']:>3}  {caught['mixed']:5} "
            f"{latest['mixed']:>3}  {said}"
        )
