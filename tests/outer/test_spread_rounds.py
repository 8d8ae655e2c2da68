"""Rounds whose contributions the sites compare together: the result is that of the coordinator alone, whoever fails."""

from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np
import pytest
import trio

from protocol.identity.signing import open_signed, sign
from protocol.outer.comparing import SentRounds, compare
from protocol.outer.robust import RobustSettings, weigh_round
from protocol.outer.round_records import RoundManifest, RoundProducts
from protocol.pseudogradient import parts
from roles.ports import ObjectStore
from roles.trainer.outer.coordinator import first_state
from roles.trainer.outer.round_judging import PROJECTIONS
from tests.support.builders.samples import TRAINER, round_rules
from tests.support.faults.decorated_store import DecoratedStore
from tests.support.simulation.network import key
from tests.support.simulation.outer_sites import ROUND_SECONDS, OuterTestbed, equal_states, first_weights
from tests.support.simulation.virtual_clock import running

ROUNDS = 5
RULES = round_rules(local_steps=3, quorum=2, spread=1)
Bend = Callable[[RoundProducts], RoundProducts | None]


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of the three tensors is a part, so each of three sites has a share."""
    monkeypatch.setattr(parts, "PART_ELEMENTS", 1)


class BentStore(DecoratedStore):
    """A store on which a site's products are replaced, or not shown to the others at all."""

    def __init__(self, inner: ObjectStore, site: str, bend: Bend) -> None:
        super().__init__(inner)
        self._key, self._bend = key(site), bend
        self._own: dict[str, bytes] = {}

    async def put(self, path: str, data: bytes) -> None:
        if "/products/" not in path:
            await super().put(path, data)
            return
        self._own[path] = data
        bent = self._bend(open_signed(data, RoundProducts, [self._key.public]).record)
        if bent is not None:
            await super().put(path, sign(bent, self._key))

    async def get(self, path: str, max_bytes: int, *, offset: int = 0, size: int | None = None) -> bytes:
        return self._own.get(path) or await super().get(path, max_bytes, offset=offset, size=size)


def changed(record: RoundProducts, factor: float) -> RoundProducts:
    numbers = np.frombuffer(record.numbers, "<f8") * factor
    return record.model_copy(update={"numbers": numbers.tobytes()})


async def run_rounds(testbed: OuterTestbed, bend: Bend | None = None, vanishing: Sequence[str] = ()) -> None:
    """Run some rounds in which site-0 publishes what `bend` makes of its products."""
    async with running(testbed.feed) as nursery:
        nursery.start_soon(testbed.run_coordinator)
        for name in testbed.names:
            store = BentStore(testbed.store, name, bend) if bend is not None and name == "site-0" else testbed.store
            nursery.start_soon(testbed.run_site, testbed.handles[name], None, store)
        await testbed.until_round(ROUNDS)
        await trio.sleep(ROUND_SECONDS / 2)


async def equal_to_the_coordinator_alone(testbed: OuterTestbed) -> list[RoundManifest]:
    """Check that factors and states are those that follow from the payloads alone; return the manifests."""
    manifests = await testbed.manifests()
    shared, sent, compared = first_state(first_weights(), RULES), SentRounds(), 0
    for manifest in manifests[1:]:
        payloads = [await testbed.payload(item) for item in manifest.counted]
        if payloads:
            comparison = compare(shared, payloads, RULES, TRAINER.derive(PROJECTIONS))
            workers = [item.worker for item in manifest.counted]
            weighting = weigh_round(workers, comparison, sent, RobustSettings())
            factors = [item.factor for item in manifest.counted]
            assert list(weighting.factors) == factors
            sent, shared = sent.after(weighting.sent), shared.after(payloads, factors, RULES)
            compared += 1
        assert shared.digests == manifest.state
    assert compared >= ROUNDS - 1
    equal_states(testbed, ROUNDS - 1)
    return manifests


def outcomes(manifests: Sequence[RoundManifest], name: str) -> set[tuple[str, str]]:
    """Return what became of the shares of a site, and of what it repeated."""
    public, shares = key(name).public, [share for manifest in manifests for share in manifest.aggregated]
    own = {("share", share.outcome) for share in shares if share.worker == public}
    return own | {("repeat", share.check) for share in shares if share.checker == public}


@pytest.mark.parametrize("threads", [1, 3])
async def test_each_site_computes_its_share_and_another_one_repeats_a_part(threads: int) -> None:
    testbed = OuterTestbed(3, RULES, threads=threads)
    await run_rounds(testbed)
    manifests = await equal_to_the_coordinator_alone(testbed)
    for manifest in manifests[1:]:
        assert {share.worker for share in manifest.aggregated} == {key(name).public for name in testbed.names}
        assert all(share.checker != share.worker for share in manifest.aggregated)
    assert all(outcomes(manifests, name) == {("share", "sound"), ("repeat", "sound")} for name in testbed.names)


BENDS: dict[str, tuple[Bend, set[tuple[str, str]]]] = {
    "a little": (lambda own: changed(own, 1 + 1e-12), {("share", "wrong"), ("repeat", "wrong")}),
    "much": (lambda own: changed(own, 1e30), {("share", "wrong"), ("repeat", "wrong")}),
    "no numbers": (lambda own: changed(own, float("nan")), {("share", "wrong"), ("repeat", "wrong")}),
    "short": (
        lambda own: own.model_copy(update={"numbers": own.numbers[:-1]}),
        {("share", "wrong"), ("repeat", "wrong")},
    ),
    "other parts": (lambda own: own.model_copy(update={"parts": (5,)}), {("share", "wrong"), ("repeat", "wrong")}),
    "nothing": (lambda own: None, {("share", "lost"), ("repeat", "lost")}),
}


@pytest.mark.parametrize("what", BENDS)
async def test_a_site_that_publishes_wrong_products_or_none_is_named_and_changes_nothing(what: str) -> None:
    bend, expected = BENDS[what]
    testbed = OuterTestbed(3, RULES)
    await run_rounds(testbed, bend)
    manifests = await equal_to_the_coordinator_alone(testbed)
    assert outcomes(manifests, "site-0") == expected
    for name in ("site-1", "site-2"):
        assert outcomes(manifests, name) <= {("share", "sound"), ("repeat", "sound"), ("repeat", "lost")}
    alarms = testbed.coordinator_log.named("alarm")
    assert bool(alarms) == (what != "nothing")
    assert all(key("site-0").public.hex()[:16] in str(event) for event in alarms)
    # A site that failed has no share in the next round, which it then cannot delay.
    failed = [key("site-0").public in {share.worker for share in manifest.aggregated} for manifest in manifests[1:]]
    assert not any(one and other for one, other in pairwise(failed))
