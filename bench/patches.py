"""Size, speed and memory of weight patches, beside published formats, on one core.

    python -m bench.patches compare                           workload A: all formats, sizes, rates, memory, bound
    python -m bench.patches compare --targets B               workload B: the versions of the demo's learner
    python -m bench.patches compare --targets B --run FILE    workload B: the versions of a `grailnode demo --keep`
    python -m bench.patches small                             workload C: touched rows, adapters, small tensors
    python -m bench.patches projection                        a 7B model at 400 Mbit/s

Rates are bytes of BF16 weights a second, of the fastest of `--repeats` runs, since other work can only slow a run down.
Extra memory is the peak of a forked child beside the old and the new tensors (tests/support/measuring/memory.py).
`compare` takes some minutes with four targets and the default repeats. The command needs the `bench` extra.
"""

import argparse
import math
from itertools import pairwise
from pathlib import Path

import torch

from bench.checkpoints import TARGETS, WEIGHT_DEVIATION, Trajectory, find_rate, simulate
from bench.measures import Update, measure_all, measure_whole, print_costs
from bench.published_run import published_versions, trained_versions
from bench.tables import print_table
from protocol import patch
from roles.trainer.publish.publisher import PublisherSettings
from tests.support.measuring.patch_kernels import compile_patch_kernels


def compare(arguments: argparse.Namespace) -> None:
    """Print a table of all formats for each of the chosen workloads A and B."""
    targets = arguments.targets.split(",")
    trajectory = simulate(arguments.rows, arguments.columns, arguments.seed) if targets != ["B"] else None
    for target in targets:
        if trajectory is None or target == "B":
            title, updates = _demo_updates(arguments)
        else:
            old, new = trajectory.views(find_rate(trajectory, TARGETS[target]))
            title, updates = f"{target}: {arguments.rows} x {arguments.columns} BF16", [Update({"w": old}, {"w": new})]
        print_costs(title, measure_all(updates, arguments.repeats, quick=arguments.quick), updates)


def _demo_updates(arguments: argparse.Namespace) -> tuple[str, list[Update]]:
    if arguments.run is not None:
        versions = published_versions(arguments.run)
    else:
        versions = trained_versions(arguments.windows, arguments.seed)
    if len(versions) < 2:
        raise SystemExit("the run has fewer than two versions; increase --windows or use a longer run")
    versions = versions[-arguments.versions - 1 :]
    updates = [Update(old, new) for old, new in pairwise(versions)]
    size = f"{len(versions[0])} tensors, {updates[0].nbytes / 1e6:.2f} MB"
    return f"B: the last {len(updates)} updates of the demo's policy, {size}", updates


def touched_rows(rows: int, share: float, seed: int = 0) -> Update:
    """Return an update of an embedding of `rows` x 1024, of whose rows a share has 5% of their elements changed."""
    touched = int(rows * share)
    trajectory = simulate(touched, 1024, seed)
    before, after = trajectory.views(find_rate(trajectory, TARGETS["A3"]))
    random = torch.Generator().manual_seed(seed)
    old = (torch.randn((rows, 1024), generator=random) * WEIGHT_DEVIATION).bfloat16()
    places = torch.randperm(rows, generator=random)[:touched]
    old[places], new = before, old.clone()
    new[places] = after
    return Update({"embedding": old}, {"embedding": new})


def adapters(rate: float, layers: int = 14) -> Update:
    """Return an update of LoRA factors of the rank 16 for two matrices of 1536 x 1536 a layer."""
    update = Update({}, {})
    names = [f"layers.{layer}.{matrix}.{factor}" for layer in range(layers) for matrix in "qv" for factor in "AB"]
    for seed, name in enumerate(names):
        shape = (16, 1536) if name.endswith("A") else (1536, 16)
        drifts = simulate(*shape, seed)
        start = drifts.start if name.endswith("A") else torch.zeros(shape)
        update.old[name], update.new[name] = Trajectory(start, drifts.before, drifts.after).views(rate)
    return update


def small(arguments: argparse.Namespace) -> None:
    """Print the sizes of workload C beside the bound, which for an embedding is that of its touched rows and of which
    rows these are.
    """
    embeddings = ((8192, 0.028), (49152, 0.028), (8192, 0.22))
    cases = {f"{share:.1%} of {rows:,} rows of an embedding": touched_rows(rows, share) for rows, share in embeddings}
    cases |= {f"LoRA factors, rate {rate:g}": adapters(rate) for rate in (1e-3, 1e-5)}
    cases["the demo's policy"] = _demo_updates(arguments)[1][-1]
    rows = []
    for name, update in cases.items():
        bound, cost = update.bound, measure_whole(update, "compact", arguments.repeats)
        if "embedding" in update.old:
            old, new = update.old["embedding"], update.new["embedding"]
            touched = (old.view(torch.int16) != new.view(torch.int16)).any(1)
            count, share = int(touched.sum()), float(touched.float().mean())
            of_rows = -count * math.log2(share) - (len(old) - count) * math.log2(1 - share)
            bound = Update({"w": old[touched]}, {"w": new[touched]}).bound + of_rows
        speeds = (f"{update.nbytes / 1e9 / seconds:.2f}" for seconds in (cost.encode, cost.apply))
        bits = 8 * cost.nbytes
        changed = f"{update.changed_count / sum(tensor.numel() for tensor in update.old.values()):.2%}"
        rows.append([name, changed, f"{bits / update.changed_count:.3f}", f"{bits / bound:.3f}", *speeds])
    print_table("compact", ("workload", "changed", "bits/change", "of bound", "encode GB/s", "apply GB/s"), rows)


def projection(arguments: argparse.Namespace) -> None:
    """Print a projection to a 7B model (15.2 GB of BF16 weights) at 400 Mbit/s from rates of this machine.

    A follower decodes a part of the patch while the next ones arrive. The last column has the figures of PULSE's table
    14.
    """
    trajectory = simulate(4096, 4096, 0)
    elements, link, core_count = 7.6e9, 400e6 / 8, arguments.cores
    rows = []
    for target in ("A1", "A2"):
        old, new = trajectory.views(find_rate(trajectory, TARGETS[target]))
        for profile in patch.PROFILES:
            row = measure_whole(Update({"w": old}, {"w": new}), profile, arguments.repeats)
            scale = elements / old.numel()
            transfer, apply = row.nbytes * scale / link, row.apply * scale / core_count
            parts = math.ceil(row.nbytes * scale / PublisherSettings().part_bytes)
            overlapped = max(transfer, apply) + min(transfer, apply) / parts  # the first part has nothing to overlap
            rows.append([
                target, profile, f"{row.nbytes * scale / 1e6:.0f}", f"{transfer:.2f}", f"{apply:.2f}",
                f"{transfer + apply:.2f}", f"{overlapped:.2f}", "2.2 + 0.6 + 0.3 + 0.8 = 3.9",
            ])  # fmt: skip
    columns = (
        "workload", "profile", "patch MB", "transfer s", "verify + apply s", "sequential s", "overlapped s",
        "PULSE, table 14",
    )  # fmt: skip
    title = f"7B model, 400 Mbit/s, {core_count} cores (rates of one core measured here, times {core_count})"
    print_table(title, columns, rows)


def main() -> None:
    """Run one of the benchmarks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    benchmarks = {f.__name__: f for f in (compare, small, projection)}
    parser.add_argument("benchmark", choices=sorted(benchmarks))
    parser.add_argument("--rows", type=int, default=4096, help="rows of the tensor of `compare`")
    parser.add_argument("--columns", type=int, default=4096, help="columns of the tensor of `compare`")
    parser.add_argument("--targets", default="A1,A2,A3,A4", help="workloads of `compare`: any of A1, A2, A3, A4, B")
    parser.add_argument("--run", type=Path, help="run.toml of a demo run with --keep, for workload B")
    parser.add_argument("--windows", type=int, default=20, help="windows that workload B learns without --run")
    parser.add_argument("--versions", type=int, default=8, help="how many of the newest updates workload B has")
    parser.add_argument("--seed", type=int, default=0, help="seed of workloads A and B")
    parser.add_argument("--repeats", type=int, default=7, help="runs of which the fastest counts")
    parser.add_argument("--cores", type=int, default=8, help="number of cores of `projection`")
    parser.add_argument("--quick", action="store_true", help="measure each published format once instead of twice")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    compile_patch_kernels()
    benchmarks[arguments.benchmark](arguments)


if __name__ == "__main__":
    main()
