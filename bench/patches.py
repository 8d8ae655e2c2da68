"""Weight patches against the published formats, on one core, in one run.

    python -m bench.patches compare                                 workload A: bits, ratios, rates, memory, bound
    python -m bench.patches compare --targets B                     workload B: versions of the demo's learner
    python -m bench.patches compare --targets B --run FILE          ... or of a run that `grailnode demo --keep` left
    behind python -m bench.patches edges                                   workload C: routing against the alternatives
    python -m bench.patches cores                                   one core and two
    python -m bench.patches growth --elements 1024                  16M to 1024M elements
    python -m bench.patches projection                              a 7B model at 400 Mbit/s
    python -m bench.patches digest                                  BLAKE3
    python -m bench.patches start                                   import and first use

Rates are bytes of BF16 weights a second; the best of `--repeats`, since other work only ever slows a run down. Extra
memory is the peak of a forked child beside the tensors, old and new (tests/support/measuring/memory.py).
"""

import argparse
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from bench.checkpoints import TARGETS, find_rate, simulate
from bench.measures import Update, best_of, measure_all, measure_whole, print_table
from bench.published_run import published_versions, trained_versions
from protocol import patch
from protocol.patch.container import read_header, split_frames
from protocol.patch.frames import decode_frame
from protocol.patch.sparse import PIECE_ELEMENTS
from protocol.patch.values import bits_of
from tests.support.patch_formats import FORMATS


def compare(arguments: argparse.Namespace) -> None:
    """Workloads A and B, every format."""
    targets = arguments.targets.split(",")
    trajectory = simulate(arguments.rows, arguments.columns, arguments.seed) if targets != ["B"] else None
    for target in targets:
        if trajectory is None or target == "B":
            title, updates = _published(arguments)
        else:
            old, new = trajectory.views(find_rate(trajectory, TARGETS[target]))
            title, updates = f"{target}: {arguments.rows} x {arguments.columns} BF16", [Update({"w": old}, {"w": new})]
        print_table(title, measure_all(updates, arguments.repeats, quick=arguments.quick), updates)


def _published(arguments: argparse.Namespace) -> tuple[str, list[Update]]:
    if arguments.run is not None:
        versions = published_versions(arguments.run)
    else:
        versions = trained_versions(arguments.windows, arguments.seed)
    if len(versions) < 2:
        raise SystemExit("fewer than two versions: a run of more windows, please")
    versions = versions[-arguments.versions - 1 :]
    updates = [Update(old, new) for old, new in pairwise(versions)]
    size = f"{len(versions[0])} tensors, {updates[0].nbytes / 1e6:.2f} MB"
    return f"B: the last {len(updates)} updates of the demo's policy, {size}", updates


def edge_cases(seed: int = 0) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Workload C: what a chain also meets."""
    random = torch.Generator().manual_seed(seed)
    base = (torch.randn((1024, 1024), generator=random) * 0.0147).bfloat16()
    noise = torch.randint(-(2**15), 2**15, base.shape, generator=random).to(torch.int16).view(torch.bfloat16)
    rows = base.clone()
    rows[::37] = (rows[::37].float() * 1.01).bfloat16()
    single = base.clone()
    single[3, 5] += 1
    return {
        "one element": (base, single),
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
    """Workloads A3, A4 and C: this codec against the best alternative of each case.

    Of the alternatives, none has a header, names, shapes or digests. So the last column compares this codec's frame
    with them.
    """
    trajectory = simulate(1024, 1024, 0)
    cases = {name: trajectory.views(find_rate(trajectory, TARGETS[name])) for name in ("A3", "A4")} | edge_cases()
    table = Table(title="bytes of a 1024 x 1024 BF16 tensor (2097152 bytes)")
    for column in ("case", "codec", "compact", "its frame", "fast", "best alternative", "its name", "frame / best"):
        table.add_column(column)
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
        table.add_row(
            name, row.mode.name.lower(), str(len(compact)), str(row.size), str(len(fast)), str(sizes[best]), best,
            f"{row.size / sizes[best]:.3f}",
        )  # fmt: skip
    Console(width=140).print(table)


def cores(arguments: argparse.Namespace) -> None:
    """The same tensors on one thread and on two."""
    trajectory = simulate(2048, 4096, 0)
    old, new = trajectory.views(find_rate(trajectory, TARGETS["A1"]))
    before = {f"layer.{i}": old.clone() for i in range(8)}
    after = {f"layer.{i}": new.clone() for i in range(8)}
    nbytes = 8 * old.nbytes
    digests = patch.encode_with_digests(before, before).digests
    for threads in (1, 2):
        data = patch.encode(before, after)
        encode = best_of(
            lambda: patch.encode_with_digests(before, after, base_digests=digests, threads=threads),  # noqa: B023
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
    """Time for each element from 16M elements up; 16M-element tensors, each with memory of its own."""
    trajectory = simulate(4096, 4096, 0)
    old, new = trajectory.views(find_rate(trajectory, TARGETS["A1"]))
    count = 1
    while count * 16 <= arguments.elements:
        before = {f"layer.{i:03}": old.clone() for i in range(count)}
        after = {f"layer.{i:03}": new.clone() for i in range(count)}
        digests = patch.encode_with_digests(before, before).digests
        data = b""

        def encode() -> None:
            nonlocal data
            data = patch.encode_with_digests(before, after, base_digests=digests).patch  # noqa: B023

        seconds = best_of(encode, 2)
        del after
        apply = best_of(lambda: patch.apply_in_place_with_digests(dict(before), data, digests=digests), 1)  # noqa: B023
        elements = count * old.numel()
        print(
            f"{elements / 2**20:6.0f}M elements: encode {seconds:6.2f} s ({seconds / elements * 1e9:.2f} ns each), "
            f"verify and apply in place {apply:6.2f} s ({apply / elements * 1e9:.2f} ns each), {len(data) / 1e6:.1f} MB"
        )
        count *= 4


def projection(arguments: argparse.Namespace) -> None:
    """A 7B model (15.2 GB of BF16 weights) at 400 Mbit/s, from rates measured here, beside PULSE's table 14."""
    trajectory = simulate(4096, 4096, 0)
    elements, link, cores_ = 7.6e9, 400e6 / 8, arguments.cores
    table = Table(title=f"7B model, 400 Mbit/s, {cores_} cores (rates of one core measured here, times {cores_})")
    for column in (
        "workload",
        "profile",
        "patch MB",
        "transfer s",
        "verify + apply s",
        "in turn s",
        "overlapped s",
        "PULSE, table 14",
    ):
        table.add_column(column)
    for target in ("A1", "A2"):
        old, new = trajectory.views(find_rate(trajectory, TARGETS[target]))
        for profile in patch.PROFILES:
            row = measure_whole(Update({"w": old}, {"w": new}), profile, arguments.repeats)
            scale = elements / old.numel()
            transfer, apply = row.nbytes * scale / link, row.apply * scale / cores_
            table.add_row(
                target, profile, f"{row.nbytes * scale / 1e6:.0f}", f"{transfer:.2f}", f"{apply:.2f}",
                f"{transfer + apply:.2f}", f"{max(transfer, apply):.2f}", "2.2 + 0.6 + 0.3 + 0.8 = 3.9",
            )  # fmt: skip
    Console(width=140).print(table)


def digest(arguments: argparse.Namespace) -> None:
    """BLAKE3 of 256 MiB from memory, of a piece that lies in the cache, and what it adds to applying a patch."""
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

    def decode(*, hashing: bool) -> None:
        hasher = blake3()
        for _, decoded in decode_frame(row, frame, bits_of(old)):
            if hashing:
                hasher.update(decoded.data.cast("B"))

    without, with_digest = (best_of(lambda: decode(hashing=flag), 4 * arguments.repeats) for flag in (False, True))  # noqa: B023
    print(
        f"decoding {old.nbytes / 1e9 / without:.2f} GB/s, "
        f"decoding and hashing {old.nbytes / 1e9 / with_digest:.2f} GB/s: the "
        f"digest of what was just decoded goes at {old.nbytes / 1e9 / (with_digest - without):.2f} GB/s"
    )


def start(arguments: argparse.Namespace) -> None:
    """Import and first use in a fresh process, with a fresh kernel cache and with a warm one."""
    code = (
        "import time; t = time.perf_counter(); import torch; a = time.perf_counter() - t\n"
        "from protocol import patch; b = time.perf_counter() - t - a\n"
        "patch.warm_up(); c = time.perf_counter() - t - a - b\n"
        "print(f'torch {a:.2f} s, protocol.patch {b:.2f} s, kernels {c:.2f} s')"
    )
    import tempfile  # noqa: PLC0415

    with tempfile.TemporaryDirectory() as folder:
        for name in ("fresh cache", "warm cache"):
            print(name, end=": ", flush=True)
            environment = os.environ | {"NUMBA_CACHE_DIR": folder}
            subprocess.run([sys.executable, "-c", code], env=environment, check=True)


def main() -> None:
    """Run one benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    benchmarks = {f.__name__: f for f in (compare, edges, cores, growth, projection, digest, start)}
    parser.add_argument("benchmark", choices=sorted(benchmarks))
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--columns", type=int, default=4096)
    parser.add_argument("--targets", default="A1,A2,A3,A4", help="workloads of `compare`: any of A1, A2, A3, A4, B")
    parser.add_argument("--run", type=Path, help="run.toml of a kept demo, for workload B")
    parser.add_argument("--windows", type=int, default=20, help="windows for which workload B learns otherwise")
    parser.add_argument("--versions", type=int, default=8, help="updates of workload B, the newest ones")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--elements", type=int, default=256, help="largest set of `growth`, in millions")
    parser.add_argument("--cores", type=int, default=8, help="cores of `projection`")
    parser.add_argument("--quick", action="store_true", help="measure the published formats once")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    patch.warm_up()
    benchmarks[arguments.benchmark](arguments)


if __name__ == "__main__":
    main()
