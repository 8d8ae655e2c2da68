"""How sites compute the comparison of a round together, and how the coordinator collects what they computed.

Who computes what, and what is believed, is in protocol/outer/round_shares.py.
"""

from collections.abc import Awaitable, Callable, Sequence, Set
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeVar

import numpy as np
import trio

from protocol import paths
from protocol.identity.signing import Signed, sign
from protocol.kernels.inner_products import Matrix
from protocol.outer.comparing import part_products
from protocol.outer.round_records import (
    AggregatedShare,
    PlannedContribution,
    RoundContribution,
    RoundManifest,
    RoundPlan,
    RoundProducts,
    RoundRules,
)
from protocol.outer.round_shares import ShareCase, draw_parts, share_cases, shares_of
from protocol.outer.shared_state import SharedState
from roles.gather import STORAGE_ERRORS, first_success, gather
from roles.node.identity import Node
from roles.records import fetch_record, open_record
from roles.trainer.outer.round_reader import fetch_payloads

DRAWN: Final = "parts that are computed again"
"""What the secret of a node's draws is derived for."""

Result = TypeVar("Result")


async def _until_read(read: Callable[[], Awaitable[Result]], poll_seconds: float) -> Result:
    """Return what a reading returns, as soon as storage has it."""
    while True:
        try:
            return await read()
        except STORAGE_ERRORS:
            await trio.sleep(poll_seconds)


@dataclass(frozen=True)
class Products:
    """The products of a round's contributions.

    Attributes:
        shared: with which the round began; rules: of the round.
        payloads: of the contributions, which were checked.
        threads: that compute.
    """

    rules: RoundRules
    shared: SharedState
    payloads: Sequence[bytes]
    threads: int

    async def compute(self, node: Node, places: Sequence[int] | None = None) -> Matrix:
        """Return the products of some parts, by default all, in their order: float64 [P, R]."""
        own = self.shared, self.payloads, self.rules, self.threads, places
        products: Matrix = await node.run_sync(part_products, *own)
        return products


async def compute_share(
    node: Node,
    opening: Signed[RoundManifest],
    shared: SharedState,
    fetched: dict[bytes, bytes],
    threads: int,
    poll_seconds: float,
) -> None:
    """Do a site's part of the comparison of a round: its share, and then some parts of its neighbor's.

    Args:
        shared: with which the round began.
        fetched: gets the payloads that were fetched, by digest: those that count are applied later.
    """
    key, number, rules = node.key.public, opening.record.number + 1, opening.record.rules

    def fetch_plan(trainer: bytes) -> Awaitable[Signed[RoundPlan]]:
        return fetch_record(node, RoundPlan, paths.round_plan(trainer, number))

    signed = await _until_read(lambda: first_success(fetch_plan, node.authority.trainers), poll_seconds)
    plan = signed.record
    if plan.opening != opening.digest or key not in plan.aggregators:
        return
    read = partial(fetch_payloads, node, plan.trainer, plan.contributions, fetched)
    work = Products(rules, shared, await _until_read(read, poll_seconds), threads)
    shares, own = shares_of(shared.stream_parts(rules), len(plan.aggregators)), plan.aggregators.index(key)

    async def publish(subject: bytes, places: Sequence[int]) -> None:
        numbers = (await work.compute(node, places)).astype("<f8").tobytes()
        record = RoundProducts(
            run=node.run_id, worker=key, number=number, subject=subject, parts=tuple(places), numbers=numbers
        )
        await node.publish(record.path, sign(record, node.key))

    if shares[own]:
        await publish(signed.digest, shares[own])
    if shares[own - 1]:
        path = paths.products(plan.aggregators[own - 1], number, signed.digest)
        seen = await _until_read(lambda: fetch_record(node, RoundProducts, path), poll_seconds)
        await publish(seen.digest, draw_parts(node.key.derive(DRAWN), seen.digest, shares[own - 1]))


async def publish_plan(
    node: Node, opening: Signed[RoundManifest], contributions: Sequence[RoundContribution], aggregators: Sequence[bytes]
) -> Signed[RoundPlan]:
    """Publish who computes what of some contributions, which are in the ascending order of their workers."""
    plan = RoundPlan(
        run=node.run_id,
        trainer=node.key.public,
        number=opening.record.number + 1,
        opening=opening.digest,
        contributions=tuple(PlannedContribution(worker=item.worker, payload=item.payload) for item in contributions),
        aggregators=tuple(aggregators),
    )
    data = sign(plan, node.key)
    await node.publish(plan.path, data)
    return open_record(node, RoundPlan, plan.path, data)


async def collect_products(
    node: Node, plan: Signed[RoundPlan], work: Products, bounds: Matrix, seconds: float, poll_seconds: float
) -> tuple[Matrix, tuple[AggregatedShare, ...]]:
    """Return the products of all parts, and what became of each share. What no site computed in time, or computed
    wrong, this node computes.

    Args:
        bounds: of the products (`product_bounds`).
        seconds: of waiting for the sites.
    """
    number, secret = plan.record.number, node.key.derive(DRAWN)
    cases = share_cases(plan.record, work.shared.stream_parts(work.rules))
    largest = 16 * bounds.size + 64 * len(bounds) + 1024  # bytes of a record

    def fetch(worker: bytes, subject: bytes) -> Awaitable[Signed[RoundProducts]]:
        return fetch_record(node, RoundProducts, paths.products(worker, number, subject), largest)

    async def watch(case: ShareCase) -> None:
        case.products = seen = await _until_read(lambda: fetch(case.worker, plan.digest), poll_seconds)
        case.repeat = await _until_read(lambda: fetch(case.checker, seen.digest), poll_seconds)

    with trio.move_on_after(seconds):
        await gather(watch, cases, len(cases))
    disputed = {place for case in cases for place in case.disputed(bounds, secret)}
    known = await _rows(node, work, disputed)
    shares = [case.decide(bounds, known) for case in cases]
    missing = set(range(len(bounds))) - known.keys()
    known |= await _rows(node, work, missing)
    for share in shares:
        _report(node, number, share)
    return np.array([known[place] for place in range(len(bounds))]), tuple(shares)


async def _rows(node: Node, work: Products, places: Set[int]) -> dict[int, Matrix]:
    """Return the products of some parts, by part."""
    return dict(zip(sorted(places), await work.compute(node, sorted(places)) if places else (), strict=True))


def _report(node: Node, number: int, share: AggregatedShare) -> None:
    for worker, outcome, what in (
        (share.worker, share.outcome, "products"),
        (share.checker, share.check, "repeated products"),
    ):
        if outcome == "wrong":
            node.alarm(f"worker {worker.hex()[:16]} computed wrong {what} in round {number}")
        elif outcome == "lost":
            node.telemetry.event("products-lost", number=number, worker=worker.hex()[:16], what=what)
