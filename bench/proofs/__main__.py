"""`python -m bench.proofs TABLE`: one of the tables of docs/benchmarks/proofs.md. `python -m
tests.support.adversaries.trained_policy` makes the policy first.

What was computed is kept beside the policy; a table that was stopped goes on where it was.
"""

import argparse
from pathlib import Path

import torch
import trio

from bench.proofs import adversaries, false_accepts, honest, information, keys, roc, speed
from bench.proofs.setting import Setting
from tests.support.adversaries.trained_policy import CACHE


def main() -> None:
    """Read the options, print a table."""
    parser = argparse.ArgumentParser(prog="python -m bench.proofs", description=__doc__)
    parser.add_argument("table", choices=("honest", "animals", "roc", "sketch", "speed", "keys", "luck"))
    parser.add_argument(
        "--policy", type=Path, default=CACHE, help="what python -m tests.support.adversaries.trained_policy made"
    )
    parser.add_argument("--calibration", type=int, default=32, help="groups of each pair for the thresholds")
    parser.add_argument(
        "--groups", type=int, default=0, help="groups of each pair or copy; windows in the table of luck"
    )
    parser.add_argument("--tries", type=int, default=100, help="windows of each animal, or keys of each cheat")
    parser.add_argument("--only", default="", help="animals, or profiles of honest nodes, whose names hold this")
    parser.add_argument("--rollouts", type=int, default=600, help="rollouts of the table of sketches")
    parser.add_argument("--projections", type=int, default=10_000, help="of the table of sketches")
    parser.add_argument("--without", default="", help="pairs to leave out, separated by commas")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the table of speed")
    parser.add_argument(
        "--tokens", type=int, help="of each completion in the table of speed, in place of the story's end"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    setting = Setting(options.policy, options.policy / "results", tuple(options.without.split(",")))
    match options.table:
        case "honest":
            trio.run(honest.table, setting, options.groups or 256, options.calibration, options.only)
        case "animals":
            trio.run(adversaries.table, setting, options.tries, options.calibration, options.only)
        case "roc":
            trio.run(roc.table, setting, options.groups or 48, options.calibration)
        case "keys":
            trio.run(keys.table, options.tries)
        case "luck":
            trio.run(false_accepts.table, options.groups or 16)
        case "sketch":
            trio.run(information.table, setting, options.rollouts, options.projections)
        case _:
            trio.run(speed.table, setting, options.groups or 12, getattr(torch, options.dtype), options.tokens)


if __name__ == "__main__":
    main()
