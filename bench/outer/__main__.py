"""Sites that train together: learning, bytes, poisoned sites, ablations, and a projection to 7B parameters.

    python -m bench.outer learning      DDP, DiLoCo, PULSELoCo and SparseLoCo: end values, areas, bytes (15 minutes)
    python -m bench.outer bytes         bytes and the share that the gate sends, by learning rate and round
    python -m bench.outer honest        how often honest sites are refused: noisy gradients, or a policy (some minutes)
    python -m bench.outer poisoned      one poisoned site in four, with the bounds and the plain mean (some minutes)
    python -m bench.outer ablations     without error feedback or momentum, other quantizers, a delay, and streams
    python -m bench.outer overlap       the share of time computing, with and without a delay, on a virtual clock
    python -m bench.outer crashes       sites and coordinator killed at 20 operations with 20 seeds each
    python -m bench.outer sites         what a round costs coordinator and site, by the number of sites
    python -m bench.outer projection    a 7B model with H = 8 over 400 Mbit/s from measured rates

Times are CPU seconds of one core. Learning is reinforcement learning of sums with the product's learner; bytes and
projection use weights and steps of a real model's size (bench/outer/sizes.py). With `--results FILE` each trial is
written there as soon as it has run, and trials that are there are not run again; `--print-only` runs nothing. The
commands need the `bench` and `test` extras.
"""

import argparse
import sys
from functools import partial
from pathlib import Path

import torch

from bench.checkpoints import WEIGHT_DEVIATION
from bench.outer.ablations import ablations
from bench.outer.crashes import crashes
from bench.outer.honest import KINDS, RATES, honest
from bench.outer.learning import METHODS, learning
from bench.outer.overlap import overlap
from bench.outer.poisoned import poisoned
from bench.outer.projection import by_sites, projection
from bench.outer.results import Results
from bench.outer.sizes import METHODS as SIZE_METHODS
from bench.outer.sizes import sizes
from bench.outer.trials import ROUNDS


def main() -> None:
    """Run the chosen measurement."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, dest="command")
    command = commands.add_parser("learning")
    _add_trial_options(command, seeds=5)
    command.add_argument("--local-steps", default="8,4,16", help="values of H, in the order in which they are run")
    command.add_argument("--methods", default=",".join(METHODS), help="methods to compare")
    command = commands.add_parser("honest")
    _add_trial_options(command, seeds=10)
    command.add_argument("--policy", default="noise", choices=("noise", *RATES), help="what the sites train")
    command.add_argument("--local-steps", default="1,2,8", help="values of H")
    command.add_argument("--kinds", default=",".join(KINDS), help="kinds of contributions")
    command.add_argument("--rounds", type=int, default=60, help="outer rounds")
    command = commands.add_parser("poisoned")
    command.add_argument("--method", default="grid", help="method that the sites use")
    command.add_argument("--local-steps", type=int, default=8, help="H")
    command.add_argument("--rounds", type=int, default=200, help="outer rounds")
    command.add_argument("--only", action="append", default=[], help="an attack to run; may be repeated")
    command = commands.add_parser("ablations")
    _add_trial_options(command, seeds=2)
    command.add_argument("--local-steps", type=int, default=8, help="H")
    command.add_argument("--rounds", type=int, default=ROUNDS, help="outer rounds")
    command.add_argument("--only", action="append", default=[], help="a method or variation to run; may be repeated")
    command = commands.add_parser("bytes")
    command.add_argument("--rates", default="1e-6,3e-7,3e-6,7e-6", help="learning rates of the sites' AdamW")
    command.add_argument("--rounds", type=int, default=24, help="outer rounds")
    command.add_argument("--local-steps", type=int, default=8, help="H")
    command.add_argument("--deviation", type=float, default=WEIGHT_DEVIATION, help="of the weights of matrices")
    command.add_argument("--methods", default=",".join(SIZE_METHODS), help="methods to compare")
    commands.add_parser("overlap")
    command = commands.add_parser("crashes")
    command.add_argument("--seeds", type=int, default=20, help="of the groups")
    command.add_argument("--points", type=int, default=20, help="operations at which each process is killed")
    command = commands.add_parser("sites")
    command.add_argument("--sites", default="4,16,64", help="numbers of sites")
    command = commands.add_parser("projection")
    command.add_argument("--rounds", type=int, default=12, help="outer rounds before rates are measured")
    command.add_argument("--repeats", type=int, default=3, help="runs of which the fastest counts")
    command.add_argument("--cores", type=int, default=8, help="cores of the second sum")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.command == "honest":
        results, steps = _results(arguments), [int(number) for number in arguments.local_steps.split(",")]
        honest(results, arguments.policy, arguments.seeds, arguments.rounds, steps, arguments.kinds.split(","))
    if arguments.command == "poisoned":
        poisoned(arguments.method, arguments.local_steps, arguments.rounds, arguments.only)
    if arguments.command == "ablations":
        ablations(_results(arguments), arguments.seeds, arguments.local_steps, arguments.only, arguments.rounds)
    if arguments.command == "bytes":
        rates = [float(rate) for rate in arguments.rates.split(",")]
        sizes(rates, arguments.rounds, arguments.local_steps, arguments.deviation, arguments.methods.split(","))
    if arguments.command == "overlap":
        overlap()
    if arguments.command == "crashes" and not crashes(arguments.seeds, arguments.points):
        sys.exit(1)
    if arguments.command == "sites":
        by_sites([int(number) for number in arguments.sites.split(",")])
    if arguments.command == "projection":
        projection(arguments.rounds, arguments.repeats, arguments.cores)
    if arguments.command == "learning":
        steps = [int(number) for number in arguments.local_steps.split(",")]
        learning(_results(arguments), arguments.seeds, steps, arguments.methods.split(","))


def _add_trial_options(command: argparse.ArgumentParser, *, seeds: int) -> None:
    command.add_argument("--seeds", type=int, default=seeds, help="seeds of each cell")
    command.add_argument("--results", type=Path, help="file of the trials that have been run")
    command.add_argument("--print-only", action="store_true", help="print what the file has, and run nothing")


def _results(arguments: argparse.Namespace) -> Results:
    return Results(arguments.results, run=not arguments.print_only, show=partial(print, flush=True))


if __name__ == "__main__":
    main()
