"""Learning and acceptance in the demo, for several seeds: `python -m bench.demo --seeds 5 [--out DIR]`.

The command runs `grailnode demo` once for each seed and prints a row for each: how many windows were judged and how
many versions published, pass@1 at the begin and at the end, the share of weights that a version leaves unchanged, how
many groups of the honest and of the cheating miners were accepted, whether all nodes end with equal weights, and the
share of its time that the trainer waits for storage. A seed takes about 155 seconds on two idle cores. Nothing else
should run on the machine; the command needs nothing but the installed program.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from grailnode.observe.state import MinerRow
from grailnode.ui.report_data import DemoReport

_HEADER = (
    "seed  windows  versions  pass@1           rise    sparsity  honest accepted  cheat accepted  "
    "digests  I/O wait  seconds"
)


def run(seed: int, out: Path) -> DemoReport:
    """Run one demo with the default number of windows and return its report."""
    command = [sys.executable, "-m", "grailnode", "demo", "--seed", str(seed), "--out", str(out)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return DemoReport.model_validate_json((out / "report.json").read_bytes())


def row(report: DemoReport) -> str:
    """Return the row of a report."""
    state = report.state
    pass_rates = [row.pass_at_1 for row in state.windows if row.pass_at_1 is not None]
    sparsity = [row.sparsity for row in state.versions if row.sparsity is not None]
    honest = [miner for miner in state.miners if miner.kind == "honest"]
    cheats = [miner for miner in state.miners if miner.kind == "cheating"]

    def count_text(miners: list[MinerRow]) -> str:
        return f"{sum(miner.accepted for miner in miners)} of {sum(miner.submitted for miner in miners)}"

    equality = "equal" if len(set(report.weights_digest.values())) == 1 else "UNEQUAL"
    return (
        f"{report.seed:4}  {len(state.windows):7}  {len(state.versions):8}  "
        f"{pass_rates[0]:.3f} -> {pass_rates[-1]:.3f}  "
        f"{pass_rates[-1] - pass_rates[0]:+.3f}  {sum(sparsity) / len(sparsity):.4f}    {count_text(honest):16}"
        f" {count_text(cheats):15} {equality:8} {report.trainer_io_wait_fraction:.3f}     "
        f"{state.seconds:.0f}"
    )


def main() -> None:
    """Run the demos and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5, help="how many demos run, with the seeds 0, 1, ...")
    parser.add_argument("--out", type=Path, default=None, help="directory of the demos; the default is a new one")
    arguments = parser.parse_args()
    out = arguments.out or Path(tempfile.mkdtemp(prefix="grailnode-bench-"))
    print(_HEADER, flush=True)
    for seed in range(arguments.seeds):
        print(row(run(seed, out / str(seed))), flush=True)


if __name__ == "__main__":
    main()
