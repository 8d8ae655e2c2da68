"""Table (b): in how many of 100 windows each animal is caught, its first, by the thresholds of either profile, and what for.

An animal works once; both validators judge the same bytes. Results go line by line into a file, which a second call goes on
with.
"""

import json
from collections import Counter
from pathlib import Path
from typing import Any

from bench.proofs.setting import Setting
from bench.zoo.animals import ANIMALS, Animal
from bench.zoo.field import Field, Outcome
from protocol.rollout import assemble
from protocol.run import ProofSpec

GROUPS = 2
SPARSE_GROUPS = 13  # 104 rollouts, so that one of a hundred is one
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
    show(_read(path), tries)


def _fields(setting: Setting, specs: dict[str, ProofSpec], groups: int) -> dict[str, Field]:
    """One field for each profile; engines, honest work and what validators remember are shared."""
    first: Field | None = None
    fields = {}
    for name, spec in specs.items():
        field = setting.field(spec, groups)
        if first is not None:
            field.share(first)
        fields[name], first = field, first or field
    return fields


async def _tries(
    fields: dict[str, Field], animal: Animal, tries: int, path: Path, done: dict[tuple[str, int], dict[str, Any]]
) -> None:
    home = next(iter(fields.values()))
    for window in range(tries):
        if (animal.name, window) in done:
            continue
        home.works.clear()
        groups = await animal.at(home).produce(home.turn(window), range(home.groups))
        batch, commitment = assemble(groups)
        works = dict(home.works)
        line: dict[str, Any] = {"animal": animal.name, "window": window}
        for name, field in fields.items():
            home.works.clear()
            home.works.update(works)
            outcome = await field.judge(batch, commitment, field.miner)
            line[name] = _said(outcome)
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
    print(f"  {animal.name}", flush=True)


def _said(outcome: Outcome) -> dict[str, Any]:
    return {"reasons": dict(outcome.reasons), "accepted": outcome.accepted, "tokens": outcome.tokens}


def _read(path: Path) -> dict[tuple[str, int], dict[str, Any]]:
    if not path.is_file():
        return {}
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return {(line["animal"], line["window"]): line for line in lines}


def show(done: dict[tuple[str, int], dict[str, Any]], tries: int) -> None:
    """Print the table of what is there."""
    print(f"{'animal':45} {'tries':>5} {'tokens':>6}  {'float32':>8} {'mixed':>6}  reasons (float32)")
    for name, animal in ANIMALS.items():
        lines = [done[name, window] for window in range(tries) if (name, window) in done]
        if not lines:
            continue
        caught = {
            profile: sum(
                bool(line[profile]["reasons"]) and line[profile]["reasons"].keys() <= animal.due for line in lines
            )
            for profile in ("float32", "mixed")
        }
        reasons: Counter[str] = Counter()
        for line in lines:
            reasons.update(line["float32"]["reasons"])
        tokens = sum(line["float32"]["tokens"] for line in lines) // len(lines)
        said = ", ".join(f"{reason} {count}" for reason, count in reasons.most_common())
        print(f"{name:45} {len(lines):5} {tokens:6}  {caught['float32']:8} {caught['mixed']:6}  {said}")
