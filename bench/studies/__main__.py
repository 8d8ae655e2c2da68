"""How many weights change between versions, and why: PULSE, section 3 and appendices A and G, in small.

    python -m bench.studies rates        by the number of steps between versions, learning rate and dtype
    python -m bench.studies gradients    gradients and updates beside what changes, sizes of updates
    python -m bench.studies staleness    by the age of the rollouts, with what is learned from them
    python -m bench.studies smollm2 --directory DIR --results FILE    the same of SmolLM2, with its patches

Each command prints tables and draws figures (SVG) into `--figures`. Two workloads take the place of a large model: the
packaged policy, which learns from rollouts of its own with the product's learner, and a matrix with the weights of a
real layer under gradients of noise. With `--results FILE` each run is written there as soon as it has ended, and runs
that are there are not made again: the first two commands share theirs. A run takes 5 to 20 CPU seconds; `rates` has 14,
`staleness` 25. The commands need the `test` extra.
"""

import argparse
from pathlib import Path
from typing import Final

import torch

from bench.studies.gradients import study_gradients
from bench.studies.real_policy import study_real_policy
from bench.studies.records import Records
from bench.studies.sparsity import study_rates
from bench.studies.staleness import POLICIES, study_staleness

STUDIES: Final = {"rates": study_rates, "gradients": study_gradients}


def main() -> None:
    """Run the chosen study."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", choices=(*STUDIES, "staleness", "smollm2"))
    parser.add_argument("--figures", type=Path, default=Path("docs/benchmarks/figures"), help="directory of figures")
    parser.add_argument("--seeds", type=int, default=5, help="seeds of `staleness`")
    parser.add_argument("--policy", choices=POLICIES, default="packaged", help="policy of `staleness`")
    parser.add_argument("--results", type=Path, help="file for runs; one for `staleness`, one for the others")
    parser.add_argument("--directory", type=Path, help="SmolLM2's checkpoint, as `grailnode demo` has made it")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.study == "smollm2":
        study_real_policy(arguments.directory, arguments.results, arguments.figures)
    elif arguments.study == "staleness":
        study_staleness(arguments.policy, arguments.figures, arguments.results, arguments.seeds)
    else:
        STUDIES[arguments.study](Records(arguments.results), arguments.figures)


if __name__ == "__main__":
    main()
