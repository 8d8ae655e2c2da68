"""The measured error rates, information and speed of the check of rollouts: `python -m bench.proofs TABLE`.

    honest           how often honest work is refused, over pairs of honest engines
    adversaries      in how many windows each adversary is refused, and by which window at the latest
    power            after how many tokens a changed policy is refused, and by which statistic
    sketch           bits of evidence in a sketch against forged ones
    resolution       how far hidden states differ, beside the unit of a sketch
    speed            generation, prefill and verification on one core
    gain             what a planned cheat gains at every rate, and what keys earn that share work
    dealing          throughput by number of validators where groups are dealt to them, and what liars among them can do
    cheats           what miners gain that decide near ties, or edit tokens, and when they are refused
    continuations    tokens that a validator decodes to count luck, and the luck of honest work
    withheld         how far a miner that withholds windows of its keys shifts what is trained on

`dealing` and `speed` take minutes, the other tables up to some hours of one core with the settings of
docs/benchmarks/proofs.md. All need the `test` extra. Except for `dealing`, they need the policy that
`python -m bench.proofs.trained_policy` makes in a quarter of an hour. Their results are stored beside that policy, and
a table that was interrupted resumes there.
"""

import argparse
from pathlib import Path

import torch
import trio

from bench.proofs import (
    adversaries,
    cheats,
    continuations,
    dealing,
    gain,
    honest,
    information,
    power,
    resolution,
    speed,
    withheld,
)
from bench.proofs.setting import Setting
from bench.proofs.trained_policy import CACHE

TABLES = (
    "honest", "adversaries", "power", "sketch", "resolution", "speed", "gain", "cheats", "continuations",
    "dealing", "withheld",
)  # fmt: skip


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.proofs", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("table", choices=TABLES)
    parser.add_argument("--policy", type=Path, default=CACHE, help="directory of the policy")
    parser.add_argument("--groups", type=int, default=0, help="groups of each pair for honest, else of each copy")
    parser.add_argument("--tries", type=int, default=100, help="windows of each adversary")
    parser.add_argument("--only", default="", help="run only adversaries, or rows of dealing, whose names contain this")
    parser.add_argument("--profile", default="", help="run only the profiles whose names contain this")
    parser.add_argument("--rollouts", type=int, default=120, help="rollouts for sketch")
    parser.add_argument("--projections", type=int, default=1000, help="projections for sketch")
    parser.add_argument("--without", default="", help="names of pairs to leave out, separated by commas")
    parser.add_argument("--test-seed", type=int, default=1, help="of the groups of tables")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="dtype of speed")
    parser.add_argument(
        "--tokens", type=int, help="length of each completion for speed and continuations; default: up to its end token"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    setting = Setting(options.policy, options.policy / "results", tuple(options.without.split(",")), options.test_seed)
    match options.table:
        case "honest":
            trio.run(honest.table, setting, options.groups or 256, options.profile)
        case "adversaries":
            trio.run(adversaries.table, setting, options.tries, options.only, options.profile)
        case "power":
            trio.run(power.table, setting, options.groups or 128, options.profile)
        case "resolution":
            trio.run(resolution.table, setting, options.groups or 6, options.profile)
        case "cheats":
            trio.run(cheats.table, setting, options.groups or 64, options.profile)
        case "continuations":
            trio.run(continuations.table, setting, options.groups or 512, options.tokens)
        case "dealing":
            dealing.table(options.only)
        case "gain":
            gain.table()
        case "withheld":
            withheld.table()
        case "sketch":
            trio.run(information.table, setting, options.rollouts, options.projections)
        case _:
            trio.run(speed.table, setting, options.groups or 12, getattr(torch, options.dtype), options.tokens)


if __name__ == "__main__":
    main()
