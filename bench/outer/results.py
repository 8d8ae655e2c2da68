"""Trials that have been run, in a file with a line for each, so that a table can be made of what is there."""

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path

from bench.outer.trials import Outcome, Trial, run_trial


class Results:
    """The outcomes of trials.

    Args:
        path: of the file; None to keep nothing.
        run: whether trials that are not in the file are run; else they are left out.
    """

    def __init__(self, path: Path | None, *, run: bool = True, show: Callable[[str], None] = print) -> None:
        self._path, self._run, self._show = path, run, show
        self._outcomes: dict[Trial, Outcome] = {}
        if path is not None and path.exists():
            for line in path.read_text(encoding="utf-8").splitlines():
                row = json.loads(line)
                self._outcomes[Trial(**row["trial"])] = Outcome(**row["outcome"])

    def of(self, trials: Iterable[Trial]) -> list[Outcome]:
        """Return the outcomes of those trials that there are."""
        outcomes = []
        for trial in trials:
            if trial not in self._outcomes and self._run:
                self._outcomes[trial] = run_trial(trial)
                self._keep(trial)
            if trial in self._outcomes:
                outcomes.append(self._outcomes[trial])
        return outcomes

    def _keep(self, trial: Trial) -> None:
        outcome = self._outcomes[trial]
        if self._path is not None:
            row = {"trial": asdict(trial), "outcome": asdict(outcome)}
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
        self._show(f"{trial}: end {outcome.end:.3f}, area {outcome.area:.3f}")
