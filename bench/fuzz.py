"""Mutated patches against every parser: each must give a value or a ProtocolError, quickly, and leave the weights
alone.

    python -m bench.fuzz --count 1000000 --seed 0 --processes 2
    python -m bench.fuzz --count 60000 --keep tests/patch/corpus     adds what is refused in a way that is not there yet

The corpus is small weights in every mode and profile. A third of the mutations hit the whole patch, a third the table
behind its zstd frame, a third the frames behind an intact table. Prints how each parser answered; exits with 1 on any
other exception, on a mutation that was taken for something else than it says, or on one that took longer than --slow
seconds.
"""

import argparse
import multiprocessing
import re
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from protocol import patch
from protocol.chain import safetensors
from protocol.digest import content_digest, digest_weights
from protocol.errors import ProtocolError
from tests.support.mutations import MUTATORS, mutations

Weights = dict[str, torch.Tensor]


def corpus() -> dict[str, tuple[Weights, bytes]]:
    """Weights and a patch for them, one for each way through the parsers."""
    random = torch.Generator().manual_seed(1)
    masters = torch.randn((40, 64), generator=random) * 0.0147
    newer = masters + torch.randn((40, 64), generator=random) * 2e-5
    noise = [torch.randint(-(2**31), 2**31 - 1, (64,), generator=random, dtype=torch.int64).int() for _ in range(2)]
    old, new = masters.bfloat16(), newer.bfloat16()
    cases: dict[str, tuple[Weights, Weights, str]] = {
        "compact": ({"a": old, "b": old.clone()}, {"a": new, "b": old.clone()}, "compact"),
        "fast": ({"a": old}, {"a": new}, "fast"),
        "raw_step_planes": ({"a": noise[0]}, {"a": noise[1]}, "compact"),
        "values": ({"a": masters}, {"a": torch.zeros_like(masters)}, "compact"),
        "steps": ({"a": masters}, {"a": newer}, "fast"),
        "small_changes": ({"a": old}, {"a": torch.where(torch.arange(64) < 63, old, new)}, "compact"),
        "bytes": ({"a": masters.to(torch.float8_e4m3fn)}, {"a": newer.to(torch.float8_e4m3fn)}, "compact"),
    }
    return {name: (a, patch.encode(a, b, profile=profile)) for name, (a, b, profile) in cases.items()}


def way_refused(error: ProtocolError) -> str:
    """What an error says, without its numbers and names: two patches of one way go wrong at the same check."""
    return f"{type(error).__name__}: {re.sub(r'[0-9]+|<[^>]*>', '#', error.what)}"


def parsers(weights: Weights, newer: Weights) -> dict[str, Callable[[bytes], object]]:
    """Every way into the codec, by name, for a node that holds the weights before and after."""
    rows = weights["a"]

    def rows_of(broken: bytes) -> bytes:
        return digest_weights(weights | {"a": patch.apply_rows(rows, broken, "a", 0, len(rows))})

    return {
        "apply": lambda broken: digest_weights(patch.apply(weights, broken)),
        "summary": patch.summary,
        "stream": lambda broken: patch.StreamingApply(weights).feed(broken),
        "rows": rows_of,
        "tensors": lambda broken: digest_weights(weights | patch.apply_tensors({"a": rows}, broken)),
        "invert": lambda broken: patch.invert(newer, broken),
        "squash": lambda broken: patch.squash(weights, [broken]),
    }


@dataclass
class Found:
    """What one worker saw: answers by parser, faults in words, and the first patch of each case and way to refuse
    it.
    """

    answers: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    kept: dict[tuple[str, str], bytes] = field(default_factory=dict)


def _worker(job: tuple[int, int, float]) -> Found:
    seed, count, slow = job
    torch.set_num_threads(1)
    found = Found()
    answers, faults = found.answers, found.faults
    cases = corpus()
    plans = [
        (case, parser, kind)
        for case in cases
        for parser in ("apply", "apply", "apply", "summary", "stream", "rows", "tensors", "invert", "squash")
        for kind in MUTATORS
    ]
    random = np.random.default_rng(seed)
    done = 0
    while done < count:
        case, parser, kind = plans[int(random.integers(len(plans)))]
        weights, data = cases[case]
        before, honest = digest_weights(weights), digest_weights(patch.apply(weights, data))
        parse = parsers(weights, patch.apply(weights, data))[parser]
        for broken in mutations(data, kind, int(random.integers(2**32)), min(500, count - done)):
            done += 1
            begin = time.perf_counter()
            try:
                value = parse(broken)
                answers[f"{parser}: a value"] += 1
                if parser == "apply" and value != honest:
                    faults.append(f"{case} {parser} {kind}: taken for another patch: {broken.hex()}")
            except ProtocolError as error:
                answers[f"{parser}: {type(error).__name__}"] += 1
                if parser == "apply":
                    found.kept.setdefault((case, way_refused(error)), broken)
            except Exception as error:  # noqa: BLE001 - the very thing that is looked for
                faults.append(f"{case} {parser} {kind}: {error!r}: {broken.hex()}")
            if time.perf_counter() - begin > slow:
                answers[f"{parser}: slow"] += 1
        if digest_weights(weights) != before:
            faults.append(f"{case} {parser} {kind}: the weights changed")
    return found


def kept_ways(folder: Path) -> set[tuple[str, str]]:
    """The cases and ways to refuse them that a kept corpus covers."""
    ways = set()
    for weights in sorted(folder.glob("*/weights.safetensors")):
        old = safetensors.read(weights.read_bytes())
        for file in sorted(weights.parent.glob("*.patch")):
            try:
                patch.apply(old, file.read_bytes())
            except ProtocolError as error:
                ways.add((weights.parent.name, way_refused(error)))
    return ways


def keep(folder: Path, found: dict[tuple[str, str], bytes]) -> None:
    """Add patches to the corpus: one of each way that it does not cover, beside its case's weights."""
    covered = kept_ways(folder)
    for name, (weights, _) in corpus().items():
        directory = folder / name
        directory.mkdir(parents=True, exist_ok=True)
        if not (directory / "weights.safetensors").exists():
            (directory / "weights.safetensors").write_bytes(safetensors.write(weights))
        for (case, way), broken in sorted(found.items()):
            if case == name and (case, way) not in covered:
                (directory / f"{content_digest(broken).hex()[:16]}.patch").write_bytes(broken)


def main() -> None:
    """Run, print, and fail if anything but a value or a ProtocolError came back."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument(
        "--keep", type=Path, help="folder of the kept corpus, for patches that are refused in a new way"
    )
    parser.add_argument("--slow", type=float, default=1.0, help="seconds after which an answer counts as slow")
    arguments = parser.parse_args()
    share = -(-arguments.count // arguments.processes)
    jobs = [(arguments.seed * 1000 + number, share, arguments.slow) for number in range(arguments.processes)]
    begin = time.perf_counter()
    with multiprocessing.get_context("spawn").Pool(arguments.processes) as pool:
        results = pool.map(_worker, jobs)
    answers: Counter[str] = sum((found.answers for found in results), Counter())
    faults = [fault for found in results for fault in found.faults]
    if arguments.keep is not None:
        keep(arguments.keep, {way: broken for found in results for way, broken in found.kept.items()})
    for answer, count in sorted(answers.items()):
        print(f"{count:9}  {answer}")
    print(f"{share * arguments.processes} mutated patches in {time.perf_counter() - begin:.0f} s, {len(faults)} faults")
    for fault in faults[:10]:
        print(fault[:2000])
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    main()
