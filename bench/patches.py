"""Size, speed and memory of weight patches, beside published formats, on one core.

    python -m bench.patches compare                           workload A: all formats, sizes, rates, memory, bound
    python -m bench.patches compare --targets B               workload B: the versions of the demo's learner
    python -m bench.patches compare --targets B --run FILE    workload B: the versions of a `grailnode demo --keep`
    python -m bench.patches edges                             workload C: unusual updates, beside the best alternative
    python -m bench.patches small                             workload D: touched rows, adapters, small tensors
    python -m bench.patches cores                             rates on one core and on two
    python -m bench.patches growth --elements 1024            seconds for 16M to 1024M elements
    python -m bench.patches projection                        a 7B model at 400 Mbit/s
    python -m bench.patches digest                            rates of BLAKE3
    python -m bench.patches start                             seconds of the import and of the first use

Rates are bytes of BF16 weights a second, of the fastest of `--repeats` runs, since other work can only slow a run down.
Extra memory is the peak of a forked child beside the old and the new tensors (tests/support/measuring/memory.py).
A benchmark takes from 15 seconds (`start`, `cores`) to some minutes (`compare` with four targets and the default
repeats). The command needs the `bench` extra, and `growth --elements 1024` about 5 GB of memory.
"""

import argparse
import math
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch

from bench.checkpoints import TARGETS, WEIGHT_DEVIATION, Trajectory, find_rate, simulate
from bench.measures import Update, best_of, measure_all, measure_whole, print_costs
from bench.published_formats import FORMATS
from bench.published_run import published_versions, trained_versions
from bench.tables import print_table
from protocol import patch
from protocol.digest import tensor_digest
from protocol.patch.container import read_header, split_frames
from protocol.patch.frames import decode_frame
from protocol.patch.sparse import PIECE_ELEMENTS
from protocol.patch.values import bits_of
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


def edge_cases(seed: int = 0) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Return the unusual updates of workload C: old and new tensor by name."""
    random = torch.Generator().manual_seed(seed)
    base = (torch.randn((1024, 1024), generator=random) * 0.0147).bfloat16()
    noise = torch.randint(-(2**15), 2**15, base.shape, generator=random).to(torch.int16).view(torch.bfloat16)
    rows = base.clone()
    rows[::37] = (rows[::37].float() * 1.01).bfloat16()
    one_change = base.clone()
    one_change[3, 5] += 1
    return {
        "one element": (base, one_change),
        "reset to zeros": (base, torch.zeros_like(base)),
        "from zeros (LoRA B)": (torch.zeros_like(base), (base.float() * 1e-3).bfloat16()),
        "fresh noise": (base, noise),
        "rows of an embedding": (base, rows),
        "all one step up": (base, (base.view(torch.int16) + 1).view(torch.bfloat16)),
        "scaled by 1.01": (base, (base.float() * 1.01).bfloat16()),
        "first step, lr 1e-3": (base, (base.float() + 1e-3 * torch.randn(base.shape, generator=random)).bfloat16()),
        "signs flipped": (base, -base),
    }


def edges(arguments: argparse.Namespace) -> None:
    """Print the sizes of workloads A3, A4 and C beside the best alternative of each case.

    None of the alternatives has a header, names, shapes or digests. Therefore the last column compares this codec's
    frame alone with the best one.
    """
    trajectory = simulate(1024, 1024, 0)
    cases = {name: trajectory.views(find_rate(trajectory, TARGETS[name])) for name in ("A3", "A4")} | edge_cases()
    columns = (
        "case", "compact", "mode of the frame", "frame", "fast", "best alternative", "name of the best", "frame / best",
    )  # fmt: skip
    rows = []
    for name, (old, new) in cases.items():
        compact, fast = (patch.encode({"w": old}, {"w": new}, profile=profile) for profile in patch.PROFILES)
        sizes = {"full tensor": old.nbytes}
        for form in FORMATS:
            try:
                sizes[form.name] = len(form.pack(form.plain(bits_of(old), bits_of(new), old.shape[-1]), [bits_of(old)]))
            except ValueError:
                continue
        best = min(sizes, key=lambda key: sizes[key])
        row = patch.summary(compact).rows[0]
        rows.append([
            name, str(len(compact)), row.mode.name.lower(), str(row.size), str(len(fast)), str(sizes[best]), best,
            f"{row.size / sizes[best]:.3f}",
        ])  # fmt: skip
    print_table("bytes of a 1024 x 1024 BF16 tensor (2097152 bytes)", columns, rows)


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
    """Print the sizes of workload D beside the bound, which for an embedding is that of its touched rows and of which
    rows these are.
    """
    cases = {f"{share:.1%} of the rows of an embedding": touched_rows(8192, share) for share in (0.028, 0.22)}
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


def cores(arguments: argparse.Namespace) -> None:
    """Print the rates of the same tensors on one thread and on two."""
    trajectory = simulate(2048, 4096, 0)
    old, new = trajectory.views(find_rate(trajectory, TARGETS["A1"]))
    before = {f"layer.{i}": old.clone() for i in range(8)}
    after = {f"layer.{i}": new.clone() for i in range(8)}
    nbytes = 8 * old.nbytes
    digests = {name: tensor_digest(tensor) for name, tensor in before.items()}
    for threads in (1, 2):
        data = patch.encode(before, after)
        encode = best_of(
            lambda: patch.encode(before, after, base_digests=digests, threads=threads),  # noqa: B023
            arguments.repeats,
        )
        apply = best_of(
            lambda: patch.apply_with_digests(before, data, digests=digests, threads=threads),  # noqa: B023
            arguments.repeats,
        )
        print(
            f"{threads} threads: encode {nbytes / 1e9 / encode:.2f} GB/s, "
            f"verify and apply {nbytes / 1e9 / apply:.2f} GB/s"
        )


def growth(arguments: argparse.Namespace) -> None:
    """Print seconds for 16M elements and more, in tensors of 16M elements that share no memory."""
    trajectory = simulate(4096, 4096, 0)
    old, new = trajectory.views(find_rate(trajectory, TARGETS["A1"]))
    count = 1
    while count * 16 <= arguments.elements:
        before = {f"layer.{i:03}": old.clone() for i in range(count)}
        after = {f"layer.{i:03}": new.clone() for i in range(count)}
        digests = {name: tensor_digest(tensor) for name, tensor in before.items()}
        data = b""

        def encode() -> None:
            nonlocal data
            data = patch.encode(before, after, base_digests=digests)  # noqa: B023

        seconds = best_of(encode, 2)
        del after
        apply = best_of(lambda: patch.apply_with_digests(before, data, digests=digests), 1)  # noqa: B023
        elements = count * old.numel()
        print(
            f"{elements / 2**20:6.0f}M elements: encode {seconds:6.2f} s ({seconds / elements * 1e9:.2f} ns each), "
            f"verify and apply {apply:6.2f} s ({apply / elements * 1e9:.2f} ns each), {len(data) / 1e6:.1f} MB"
        )
        count *= 4


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


def digest(arguments: argparse.Namespace) -> None:
    """Print the rates of BLAKE3 over 256 MiB in memory, over a piece in the cache, and during decoding."""
    from blake3 import blake3  # noqa: PLC0415

    data = np.random.default_rng(0).bytes(1 << 28)
    for name, threads in (("one thread", 1), ("all threads", blake3.AUTO)):
        seconds = best_of(lambda: blake3(data, max_threads=threads).digest(), arguments.repeats)  # noqa: B023
        print(f"BLAKE3 from memory, {name}: {len(data) / 1e9 / seconds:.2f} GB/s")
    piece = data[: 2 * PIECE_ELEMENTS]
    seconds = best_of(lambda: [blake3(piece).digest() for _ in range(1024)], arguments.repeats)
    print(f"BLAKE3 of a piece in the cache, one thread: {1024 * len(piece) / 1e9 / seconds:.2f} GB/s")
    trajectory = simulate(4096, 4096, 0)
    old, new = trajectory.views(find_rate(trajectory, TARGETS["A1"]))
    header = read_header(encoded := patch.encode({"w": old}, {"w": new}))
    ((row, frame),) = zip(header.rows, split_frames(encoded, header), strict=True)

    def decode(*, hashes: bool) -> None:
        hasher = blake3()
        for _, data, _ in decode_frame(row, frame, bits_of(old)):
            if hashes:
                hasher.update(data.data.cast("B"))

    decode_seconds = best_of(lambda: decode(hashes=False), 4 * arguments.repeats)
    total_seconds = best_of(lambda: decode(hashes=True), 4 * arguments.repeats)
    gigabytes = old.nbytes / 1e9
    print(
        f"decoding {gigabytes / decode_seconds:.2f} GB/s, decoding and hashing {gigabytes / total_seconds:.2f} GB/s; "
        f"the digest alone, of a piece just decoded, {gigabytes / (total_seconds - decode_seconds):.2f} GB/s"
    )


def start(arguments: argparse.Namespace) -> None:
    """Print the seconds of import and first use in a new process, with an empty and with a warm cache of kernels."""
    code = (
        "import time; t = time.perf_counter(); import torch; a = time.perf_counter() - t\n"
        "from tests.support.measuring.patch_kernels import compile_patch_kernels; b = time.perf_counter() - t - a\n"
        "compile_patch_kernels(); c = time.perf_counter() - t - a - b\n"
        "print(f'torch {a:.2f} s, protocol.patch {b:.2f} s, kernels {c:.2f} s')"
    )
    import tempfile  # noqa: PLC0415

    with tempfile.TemporaryDirectory() as folder:
        for name in ("empty cache", "warm cache"):
            print(name, end=": ", flush=True)
            environment = os.environ | {"NUMBA_CACHE_DIR": folder}
            subprocess.run([sys.executable, "-c", code], env=environment, check=True)


def main() -> None:
    """Run one of the benchmarks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    benchmarks = {f.__name__: f for f in (compare, edges, small, cores, growth, projection, digest, start)}
    parser.add_argument("benchmark", choices=sorted(benchmarks))
    parser.add_argument("--rows", type=int, default=4096, help="rows of the tensor of `compare`")
    parser.add_argument("--columns", type=int, default=4096, help="columns of the tensor of `compare`")
    parser.add_argument("--targets", default="A1,A2,A3,A4", help="workloads of `compare`: any of A1, A2, A3, A4, B")
    parser.add_argument("--run", type=Path, help="run.toml of a demo run with --keep, for workload B")
    parser.add_argument("--windows", type=int, default=20, help="windows that workload B learns without --run")
    parser.add_argument("--versions", type=int, default=8, help="how many of the newest updates workload B has")
    parser.add_argument("--seed", type=int, default=0, help="seed of workloads A and B")
    parser.add_argument("--repeats", type=int, default=7, help="runs of which the fastest counts")
    parser.add_argument("--elements", type=int, default=256, help="largest number of elements of `growth`, in millions")
    parser.add_argument("--cores", type=int, default=8, help="number of cores of `projection`")
    parser.add_argument("--quick", action="store_true", help="measure each published format once instead of twice")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    compile_patch_kernels()
    benchmarks[arguments.benchmark](arguments)


if __name__ == "__main__":
    main()
