"""The network's learning dynamics in one process, without I/O: how the demo learns with which settings, at what cost.

    python -m bench.learning --windows 60 --seed 1

In each window miners sample with the policy that was newest `lag` windows ago, and a prefill recomputes the
log-probabilities as a validator does. The groups enter the replay buffer, and the trainer makes as many steps as there
are groups for, and publishes versions. The command prints a line for each window, then a summary as JSON: pass@1,
rewards, sparsity of the versions, and CPU seconds by phase. CPU seconds are those of one thread of this process, so
other programs on the machine do not change them. A window takes about 0.5 CPU seconds. The command needs nothing but
the installed program.
"""

import argparse
import json
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Final

import torch

from tests.support.simulation.learning import Setup, run

HELP: Final = {
    "policy": "directory of the genesis policy",
    "windows": "number of windows",
    "seed": "seed of problems, noise and the replay buffer",
    "lag": "windows between a version's publication and its use by miners",
    "groups": "groups of a window, of all miners together",
    "group_size": "rollouts of a group",
    "groups_per_step": "groups of an optimizer step",
    "steps_per_version": "optimizer steps between two versions",
    "optimizer": "adamw, adamw-8bit or muon",
    "learning_rate": "learning rate at its peak",
    "warmup": "optimizer steps in which the learning rate grows",
    "temperature": "temperature of sampling",
    "max_uses": "how often a group is trained on at most",
    "decay": "factor of a group's weight in the replay buffer for each version of staleness",
    "max_staleness": "versions behind the newest at which a group leaves the replay buffer",
    "held_out": "number of problems on which pass@1 is measured",
    "environment": "the task",
    "chat": "1: put prompts into the policy's chat template",
    "max_tokens": "tokens of a completion",
    "lora_rank": "train adapters of this rank instead of all weights; 0 for all weights",
    "lora_targets": "modules that get adapters, with commas",
    "precision": "bf16, fp8 or int8: what the layers' matrices of versions consist of",
    "difficulty": "1 to draw problems by difficulty tables, as a run with `init --difficulty` does",
    "dither": "0 for masters that begin as the checkpoint's BF16 weights",
    "json": "file for the options and the summary",
}


def main() -> None:
    """Simulate a run and print its summary."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for option in fields(Setup):
        name = f"--{option.name.replace('_', '-')}"
        parser.add_argument(name, type=type(option.default), default=option.default, help=HELP[option.name])
    setup = Setup(**vars(parser.parse_args()))
    torch.set_num_threads(1)
    summary = run(setup, partial(print, flush=True))
    print(json.dumps(summary, indent=2))
    if setup.json:
        Path(setup.json).write_text(json.dumps({"setup": setup.__dict__, "summary": summary}) + "\n")


if __name__ == "__main__":
    main()
