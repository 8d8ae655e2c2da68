"""Measure the vLLM engine beside plain vLLM and the torch engine: `python -m bench.engines KIND --python PYTHON`.

    speed       tokens a second, beside the same vLLM without us that samples by itself and returns log-probabilities
    patches     seconds to stage, pause, commit and read back, by size and number of changed elements, and a projection
                of the last size to 7B
    staging     processor time of staging and commit, part by part, without a server, and a projection to 7B
    agreement   rollouts and their margins against the torch engine, by precision, batch and settings of vLLM
    judging     4,096 rollouts, half of them by copies of the policy, judged by vLLM and by torch
    memory      of the node and of vLLM's worker, with the followed weights in the node's memory and in mapped files
    drafts      tokens a second of the torch engine with and without an 8-bit copy that drafts, how often it is right
    faults      seconds from a fault to the repeated rollouts, and rollouts that were wrong

PYTHON is the interpreter of vLLM's environment (`grailnode engine install DIR`). Each line of output is a JSON object.
"""

import argparse
from pathlib import Path

import torch
import trio

from bench.engines.agreement import WAYS, agreement
from bench.engines.drafts import drafts
from bench.engines.faults import faults
from bench.engines.judging import judging
from bench.engines.memory import memory
from bench.engines.patches import patches
from bench.engines.setting import SIZES
from bench.engines.speed import speed
from bench.engines.staging import staging

KINDS = {
    "speed": speed,
    "patches": patches,
    "staging": staging,
    "agreement": agreement,
    "judging": judging,
    "memory": memory,
    "faults": faults,
    "drafts": drafts,
}


def main() -> None:
    """Run the measurements that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--python", type=Path, help="for all but drafts and staging")
    parser.add_argument("--sizes", nargs="+", help=f"of policies: {', '.join(SIZES)}, genesis, or a policy's directory")
    parser.add_argument("--shares", nargs="+", type=float, default=[0.001, 0.01, 0.1], help="of changed elements")
    parser.add_argument("--rollouts", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64, help="of each rollout")
    parser.add_argument("--batch", type=int, default=64, help="sequences that vLLM computes at the same time")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--prompts", choices=["random", "problems", "chat"], default="random", help="sums, or as chat")
    parser.add_argument("--seed", type=int, default=0, help="of the requests; for agreement in several runs")
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=["default"], help="settings of vLLM")
    parser.add_argument("--batches", nargs="+", type=int, default=[256], help="as --batch, for agreement and drafts")
    parser.add_argument("--hang", type=float, default=5.0, help="seconds without a sign of life, for faults")
    parser.add_argument("--patches", type=int, default=200, help="bent patches, for faults")
    parser.add_argument("--torch", action="store_true", help="measure the torch engine as well")
    parser.add_argument("--device", default="cpu", help="of vLLM: cpu or cuda")
    parser.add_argument("--memory-share", type=float, default=0.4, help="of a GPU, for each server of vLLM")
    arguments = parser.parse_args()
    if arguments.python is None and arguments.kind not in ("drafts", "staging"):
        parser.error(f"{arguments.kind} needs --python")
    arguments.sizes = arguments.sizes or (["genesis"] if arguments.kind == "agreement" else ["32k", "152k"])
    torch.set_num_threads(1)
    trio.run(KINDS[arguments.kind], arguments.python, arguments)


if __name__ == "__main__":
    main()
