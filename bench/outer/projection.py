"""A projection to a model of 7.6e9 parameters with H = 8 over links of 400 Mbit/s, from measured sizes and rates."""

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
from protocol.outer.comparing import part_products, project
from protocol.outer.round_records import RoundRules
from protocol.outer.round_shares import REPEATED
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
        encode, upload: of a site; check: decoding and projecting all payloads; weigh: their inner products; step: the
            new state with its digests, which every site and the coordinator compute; fetch: of all payloads.
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

    payload = sum(len(file) for own in last.payloads for file in own) / len(last.payloads) * scale
    step = best_of(lambda: last.shared.after(last.payloads, [1.0] * SITES, rules), repeats)
    return Stages(
        payload=payload,
        encode=best_of(encode, repeats) * scale,
        upload=payload / LINK,
        check=best_of(partial(_check, last.shared, last.payloads, rules), repeats) * scale,
        weigh=best_of(partial(part_products, last.shared, last.payloads, rules), repeats) * scale,
        step=step * scale,
        fetch=SITES * payload / LINK,
    )


def _check(shared: SharedState, payloads: Sequence[pseudogradient.Payload], rules: RoundRules) -> None:
    for payload in payloads:
        project(shared, rules, bytes(32), payload)


def by_sites(numbers: Sequence[int], shape: tuple[int, int] = (1024, 1024), repeats: int = 3) -> None:
    """Print what a round costs the coordinator and a site with dense contributions, by the number of sites.

    A share is measured on one part of two, and scaled to a share of all.
    """
    generator, rows = torch.Generator().manual_seed(0), []
    shared = SharedState.begin({f"w{place}": torch.zeros(shape) for place in range(2)}, has_momentum=True)
    rules, elements = VARIANTS["diloco"].rules(LOCAL_STEPS, 1), 2 * shape[0] * shape[1]
    scale, parts = PARAMETERS / elements, round(PARAMETERS / (shape[0] * shape[1]))
    for sites in numbers:
        payloads = []
        for _ in range(sites):
            local = {name: torch.randn(shape, generator=generator) for name in shared.weights}
            payloads.append(pseudogradient.encode(shared.weights, local, None, DENSE, shared.digests.weights).payload)
        works: list[Callable[[], object]] = [
            partial(_check, shared, payloads, rules),
            partial(part_products, shared, payloads, rules),
            partial(part_products, shared, payloads, rules, places=[0]),
            partial(shared.after, payloads, [1.0] * sites, rules),
        ]
        check, alone, one_part, apply = (best_of(work, repeats) for work in works)
        share = 2 * one_part / sites
        payload, products = sum(map(len, payloads[0])) * scale, 8 * parts * sites
        rows.append([
            str(sites), *(f"{seconds * scale:.0f}" for seconds in (check, alone, share, share / REPEATED, apply)),
            f"{sites * payload / 1e9:.0f}", f"{products * (1 + 1 / REPEATED) / 1e6:.2f}",
            f"{products / sites * (1 + 1 / REPEATED) / 1e6:.2f}",
        ])  # fmt: skip
    columns = ("sites", "check", "products", "a share", "repeat", "apply", "GB read", "MB of products", "of a site")
    print_table(f"{PARAMETERS:g} dense weights, from {elements}; CPU seconds of one core", columns, rows)


def projection(rounds: int, repeats: int, cores: int, shapes: dict[str, tuple[int, ...]] = SHAPES) -> None:
    """Print the projection."""
    pairs = [(variant, RATE) for variant in ("diloco", "exact", "grid", "sparse-32", "sparse-128")]
    runs: list[Run] = []
    for runs in simulate(pairs, rounds, LOCAL_STEPS, shapes):  # noqa: B007
        pass
    count = elements(runs[0].shared.weights)
    columns = (
        "method", "GB", "GB/s encode", "GB/s check", "encode", "upload", "check", "weigh", "step", "fetch", "a round",
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
