"""How the comparison of a round's contributions is spread over its sites (docs/spec/outer-round.md, "Spread rounds").

The parts of the contributions are divided into shares of about the same size. The aggregator of a share computes the
products of its parts, and the aggregator after it repeats some of them, drawn when it has seen the result. Nothing that
a site computes is believed by itself: where two sites disagree, or one says nothing, the coordinator computes. It
computes all if their sums are not what its own projections show, so a lie that nobody drew, or on which two sites
agree, is found if it is large. All results are the same bit for bit, whoever computes them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from hashlib import sha256
from itertools import accumulate
from typing import Final

import numpy as np

from protocol.identity.signing import Signed
from protocol.kernels.inner_products import Matrix, row_products
from protocol.outer.comparing import Comparison, length_factors
from protocol.outer.round_records import (
    AggregatedShare,
    PlannedContribution,
    RoundContribution,
    RoundManifest,
    RoundPlan,
    RoundProducts,
)
from protocol.pseudogradient import Part

_ORDER_DOMAIN: Final = b"grailnode/1 aggregators"

REPEATED: Final = 8
"""Of so many parts of a share, one is computed by a second site."""

LEAST_SITES: Final = 3
"""Contributions from which on a round is spread; fewer cannot be told apart, and are soon compared."""

_DEVIATIONS: Final = 8.0  # standard deviations by which true products do not differ from what projections show


def plan_round(
    opening: Signed[RoundManifest], contributions: Sequence[RoundContribution], trainer: bytes
) -> RoundPlan | None:
    """Return who computes what of the sound contributions, in ascending order of workers, when a round closes, for the
    trainer that closes it to sign, whose key may be newer than the opening's; None if it is better off alone.

    A site that failed in the round before has no share, so that it delays every other round at most; nor have both
    sites of a share that was not repeated, whose checker may have seen other products than the coordinator. Nobody
    knows the order of the others before the round opens.
    """
    manifest = opening.record
    failed = set[bytes]()
    for share in manifest.aggregated:
        if share.outcome != "sound" or share.check == "lost":
            failed.add(share.worker)
        if share.check != "sound" and share.products:
            failed.add(share.checker)
    able = [item.worker for item in contributions if item.worker not in failed]
    if not manifest.rules.spread or len(contributions) < LEAST_SITES or len(able) < 2:
        return None
    return RoundPlan(
        run=manifest.run,
        trainer=trainer,
        number=manifest.number + 1,
        opening=opening.digest,
        contributions=tuple(PlannedContribution(worker=item.worker, payload=item.payload) for item in contributions),
        aggregators=tuple(sorted(able, key=lambda worker: sha256(_ORDER_DOMAIN + opening.digest + worker).digest())),
    )


def shares_of(parts: Sequence[Part], count: int) -> list[list[int]]:
    """Return the places of the parts of each share; a share may have none where parts are few or large."""
    ends = [*accumulate(part.elements for part in parts)]
    shares: list[list[int]] = [[] for _ in range(count)]
    for place, part in enumerate(parts):
        middle = 2 * ends[place] - part.elements  # twice the part's middle element
        shares[min(count - 1, middle * count // max(1, 2 * ends[-1]))].append(place)
    return shares


def draw_parts(secret: bytes, subject: bytes, share: Sequence[int]) -> list[int]:
    """Return the parts of a share that are computed again, by the secret of who draws and the digest of what it has
    seen.
    """
    ranks = {place: sha256(secret + subject + place.to_bytes(8, "little")).digest() for place in share}
    return sorted(sorted(share, key=ranks.__getitem__)[: -(-len(share) // REPEATED)])


def largest_products(parts: int, contributions: int) -> int:
    """Return how many bytes a record of products can have."""
    return (16 * contributions + 64) * parts + 1024


def fits_projections(comparison: Comparison) -> bool:
    """Return whether the products with the sum of all are what the projections show, but for chance."""
    rows = np.array(length_factors(comparison.lengths.tolist()))[:, None] * comparison.projections
    total = reduce(np.add, rows)
    # Each number of a projection would have had the opposite sign with the same probability.
    deviations = np.sqrt(row_products(rows * rows, total * total))
    differences = np.abs(comparison.with_all - row_products(rows, total))
    return bool((differences <= _DEVIATIONS * deviations).all())


@dataclass
class ShareCase:
    """What the coordinator knows of a share."""

    worker: bytes  # who computes it
    checker: bytes  # who repeats a part of it
    parts: list[int]  # their places
    products: Signed[RoundProducts] | None = None  # of the aggregator; None as long as storage has shown none
    repeat: Signed[RoundProducts] | None = None  # of the checker; likewise

    def disputed(self, contributions: int, secret: bytes) -> list[int]:
        """Return the parts of which the coordinator, by its secret, must compute the products of so many contributions
        to decide: none if two sites agree, some if they do not or if the checker said nothing, all if the aggregator
        said nothing of the whole share.
        """
        own, repeated = self._read(contributions)
        if self.products is None or own is None:
            return self.parts
        if repeated is None:
            return draw_parts(secret, self.products.digest, self.parts)
        return [] if all(_same(own[place], numbers) for place, numbers in repeated.items()) else sorted(repeated)

    def decide(self, contributions: int, known: dict[int, Matrix]) -> AggregatedShare:
        """Return what became of the share, and add its products to the known ones, by part, if they are believed."""
        own, repeated = self._read(contributions)
        computed = [place for place in self.parts if place in known]
        is_sound = own is not None and all(_same(own[place], known[place]) for place in computed)
        if own is not None and is_sound:
            known |= own
        # Where the aggregator is believed the coordinator knows all parts now, and otherwise what was disputed.
        is_right = repeated is not None and all(_same(known.get(place), own) for place, own in repeated.items())
        return AggregatedShare(
            worker=self.worker,
            products=self.products.digest if self.products is not None else b"",
            outcome="lost" if self.products is None else "sound" if is_sound else "wrong",
            checker=self.checker,
            repeat=self.repeat.digest if self.repeat is not None else b"",
            check="lost" if self.repeat is None else "sound" if is_right else "wrong",
        )

    def _read(self, contributions: int) -> tuple[dict[int, Matrix] | None, dict[int, Matrix] | None]:
        """Return the aggregator's products by part, None if they are not of the whole share, and the checker's."""
        own, repeated = (_read(signed, self.parts, contributions) for signed in (self.products, self.repeat))
        return own if own is not None and len(own) == len(self.parts) else None, repeated


def share_cases(plan: RoundPlan, parts: Sequence[Part]) -> list[ShareCase]:
    """Return the shares of a plan that have parts, with those who compute them."""
    aggregators = plan.aggregators
    shares = zip(aggregators, (*aggregators[1:], aggregators[0]), shares_of(parts, len(aggregators)), strict=True)
    return [ShareCase(worker, checker, places) for worker, checker, places in shares if places]


def _same(one: Matrix | None, other: Matrix) -> bool:
    return one is not None and one.tobytes() == other.tobytes()


def _read(signed: Signed[RoundProducts] | None, share: Sequence[int], contributions: int) -> dict[int, Matrix] | None:
    """Return the products of a record, by part; None if they are not of the share's parts, or not all are finite."""
    if signed is None:
        return None
    record = signed.record
    size = len(record.parts) * contributions
    if not record.parts or not set(record.parts) <= set(share) or len(record.numbers) != 8 * size:
        return None
    products = np.frombuffer(record.numbers, "<f8").astype(np.float64).reshape(-1, contributions)
    return dict(zip(record.parts, products, strict=True)) if np.isfinite(products).all() else None
