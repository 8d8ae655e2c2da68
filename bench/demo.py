"""The demo for several seeds, a row each: `python -m bench.demo --seeds 5 [--out DIR]`. Nothing else should run
meanwhile.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from grailnode.ui.report import DemoReport, MinerGroups, read_report

_HEADER = (
    "seed  windows  versions  pass@1           rise    sparsity  honest accepted  cheat accepted  "
    "digests  I/O wait  seconds"
)


def run(seed: int, out: Path) -> DemoReport:
    """One demo, with the default number of windows.

    Raises:
        CalledProcessError: it failed.
    """
    command = [sys.executable, "-m", "grailnode", "demo", "--seed", str(seed), "--out", str(out)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return read_report(out / "report.json")


def row(report: DemoReport) -> str:
    """A report as a line of the table."""
    solved = [value for value in report.pass_at_1 if value is not None]
    sparsity = [value for value in report.sparsity if value is not None]
    honest = [miner for miner in report.groups if miner.kind == "honest"]
    cheats = [miner for miner in report.groups if miner.kind == "cheating"]

    def accepted(miners: list[MinerGroups]) -> str:
        return f"{sum(miner.accepted for miner in miners)} of {sum(miner.submitted for miner in miners)}"

    equal = len(set(report.weights_digest.values())) == 1
    return (
        f"{report.seed:4}  {report.windows:7}  {report.versions:8}  {solved[0]:.3f} -> {solved[-1]:.3f}  "
        f"{solved[-1] - solved[0]:+.3f}  {sum(sparsity) / len(sparsity):.4f}    {accepted(honest):16}"
        f" {accepted(cheats):15} {'equal' if equal else 'UNEQUAL':8} {report.trainer_io_wait_fraction:.3f}     "
        f"{report.seconds:.0f}"
    )


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=None)
    arguments = parser.parse_args()
    out = arguments.out or Path(tempfile.mkdtemp(prefix="grailnode-bench-"))
    print(_HEADER, flush=True)
    for seed in range(arguments.seeds):
        print(row(run(seed, out / str(seed))), flush=True)


if __name__ == "__main__":
    main()
