"""Rounds whose contributions the sites compare together: the result is that of the coordinator alone, whoever fails."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import trio

from protocol import paths
from protocol.identity.signing import Signed, open_signed, sign
from protocol.kernels.inner_products import Matrix
from protocol.outer.comparing import SentRounds, compare
from protocol.outer.dithering import first_state
from protocol.outer.robust import weigh_round
from protocol.outer.round_records import RoundManifest, RoundProducts
from protocol.outer.round_shares import ShareCase, draw_parts, shares_of
from protocol.pseudogradient import parts
from roles.ports import ObjectStore
from roles.trainer.outer.round_judging import PROJECTIONS
from tests.support.adversaries.hostile_sites import Bend, BentStore, changed
from tests.support.builders.samples import TRAINER, digest, round_plan, round_products, round_rules
from tests.support.faults.decorated_store import DecoratedStore
from tests.support.simulation.network import key
from tests.support.simulation.outer_crashes import SPREAD, kill, operations_of
from tests.support.simulation.outer_sites import ROUND_SECONDS, OuterTestbed, equal_states, first_weights
from tests.support.simulation.virtual_clock import running

ROUNDS = 5
RULES = round_rules(local_steps=3, quorum=2, spread=1)


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of the three tensors is a part, so each of three sites has a share."""
    monkeypatch.setattr(parts, "PART_ELEMENTS", 1)


async def run_rounds(
    testbed: OuterTestbed, stores: Mapping[str, ObjectStore], coordinator_store: ObjectStore | None = None
) -> None:
    """Run some rounds in which some sites, or the coordinator, have a store of their own."""
    async with running(testbed.feed) as nursery:
        nursery.start_soon(testbed.run_coordinator, None, coordinator_store)
        for name, handle in testbed.handles.items():
            nursery.start_soon(testbed.run_site, handle, None, stores.get(name))
        await testbed.until_round(ROUNDS)
        await trio.sleep(ROUND_SECONDS / 2)


async def equal_to_the_coordinator_alone(testbed: OuterTestbed) -> list[RoundManifest]:
    """Check that factors and states are those that follow from the payloads alone; return the manifests."""
    manifests = await testbed.manifests()
    shared, sent, compared = first_state(first_weights(), RULES), SentRounds(), 0
    for manifest in manifests[1:]:
        payloads = await testbed.payloads(manifest, shared, RULES)
        if payloads:
            comparison = compare(shared, payloads, RULES, TRAINER.derive(PROJECTIONS))
            workers = [item.worker for item in manifest.counted]
            weighting = weigh_round(workers, comparison, sent)
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


async def test_sites_pass_by_the_plans_of_another_trainer_s_history() -> None:
    testbed, other = OuterTestbed(3, RULES), key("other")
    authority = testbed.run.authority.model_copy(update={"trainers": (other.public, testbed.trainer.public)})
    testbed.run = testbed.run.model_copy(update={"authority": authority})
    for number in range(1, ROUNDS + 1):
        plan = round_plan(run=testbed.run_id, trainer=other.public, number=number)
        await testbed.store.put(plan.path, sign(plan, other))
    await run_rounds(testbed, {})
    shares = [share for manifest in await testbed.manifests() for share in manifest.aggregated]
    assert {(share.outcome, share.check) for share in shares} == {("sound", "sound")}


@pytest.mark.parametrize("threads", [1, 3])
async def test_each_site_computes_its_share_and_another_one_repeats_a_part(threads: int) -> None:
    testbed = OuterTestbed(3, RULES, threads=threads)
    await run_rounds(testbed, {})
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
    await run_rounds(testbed, {"site-0": BentStore(testbed.store, key("site-0"), bend)})
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


async def test_sites_that_agree_on_wrong_products_are_found_by_the_projections_and_change_nothing() -> None:
    testbed = OuterTestbed(3, RULES)
    stores = {name: BentStore(testbed.store, key(name), lambda own: changed(own, -0.9, 1, 1)) for name in testbed.names}
    await run_rounds(testbed, stores)
    manifests = await equal_to_the_coordinator_alone(testbed)
    assert all(outcomes(manifests, name) == {("share", "wrong"), ("repeat", "wrong")} for name in testbed.names)


class TwoVersions(DecoratedStore):
    """The coordinator's store, which shows it another signed version of site-0's products than the sites see."""

    async def get(self, path: str, max_bytes: int, *, offset: int = 0, size: int | None = None) -> bytes:
        data = await super().get(path, max_bytes, offset=offset, size=size)
        if path.startswith(paths.kind_prefix(key("site-0").public, "products")):
            record = open_signed(data, RoundProducts, [key("site-0").public]).record
            data = sign(changed(record, 1 - 1e-12), key("site-0"))
        return data


async def test_a_site_that_shows_the_coordinator_another_version_is_named_and_its_checker_is_not() -> None:
    testbed = OuterTestbed(3, RULES)
    await run_rounds(testbed, {}, TwoVersions(testbed.store))
    manifests = await equal_to_the_coordinator_alone(testbed)
    assert ("share", "wrong") in outcomes(manifests, "site-0")
    others = outcomes(manifests, "site-1") | outcomes(manifests, "site-2")
    assert others == {("share", "sound"), ("repeat", "sound"), ("repeat", "lost")}


async def test_a_site_that_shows_its_checker_another_version_delays_every_other_round_at_most() -> None:
    testbed = OuterTestbed(3, RULES)
    store = BentStore(
        testbed.store, key("site-0"), lambda own: changed(own, 1 + 1e-12)
    )  # the coordinator sees the true one
    await run_rounds(testbed, {"site-0": store}, store)
    manifests = await equal_to_the_coordinator_alone(testbed)
    unrepeated = [any(share.check == "lost" for share in manifest.aggregated) for manifest in manifests]
    assert any(unrepeated) and not any(one and other for one, other in pairwise(unrepeated))


async def test_a_site_that_is_gone_when_the_plan_comes_is_not_waited_for_twice() -> None:
    testbed = OuterTestbed(3, RULES)
    async with running(testbed.feed) as nursery:
        nursery.start_soon(testbed.run_coordinator)
        for name in testbed.names[1:]:
            nursery.start_soon(testbed.run_site, testbed.handles[name])
        with trio.CancelScope() as life:
            nursery.start_soon(kill_after_its_contribution, testbed, life)
            await testbed.run_site(testbed.handles["site-0"])
        closing = await testbed.until_round(1)
        following = await testbed.until_round(2)
    assert [(share.outcome, share.check) for share in closing.aggregated if share.worker == key("site-0").public] == [
        ("lost", "lost")
    ]
    assert len(closing.counted) == 3
    assert testbed.reasons(following) == {"site-0": "lost"}
    assert following.aggregated == ()  # of two sites


async def kill_after_its_contribution(testbed: OuterTestbed, life: trio.CancelScope) -> None:
    path = paths.contribution(key("site-0").public, 1)
    while path not in [item.path async for item in testbed.store.list(path)]:
        await trio.sleep(0.25)
    life.cancel()


async def test_products_are_deleted_although_the_next_rounds_are_not_spread() -> None:
    testbed = OuterTestbed(3, RULES)
    await testbed.run_rounds(2)
    testbed.settings = replace(testbed.settings, rules=RULES.model_copy(update={"spread": 0}))
    manifests = await testbed.run_rounds(5)
    assert manifests[2].aggregated and not manifests[5].aggregated
    prefixes = [paths.kind_prefix(key(name).public, "products") for name in testbed.names]
    assert not [item.path for prefix in prefixes async for item in testbed.store.list(prefix)]


@pytest.mark.parametrize("victim", ["site-0", "coordinator"])
def test_a_process_may_be_killed_while_a_round_is_compared(victim: str) -> None:
    operations = operations_of(victim, SPREAD)
    kinds = ("/plans/", "/products/")
    places = [place for place, (_, path) in enumerate(operations) if any(kind in path for kind in kinds)]
    assert places
    for place in places[:4]:
        for after in (False, True):
            kill(victim, place, after=after, rules=SPREAD)


# A share of many parts, of which a second site computes some


PARTS = list(range(4, 20))
PRODUCTS = np.random.default_rng(0).uniform(-1, 1, (24, 3))


def record_of(site: int, subject: bytes, places: Sequence[int], products: Matrix = PRODUCTS) -> Signed[RoundProducts]:
    own = key(f"site-{site}")
    numbers = products[list(places)].astype("<f8").tobytes()
    record = round_products(worker=own.public, subject=subject, parts=tuple(places), numbers=numbers)
    return open_signed(sign(record, own), RoundProducts, [own.public])


def case_of(products: Matrix, drawn: Sequence[int], repeated: Matrix = PRODUCTS) -> ShareCase:
    first = record_of(0, digest("plan"), PARTS, products)
    second = record_of(1, first.digest, drawn, repeated)
    return ShareCase(key("site-0").public, key("site-1").public, PARTS, first, second)


def decided(case: ShareCase) -> tuple[list[int], str, str]:
    """Return the parts that the coordinator computes at first, and what becomes of both sites."""
    places = case.disputed(3, bytes(32))
    share = case.decide(3, {place: PRODUCTS[place] for place in places})
    return places, share.outcome, share.check


def test_a_part_that_two_sites_computed_differently_is_decided_by_the_coordinator() -> None:
    bent = PRODUCTS.copy()
    bent[7, 1] += 1e-15
    assert decided(case_of(PRODUCTS, [5, 7])) == ([], "sound", "sound")
    assert decided(case_of(bent, [5, 7])) == ([5, 7], "wrong", "sound")
    assert decided(case_of(PRODUCTS, [5, 7], bent)) == ([5, 7], "sound", "wrong")
    assert decided(case_of(bent, [5, 7], bent + 1e-3)) == ([5, 7], "wrong", "wrong")
    assert decided(case_of(bent, [5, 6])) == ([], "sound", "sound")  # nobody drew the part


def test_what_is_not_finite_or_no_whole_share_is_computed_by_the_coordinator() -> None:
    endless = PRODUCTS.copy()
    endless[6, 0] = np.inf
    assert decided(case_of(endless, [5, 7])) == (PARTS, "wrong", "sound")
    part = case_of(PRODUCTS, [5, 7])
    part.products = record_of(0, digest("plan"), PARTS[1:])
    assert decided(part) == (PARTS, "wrong", "sound")
    other = case_of(PRODUCTS, [3])
    assert decided(other)[1:] == ("sound", "wrong")


def test_an_eighth_of_a_share_is_drawn_and_nobody_knows_which_before() -> None:
    draws = [draw_parts(bytes([secret]) * 32, digest(str(seen)), PARTS) for secret in range(20) for seen in range(20)]
    assert {len(draw) for draw in draws} == {2}
    assert {place for draw in draws for place in draw} == set(PARTS)
    assert draw_parts(bytes(32), digest("seen"), [3]) == [3]


def test_shares_have_all_parts_once_and_about_the_same_size() -> None:
    shapes = {f"{place:03}": ((place % 5 + 1) * 100,) for place in range(200)}
    own = parts.parts_of(shapes)
    shares = shares_of(own, 8)
    assert [place for share in shares for place in share] == list(range(200))
    sizes = [sum(own[place].elements for place in share) for share in shares]
    assert max(sizes) - min(sizes) < 1200
    assert sum(map(bool, shares_of(own[:3], 8))) == 3
