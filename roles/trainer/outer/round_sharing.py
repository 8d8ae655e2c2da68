"""How sites compute the comparison of a round together, and how the coordinator collects what they computed.

Who computes what, and what is believed, is in protocol/outer/round_shares.py.
"""

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Final, TypeVar

import numpy as np
import trio

from protocol import paths
from protocol.errors import ProtocolError
from protocol.identity.signing import Signed, sign
from protocol.kernels.inner_products import Matrix
from protocol.outer.comparing import Comparison, part_products
from protocol.outer.round_records import AggregatedShare, RoundManifest, RoundPlan, RoundProducts
from protocol.outer.round_shares import (
    ShareCase,
    draw_parts,
    fits_projections,
    largest_products,
    share_cases,
    shares_of,
)
from protocol.outer.shared_state import SharedState
from protocol.pseudogradient import Part
from roles.gather import STORAGE_ERRORS, first_success, gather
from roles.node.identity import Node
from roles.records import fetch_record, open_record
from roles.trainer.outer.round_reader import FetchedFiles, fetch_payloads

DRAWN: Final = "parts that are computed again"
"""What the secret of a node's draws is derived for."""

Result = TypeVar("Result")
Compute = Callable[[Sequence[int]], Awaitable[Matrix]]
"""Computes the products of some parts, in ascending order: float64 [P, R]."""


async def _until_read(read: Callable[[], Awaitable[Result]], poll_seconds: float) -> Result:
    """Return what a reading returns, as soon as storage has it."""
    while True:
        try:
            return await read()
        except STORAGE_ERRORS:
            await trio.sleep(poll_seconds)


async def _products_of(
    node: Node, plan: RoundPlan, worker: bytes, subject: bytes, parts: int, poll_seconds: float
) -> Signed[RoundProducts]:
    """Return the products that a site published, as soon as storage has them."""
    path, largest = paths.products(worker, plan.number, subject), largest_products(parts, len(plan.contributions))
    return await _until_read(partial(fetch_record, node, RoundProducts, path, largest), poll_seconds)


async def compute_share(
    node: Node,
    opening: Signed[RoundManifest],
    shared: SharedState,
    fetched: FetchedFiles,
    threads: int,
    poll_seconds: float,
) -> None:
    """Do a site's part of the comparison of a round that began with `shared`: its share, and then some parts of its
    neighbor's. `fetched` gets the payloads' files, since those that count are applied later.
    """
    key, number, rules = node.key.public, opening.record.number + 1, opening.record.rules

    async def fetch_plan(trainer: bytes) -> Signed[RoundPlan]:
        signed = await fetch_record(node, RoundPlan, paths.round_plan(trainer, number))
        if signed.record.opening != opening.digest:
            raise ProtocolError("is of another history", signed.record.path)
        return signed

    # The trainer of the opening may have another key now, or get one while this waits.
    signed = await _until_read(lambda: first_success(fetch_plan, node.authority.trainers), poll_seconds)
    plan = signed.record
    if key not in plan.aggregators:
        return
    parts, own = shared.stream_parts(rules), plan.aggregators.index(key)
    read = partial(fetch_payloads, node, plan.trainer, number, plan.contributions, parts, fetched)
    payloads = await _until_read(read, poll_seconds)
    shares = shares_of(parts, len(plan.aggregators))

    async def publish(subject: bytes, places: Sequence[int]) -> None:
        products: Matrix = await node.run_sync(part_products, shared, payloads, rules, threads, places)
        numbers = products.astype("<f8").tobytes()
        record = RoundProducts(
            run=node.run_id, worker=key, number=number, subject=subject, parts=tuple(places), numbers=numbers
        )
        await node.publish(record.path, sign(record, node.key))

    if shares[own]:
        await publish(signed.digest, shares[own])
    if shares[own - 1]:
        neighbors = await _products_of(node, plan, plan.aggregators[own - 1], signed.digest, len(parts), poll_seconds)
        await publish(neighbors.digest, draw_parts(node.key.derive(DRAWN), neighbors.digest, shares[own - 1]))


async def collect_products(
    node: Node,
    plan: RoundPlan,
    parts: Sequence[Part],
    compute: Compute,
    compare: Callable[[Matrix], Awaitable[Comparison]],
    seconds: float,
    poll_seconds: float,
) -> tuple[Comparison, tuple[AggregatedShare, ...]]:
    """Publish a plan, and return the comparison of all parts, which `compare` makes of their products, and what became
    of each share. This node computes what no site computed within some seconds, or computed wrong, and everything if
    its projections show that something else is wrong.
    """
    data, secret, cases = sign(plan, node.key), node.key.derive(DRAWN), share_cases(plan, parts)
    await node.publish(plan.path, data)
    digest, count = open_record(node, RoundPlan, plan.path, data).digest, len(plan.contributions)

    async def watch(case: ShareCase) -> None:
        case.products = await _products_of(node, plan, case.worker, digest, len(parts), poll_seconds)
        case.repeat = await _products_of(node, plan, case.checker, case.products.digest, len(parts), poll_seconds)

    async def decide(places: Sequence[int]) -> tuple[Comparison, tuple[AggregatedShare, ...]]:
        products = dict(zip(places, await compute(places), strict=True))
        shares = tuple(case.decide(count, products) for case in cases)
        missing = [place for place in range(len(parts)) if place not in products]
        products |= zip(missing, await compute(missing), strict=True)
        return await compare(np.array([products[place] for place in range(len(parts))])), shares

    with trio.move_on_after(seconds):
        await gather(watch, cases, len(cases))
    comparison, shares = await decide(sorted({place for case in cases for place in case.disputed(count, secret)}))
    if not fits_projections(comparison):
        comparison, shares = await decide(range(len(parts)))
    for share in shares:
        _report(node, plan.number, share)
    return comparison, shares


def _report(node: Node, number: int, share: AggregatedShare) -> None:
    for worker, outcome in ((share.worker, share.outcome), (share.checker, share.check)):
        if outcome == "wrong":
            node.alarm(f"worker {worker.hex()[:16]} computed wrong products of round {number}")
        elif outcome == "lost":
            node.telemetry.event("products-lost", number=number, worker=worker.hex()[:16])
