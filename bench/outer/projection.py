"""A projection to a model of 7.6e9 parameters with H = 8 over links of 400 Mbit/s, from measured sizes and rates."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import torch

from bench.measures import best_of
from bench.outer.methods import DENSE, VARIANTS
from bench.outer.sizes import SHAPES, Run, elements, simulate
from bench.outer.trials import SITES
from bench.tables import print_table
from protocol import pseudogradient
from protocol.outer.comparing import compare
from protocol.outer.shared_state import SharedState

PARAMETERS: Final = 7.6e9
LINK: Final = 400e6 / 8
"""Bytes a second, each way, of a site and of the coordinator."""
LOCAL_STEPS: Final = 8
RATE: Final = 1e-6
PAPER: Final = {
    "ddp": "8 x 30.46 GB, 4874 s",
    "diloco": "30.46 GB, 609 s",
    "exact": "1.77 GB (zstd-1), 35 s",
    "sparse-128": "6.6 + 2 bits an entry, 5 s",
    "sparse-32": "8.9 + 2 bits an entry, 2 s",
}
"""PULSE, table 7 and section F.3, and SparseLoCo, section 3: bytes of a payload, and seconds of its upload."""


@dataclass(frozen=True)
class Stages:
    """Seconds of one round's stages at 7.6e9 parameters, one core and one link each.

    Attributes:
        payload: bytes.
        encode, upload: of a site; check: decoding all payloads; weigh: their inner products; step: the new state with
            its digests, which every site and the coordinator compute; fetch: of all payloads.
    """

    payload: float
    encode: float
    upload: float
    check: float
    weigh: float
    step: float
    fetch: float

    def total(self, cores: int) -> float:
        """Return the seconds from the end of the local steps to the start of the next ones.

        Site: encode, upload. Coordinator: fetch, check, weigh, step, and the copies of the payloads. Site: fetch, step.
        """
        computing = self.encode + self.check + self.weigh + 2 * self.step
        return computing / cores + self.upload + 3 * self.fetch


def measure(run: Run, repeats: int) -> Stages:
    """Measure the stages of a run's newest round, and scale them."""
    last = run.last
    assert last is not None
    rules = VARIANTS[run.variant].rules(LOCAL_STEPS, 1)
    digest, count = last.shared.digests.weights, elements(last.shared.weights)
    scale = PARAMETERS / count

    def encode() -> object:
        decay = rules.feedback_decay or 1.0
        return pseudogradient.encode(last.shared.weights, last.local, last.feedback, rules.coding, digest, decay=decay)

    def check() -> None:
        for payload in last.payloads:
            for _ in pseudogradient.decode(payload, last.shared.weights, digest):
                pass

    payload = sum(map(len, last.payloads)) / len(last.payloads) * scale
    step = best_of(lambda: last.shared.after(last.payloads, [1.0] * SITES, rules), repeats)
    return Stages(
        payload=payload,
        encode=best_of(encode, repeats) * scale,
        upload=payload / LINK,
        check=best_of(check, repeats) * scale,
        weigh=best_of(lambda: compare(last.shared, last.payloads, rules, bytes(32)), repeats) * scale,
        step=step * scale,
        fetch=SITES * payload / LINK,
    )


def by_sites(numbers: Sequence[int], threads: int, shape: tuple[int, int] = (1024, 1024), repeats: int = 3) -> None:
    """Print how long a coordinator compares and applies dense contributions, by the number of sites."""
    generator, rows = torch.Generator().manual_seed(0), []
    shared = SharedState.begin({f"w{place}": torch.zeros(shape) for place in range(2)}, has_momentum=True)
    rules, elements = VARIANTS["diloco"].rules(LOCAL_STEPS, 1), 2 * shape[0] * shape[1]
    for sites in numbers:
        payloads = []
        for _ in range(sites):
            local = {name: torch.randn(shape, generator=generator) for name in shared.weights}
            payloads.append(pseudogradient.encode(shared.weights, local, None, DENSE, shared.digests.weights).payload)
        runs: dict[str, Callable[[int], object]] = {
            "compare": partial(compare, shared, payloads, rules, bytes(32)),
            "apply": partial(shared.after, payloads, [1.0] * sites, rules),
        }
        for name, run in runs.items():
            best = dict.fromkeys((1, threads), (math.inf, math.inf))
            for count in (1, threads) * repeats:  # in turn, so that other work on the machine slows both
                begin, processor = time.perf_counter(), time.process_time()
                run(count)
                own = time.perf_counter() - begin, time.process_time() - processor
                best[count] = min(best[count][0], own[0]), min(best[count][1], own[1])
            scale = 1e9 / elements
            (wall, cpu), (many, _) = best[1], best[threads]
            figures = (cpu * scale, cpu * scale / sites, wall * scale, many * scale)
            rows.append([name, str(sites), *(f"{figure:.2f}" for figure in figures)])
    columns = ("work", "sites", "CPU s", "a site", "wall s", f"with {threads} threads")
    print_table(f"1e9 dense weights, from {elements}; least of {repeats}", columns, rows)


def projection(rounds: int, repeats: int, cores: int, shapes: dict[str, tuple[int, ...]] = SHAPES) -> None:
    """Print the projection."""
    pairs = [(variant, RATE) for variant in ("diloco", "exact", "grid", "sparse-32", "sparse-128")]
    runs: list[Run] = []
    for runs in simulate(pairs, rounds, LOCAL_STEPS, shapes):  # noqa: B007
        pass
    count = elements(runs[0].shared.weights)
    columns = (
        "method", "GB", "GB/s encode", "GB/s decode", "encode", "upload", "check", "weigh", "step", "fetch", "a round",
        f"with {cores} cores", "the papers: payload, upload",
    )  # fmt: skip
    title = f"7.6e9 weights, {SITES} sites, 400 Mbit/s; from {count} weights, rate {RATE:g}, round {rounds}"
    rows, gigabytes = [], 4 * PARAMETERS / 1e9
    for run in runs:
        stages = measure(run, repeats)
        rows.append([
            run.variant, f"{stages.payload / 1e9:.2f}", f"{gigabytes / stages.encode:.2f}",
            f"{SITES * gigabytes / stages.check:.2f}",
            *(f"{getattr(stages, name):.0f}" for name in ("encode", "upload", "check", "weigh", "step", "fetch")),
            f"{stages.total(1):.0f}", f"{stages.total(cores):.0f}", PAPER.get(run.variant, ""),
        ])  # fmt: skip
    dense = 4 * PARAMETERS
    seconds = LOCAL_STEPS * (SITES + 1) * dense / LINK
    rows.append([
        "ddp", f"{LOCAL_STEPS * dense / 1e9:.0f}", *[""] * 3, f"{LOCAL_STEPS * dense / LINK:.0f}", *[""] * 3,
        f"{LOCAL_STEPS * SITES * dense / LINK:.0f}", f"{seconds:.0f}", f"{seconds:.0f}", PAPER["ddp"],
    ])  # fmt: skip
    print_table(f"{title}; seconds on one core", columns, rows)
