"""Mutated patches against every parser of the codec.

    python -m bench.fuzz --count 1000000 --seed 0 --processes 2
    python -m bench.fuzz --count 60000 --keep tests/patch/corpus     also adds new refused patches to a corpus

Each parser must return a value or raise a ProtocolError, and must not change the weights that it gets. The patches are
made from small weights in every mode and profile. A third of the mutations change the whole patch, a third the table
inside its zstd frame, and a third the frames behind an intact table. The command prints how often each parser gave
which answer, and how many answers took longer than --slow seconds. It exits with 1 on any other exception, on a mutated
patch that gives other weights than the original, and on weights that have changed. It takes about 30 seconds for
100,000 patches on one idle core, and needs nothing but the installed program.
"""

import argparse
import multiprocessing
import re
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from protocol import patch
from protocol.chain import safetensors
from protocol.digest import digest_weights
from protocol.encoding import content_digest
from protocol.errors import ProtocolError
from tests.support.faults.patch_mutations import MUTATORS, corpus, mutations, parsers


def refusal_pattern(error: ProtocolError) -> str:
    """Return an error's message without numbers and names: patches with one pattern are refused by the same check."""
    return f"{type(error).__name__}: {re.sub(r'[0-9]+|<[^>]*>', '#', error.what)}"


@dataclass
class WorkerResult:
    """The result of one worker process.

    Attributes:
        answers: number of answers, by parser and kind of answer.
        faults: a line for each fault.
        refused_patches: the first refused patch, by case and refusal pattern.
    """

    answers: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    refused_patches: dict[tuple[str, str], bytes] = field(default_factory=dict)


def _run_job(arguments: tuple[int, int, float]) -> WorkerResult:
    seed, count, slow = arguments
    torch.set_num_threads(1)
    result = WorkerResult()
    answers, faults = result.answers, result.faults
    cases = corpus()
    plans = [
        (case, parser, kind)
        for case in cases
        for parser in ("apply", "apply", "apply", "summary", "stream")
        for kind in MUTATORS
    ]
    generator = np.random.default_rng(seed)
    count_so_far = 0
    while count_so_far < count:
        case, parser, kind = plans[int(generator.integers(len(plans)))]
        weights, data = cases[case]
        before, honest = digest_weights(weights), digest_weights(patch.apply(weights, data))
        parse = parsers(weights)[parser]
        for mutated in mutations(data, kind, int(generator.integers(2**32)), min(500, count - count_so_far)):
            count_so_far += 1
            begin = time.perf_counter()
            try:
                value = parse(mutated)
                answers[f"{parser}: a value"] += 1
                if parser == "apply" and value != honest:
                    faults.append(f"{case} {parser} {kind}: gives other weights: {mutated.hex()}")
            except ProtocolError as error:
                answers[f"{parser}: {type(error).__name__}"] += 1
                if parser == "apply":
                    result.refused_patches.setdefault((case, refusal_pattern(error)), mutated)
            except Exception as error:  # noqa: BLE001 - this is what the fuzzer looks for
                faults.append(f"{case} {parser} {kind}: {error!r}: {mutated.hex()}")
            if time.perf_counter() - begin > slow:
                answers[f"{parser}: slow"] += 1
        if digest_weights(weights) != before:
            faults.append(f"{case} {parser} {kind}: the weights changed")
    return result


def corpus_patterns(folder: Path) -> set[tuple[str, str]]:
    """Return the pairs of case and refusal pattern that a corpus has."""
    patterns = set()
    for weights in sorted(folder.glob("*/weights.safetensors")):
        old = safetensors.read(weights.read_bytes())
        for file in sorted(weights.parent.glob("*.patch")):
            try:
                patch.apply(old, file.read_bytes())
            except ProtocolError as error:
                patterns.add((weights.parent.name, refusal_pattern(error)))
    return patterns


def add_to_corpus(folder: Path, patches: dict[tuple[str, str], bytes]) -> None:
    """Add one patch of each new refusal pattern to the corpus, in the folder of its case's weights."""
    known_patterns = corpus_patterns(folder)
    for name, (weights, _) in corpus().items():
        directory = folder / name
        directory.mkdir(parents=True, exist_ok=True)
        if not (directory / "weights.safetensors").exists():
            (directory / "weights.safetensors").write_bytes(safetensors.write(weights))
        for (case, pattern), mutated in sorted(patches.items()):
            if case == name and (case, pattern) not in known_patterns:
                (directory / f"{content_digest(mutated).hex()[:16]}.patch").write_bytes(mutated)


def main() -> None:
    """Run the workers, print, and exit with 1 on a fault."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100_000, help="how many mutated patches")
    parser.add_argument("--seed", type=int, default=0, help="seed of the mutations")
    parser.add_argument("--processes", type=int, default=1, help="worker processes")
    parser.add_argument("--keep", type=Path, help="folder of a corpus that gets a patch of each new refusal pattern")
    parser.add_argument("--slow", type=float, default=1.0, help="seconds after which an answer counts as slow")
    arguments = parser.parse_args()
    share = -(-arguments.count // arguments.processes)
    jobs = [(arguments.seed * 1000 + number, share, arguments.slow) for number in range(arguments.processes)]
    begin = time.perf_counter()
    with multiprocessing.get_context("spawn").Pool(arguments.processes) as pool:
        results = pool.map(_run_job, jobs)
    answers: Counter[str] = sum((result.answers for result in results), Counter())
    faults = [fault for result in results for fault in result.faults]
    if arguments.keep is not None:
        add_to_corpus(
            arguments.keep,
            {pattern: mutated for result in results for pattern, mutated in result.refused_patches.items()},
        )
    for answer, count in sorted(answers.items()):
        print(f"{count:9}  {answer}")
    print(f"{share * arguments.processes} mutated patches in {time.perf_counter() - begin:.0f} s, {len(faults)} faults")
    for fault in faults[:10]:
        print(fault[:2000])
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    main()
