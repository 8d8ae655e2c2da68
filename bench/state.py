"""Damage every kind of file of every role's state in every way, and show what the node does: `python -m bench.state`.

Simulated networks with states on a real disk are stopped at five moments, at which together they have an object of
every kind. For each node and kind, the newest file is cut, emptied, zeroed, put into the form without an envelope,
removed, replaced by a folder, made unreadable, and bent in one of --bits bits; for each of these the network goes on
for three windows. A cell of the table says:

    line     the node ended with one line that names the file and that a restart does not change
    right    it went on, and everybody can check what it published
    FAULT    a traceback, more than one line, a restart without end, or something wrong that was published

The last column repairs the state after each damage but a bent bit: "whole" if the node then goes on rightly, else the
line with which the repair refuses. The exit code is 1 if there is a fault. As root, it starts itself again without the
right to read everything (setpriv).
"""

import argparse
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from roles.ports import RepairError, StateError
from tests.support.simulation.damaged_states import (
    DAMAGES,
    MOMENTS,
    Damage,
    Outcome,
    StateFile,
    bend,
    files_by_kind,
    forbid,
    outcome,
    repair,
    stopped_network,
)
from tests.support.simulation.virtual_clock import simulate

_UNPRIVILEGED: Final = "GRAILNODE_BENCH_STATE"
_HEADINGS: Final = (*DAMAGES, "unreadable", "bits", "repaired")


def _take_damage(state_file: StateFile, root: Path, damage: Damage) -> Outcome:
    """Return how a node takes a damage."""

    async def go_on() -> Outcome:
        network = state_file.network.copy(root)
        damage(root / state_file.node / state_file.path)
        return await outcome(network, state_file.node)

    result = simulate(go_on)
    if result.line is not None and state_file.path not in result.line:
        return Outcome(fault=f"the line does not name the file: {result.line}")
    return result


def _repaired(state_file: StateFile, root: Path, damage: Damage) -> str:
    """Return what comes of a repair."""

    async def go_on() -> Outcome | str:
        network = state_file.network.copy(root)
        damage(root / state_file.node / state_file.path)
        try:
            await repair(network, state_file.node)
        except (RepairError, StateError) as error:
            return str(error)
        return await outcome(network, state_file.node)

    result = simulate(go_on)
    if isinstance(result, str):
        return result
    return "whole" if result == Outcome() else f"FAULT: {result.fault or result.line}"


def _cell(results: Mapping[str, Outcome], faults: list[str]) -> str:
    """Return a cell of the table, and add the faults to a list."""
    counts: Counter[str] = Counter()
    for name, result in results.items():
        if result.fault is not None:
            counts["FAULT"] += 1
            faults.append(f"{name}: {result.fault}")
        else:
            counts["right" if result.line is None else "line"] += 1
    if len(results) == 1:
        return next(iter(counts))
    return ", ".join(f"{count} {word}" for word, count in sorted(counts.items()))


def _row(state_file: StateFile, bits: int, new_root: Callable[[], Path], faults: list[str]) -> list[str]:
    """Return the cells of one kind of file."""
    place = f"{state_file.node} {state_file.path}"
    cells = [
        _cell({f"{place}, {name}": _take_damage(state_file, new_root(), damage)}, faults)
        for name, damage in (DAMAGES | {"unreadable": forbid}).items()
    ]
    bit_flips = {f"{place}, bit {number}": _take_damage(state_file, new_root(), bend(number)) for number in range(bits)}
    cells.append(_cell(bit_flips, faults))
    repairs = Counter(_repaired(state_file, new_root(), damage) for damage in DAMAGES.values())
    faults += [f"{place}, repaired: {text}" for text in repairs if text.startswith("FAULT")]
    cells.append("; ".join(f"{count} {text}" for text, count in repairs.items()))
    return cells


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--bits", type=int, default=40, help="bits to bend in each file, one at a time")
    parser.add_argument("--only", default="", help="only nodes and kinds whose names contain this")
    options = parser.parse_args()
    if os.geteuid() == 0 and _UNPRIVILEGED not in os.environ:
        rights = "--bounding-set=-dac_override,-dac_read_search"
        command = ["setpriv", rights, sys.executable, "-m", "bench.state", *sys.argv[1:]]
        os.execvpe("setpriv", command, os.environ | {_UNPRIVILEGED: "1"})
    faults: list[str] = []
    runs = 0
    with tempfile.TemporaryDirectory() as directory:

        def new_root() -> Path:
            nonlocal runs
            runs += 1
            return Path(directory) / f"run-{runs}"

        networks = [
            simulate(stopped_network, Path(directory) / f"moment-{number}", moment)
            for number, moment in enumerate(MOMENTS)
        ]
        print(f"| node | file | {' | '.join(_HEADINGS)} |\n{'|---' * (2 + len(_HEADINGS))}|")
        for state_file in files_by_kind(networks):
            if options.only in f"{state_file.node} {state_file.kind}":
                cells = _row(state_file, options.bits, new_root, faults)
                print(f"| {state_file.node} | `{state_file.kind}` | {' | '.join(cells)} |", flush=True)
    print(f"\n{runs} networks went on with a damaged or a repaired state; {len(faults)} faults")
    for fault in faults:
        print(fault)
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    main()
