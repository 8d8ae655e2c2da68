"""Whole networks on a virtual clock: honest work is accepted and trained on, false work is not."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
import trio

from grailnode.demo.cheater import KINDS
from grailnode.engine import models
from grailnode.engine.compute import Compute
from grailnode.engine.policy import PACKAGED_POLICY
from grailnode.node.wiring import run_coordinator, run_worker
from grailnode.observe.chain_check import verify_chain
from grailnode.observe.ledger_check import verify_ledger
from grailnode.observe.observer import Observer
from grailnode.observe.recheck import GroupReference, recheck
from grailnode.run import authority_changes, authority_drafts
from grailnode.store.memory import MemoryStore
from protocol import paths
from protocol.errors import PairError
from protocol.identity.participant import Announcement
from protocol.identity.signing import open_announced
from protocol.judging.verdict import Reason
from protocol.outer.round_records import RoundManifest
from protocol.proof import CALIBRATED, MEASURED
from protocol.rollout.batch import Group
from roles.authority_updates import refresh_authority
from roles.miner.produce import HonestProducer, MiningWindow
from roles.records import fetch_record
from roles.trainer.outer.coordinator import CoordinatorSettings
from roles.trainer.outer.local_steps import SiteSettings
from roles.trainer.publish.publisher import PublisherSettings
from tests.support.builders.proofs import LENIENT, packaged_thresholds, proof_of
from tests.support.builders.samples import round_rules
from tests.support.faults.decorated_store import DecoratedStore
from tests.support.simulation.network import Network, key
from tests.support.simulation.network_runs import RULES, check_accepted, run_nodes, summaries, used_groups, verdicts
from tests.support.simulation.virtual_clock import running

EXPECTED_REASONS = {  # of the rejection of each kind of false rollout
    "own-noise": Reason.SAMPLING,
    "perturbed-model": Reason.SKETCH,
    "edited-tokens": Reason.SAMPLING,
    "false-reward": Reason.REWARD,
    "copied": Reason.COPIED,
    "constant-sketch": Reason.SKETCH,
}


async def test_honest_work_is_accepted_and_trained_on_once_and_every_follower_has_the_trainers_weights():
    network = Network(RULES, policy=PACKAGED_POLICY)
    async with run_nodes(network):
        await network.until_window(8)
    for miner in ("miner-1", "miner-2"):
        await check_accepted(network, miner, range(7), at_least=6)
    head = await network.head()
    assert head.version >= 5
    newest = await verify_chain(network.node("checker"), lambda line: None)
    digests = {m["version"]: m["weights"] for m in network.events("validator-0", "serving")}
    for name in ("miner-1", "miner-2", "validator-0"):
        node_digests = {m["version"]: m["weights"] for m in network.events(name, "serving")}
        assert node_digests.items() <= (digests | {newest.version: newest.digest.hex()}).items()
    steps = network.events("trainer/training", "step")
    used = sum(event["used"] for event in network.events("trainer/download", "collected"))
    assert 4 * len(steps) <= used  # four groups a step, each at most once


async def test_a_validator_refreshes_the_chain_before_it_refuses_a_newer_version():
    network = Network(RULES)
    async with running(network.run_beacon) as nursery:
        nursery.start_soon(network.run_trainer)
        nursery.start_soon(network.run_miner, "miner-1")
        await network.until_window(2)
        nursery.start_soon(network.run_validator, "validator-0", 1000.0)
        await network.until_window(12)
    on_miner = await verdicts(network, "miner-1", range(11))
    assert len(on_miner) >= 6
    assert max(verdict.version for verdict in on_miner.values()) >= 3
    assert all(judgement.accepted for verdict in on_miner.values() for judgement in verdict.judgements)


async def test_every_kind_of_false_rollout_is_rejected_for_its_reason_and_no_honest_group_is():
    network = Network(RULES, policy=PACKAGED_POLICY)
    async with run_nodes(network, miners=1) as nursery:
        nursery.start_soon(network.run_cheat)
        await network.until_window(2 * len(KINDS) + 1)
    cheats = await verdicts(network, "cheat", range(1, 2 * len(KINDS)))
    assert {KINDS[window % len(KINDS)] for window in cheats} == set(KINDS)
    for window, verdict in cheats.items():
        kind = KINDS[window % len(KINDS)]
        reasons = {judgement.reason for judgement in verdict.judgements}
        assert reasons == {EXPECTED_REASONS[kind]}, (window, kind)
    await check_accepted(network, "miner-1", range(2 * len(KINDS)))
    observer = Observer(network.node("observer"), 0)
    await observer.refresh()
    scores = {row.key: row.score for row in observer.state().miners}
    assert scores[key("cheat").public.hex()] == 0.0
    assert sum(scores.values()) == pytest.approx(1.0)


class SlowAtFirst(HonestProducer):
    """Takes longer than a window for its first groups, as an engine that compiles."""

    warm = False

    async def produce(self, mining_window: MiningWindow, indices: Sequence[int]) -> list[Group]:
        if not self.warm:
            await trio.sleep(8.0)
        self.warm = True
        return await super().produce(mining_window, indices)


async def test_a_slow_start_breaks_no_pledge():
    network = Network(RULES)
    async with run_nodes(network, miners=0) as nursery:
        nursery.start_soon(network.run_miner, "miner", 4, SlowAtFirst)
        await network.until_window(9)
    on_miner = await verdicts(network, "miner", range(8))
    assert len(on_miner) >= 3
    assert {verdict.pledged for verdict in on_miner.values()} == {4}
    assert not network.events("miner", "deadline-missed")


async def test_of_two_miners_with_one_key_each_says_that_there_is_another():
    network = Network(RULES)
    async with run_nodes(network, miners=1) as nursery:
        await network.until_window(3)
        assert not network.events("miner-1", "put-lost")
        first, network.states["miner-1"] = network.logs.pop("miner-1"), MemoryStore()
        nursery.start_soon(network.run_miner, "miner-1")
        await network.until_window(8)
    for lost in (first.named("put-lost"), network.events("miner-1", "put-lost")):
        assert {event["path"] for event in lost} == {paths.participant(key("miner-1").public)}
        assert "another node with this key" in lost[0]["error"]
    assert (await verify_chain(network.node("checker"), lambda line: None)).version >= 3


async def test_a_process_that_starts_again_at_once_announces_itself_for_longer_than_before():
    """Readers ignore an announcement that expires before the one they know."""
    network, expiries = Network(RULES), list[int]()
    async with run_nodes(network):
        for _ in range(20):
            await trio.sleep(0.11)  # a supervisor waits for longer before it starts a process again
            data = await network.node("miner-1").announce("miner", 60.0)
            expiries.append(open_announced(data, Announcement).record.expires_ms)
    assert expiries == sorted(set(expiries))


class SlowLook(DecoratedStore):
    """Answers each second read of an announcement when validators have begun to read pledges; keeps those put then."""

    def __init__(self, network: Network) -> None:
        super().__init__(network.store)
        self.network = network
        self.is_read_back = False
        self.puts: list[tuple[bool, Announcement]] = []  # whether late

    async def put(self, path: str, data: bytes) -> None:
        await self.inner.put(path, data)
        if path == paths.participant(key("miner-1").public):
            self.is_read_back = False
            self.puts.append((self.seconds_left() < 0, open_announced(data, Announcement).record))

    async def before(self, operation: str, path: str) -> None:
        if operation == "get" and path == paths.participant(key("miner-1").public):
            if self.is_read_back:
                await trio.sleep(max(0.0, self.seconds_left() + 0.05))
            self.is_read_back = True

    def seconds_left(self) -> float:
        run, clock = self.network.run, self.network.clock
        return run.beacon.round_time(run.schedule.pledges(max(0, run.window_at(clock.now())) + 1)) - clock.now()


async def test_a_pledge_is_made_by_the_time_at_which_storage_has_shown_the_last_one():
    network = Network(RULES)
    store = network.mediums["miner-1"] = SlowLook(network)
    async with run_nodes(network, miners=1):
        await network.until_window(10)
    late = [(old.version, new.version) for (_, old), (is_late, new) in pairwise(store.puts) if is_late and old.groups]
    assert len(late) >= 4
    assert all(new == old or new - old > network.run.schedule.max_lag for old, new in late), late


async def test_a_group_is_trained_on_only_if_a_quorum_accepts_it():
    """With a validator more, which is absent too, those of tests/network/test_dealing.py are trained on."""
    network = Network(RULES, validators=3, quorum=2)
    network.validators = ["validator-0"]  # the others never run
    async with run_nodes(network, miners=1):
        await network.until_window(6)
    assert not network.events("trainer/training", "step")
    assert not network.events("trainer/download", "collected")
    # groups are given up once no other validator can reveal
    assert network.events("trainer/download", "verdicts-unread")


# Three sites train one policy in a simulated network, from the groups that its miners make and its validators accept,
# and compare their contributions together


SITES = ("site-0", "site-1", "site-2")


async def test_sites_publish_one_chain_of_policies() -> None:
    network = Network(RULES)
    workers = tuple(sorted(key(name).public for name in SITES))
    network.amend(authority=network.run.authority.model_copy(update={"workers": workers}))
    rounds = CoordinatorSettings(
        rules=round_rules(local_steps=2, quorum=2, spread=1),
        beacon_rounds=network.run.schedule.rounds,
        state_interval=2,
    )
    section = network.trainer_settings().section
    async with running(network.run_beacon) as nursery:
        nursery.start_soon(network.run_validator)
        for miner in ("miner-1", "miner-2"):
            nursery.start_soon(network.run_miner, miner)
        publisher = PublisherSettings(anchor_interval=4)
        nursery.start_soon(run_coordinator, network.node("trainer"), lambda: network.weights, publisher, rounds)
        for name in SITES:
            settings = SiteSettings(groups_per_step=1, upload_seconds=0.5, poll_seconds=0.2)
            learner = partial(network.make_learner, section)
            nursery.start_soon(run_worker, network.node(name), learner, section, settings)
        observer = Observer(network.node("observer"), 0)
        with trio.fail_after(600):
            while max([0, *(event["version"] for event in network.events("trainer", "published"))]) < 3:
                await observer.refresh()
                await trio.sleep(3.0)
        await trio.sleep(5)
        await observer.refresh()
    tables = [{event["number"]: event["state"] for event in network.events(name, "round-applied")} for name in SITES]
    assert tables[0] == tables[1] == tables[2]
    closed = {event["number"]: event for event in network.events("trainer", "round-closed")}
    spread = [number for number, event in closed.items() if event["counted"] == 3]
    assert len(spread) >= 3
    trainer_key, reader = key("trainer").public, network.node("observer")
    for number in spread:
        closing = (await fetch_record(reader, RoundManifest, paths.round_manifest(trainer_key, number))).record
        assert {share.outcome for share in closing.aggregated} == {"sound"}
    assert (await network.head()).version >= 3
    assert max(event["changed"] for event in network.events("trainer", "published")) > 0
    used = [event["groups"] for name in SITES for event in network.events(name, "contributed")]
    assert sum(used) > 6
    state = observer.state()
    assert [row.number for row in state.rounds] == list(range(1, state.rounds[-1].number + 1))
    assert {row.counted for row in state.rounds} <= {0, 2, 3}
    assert state.rounds[-1].version == state.rounds[-1].step >= 3
    assert [site.name for site in state.sites] == sorted(SITES)
    assert all(site.rounds >= 3 and site.steps >= site.rounds and site.payload_bytes > 0 for site in state.sites)
    assert sum(site.groups for site in state.sites) == sum(row.groups for row in state.rounds)
    assert not state.alarms


# A validator that a revision adds while the run is going on: it judges with the others, and then the quorum rises


NEW = "validator-1"


async def revise(network: Network, **changes: Any) -> None:
    founder = network.node("founder")
    await refresh_authority(founder)
    draft = authority_drafts.propose(founder.revisions, "", **changes).signed_by(key("root"))
    await network.store.put(paths.revision(founder.run_id, draft.revision.number), draft.envelope())


async def test_a_new_validator_judges_and_then_both_must_accept():
    network = Network(RULES)
    async with run_nodes(network) as nursery:
        await network.until_window(2)
        await revise(network, **authority_changes.grant(network.run.authority, key(NEW).public, "validator"))
        nursery.start_soon(network.run_validator, NEW)
        await network.until_window(6)
        await revise(network, quorum=2)
        await network.until_window(11)
    assert set(used_groups(network, range(1, 9)).values()) == {8}  # two miners, four groups each; no window is lost
    by_window = {summary.window: summary for summary in await summaries(network, NEW, range(9))}
    assert set(by_window) >= set(range(5, 9))
    assert all(row.accepted == 4 for window in range(5, 9) for row in by_window[window].rows)
    assert not network.logs["trainer/download"].named("validators-disagree")


# Miners and validators that compute in float32 and in bfloat16: the thresholds of its pair judge each


ADMITTED = ("torch-bfloat16", "torch-float32")


def mixed_network() -> Network:
    """Return a network whose run admits both, with two validators of which both must accept."""
    network = Network(RULES, validators=2, quorum=2)
    narrow = packaged_thresholds()
    wide: dict[str, Any] = {"logprob_tolerance": 1_000_000}
    for name in MEASURED:  # all rows have as many alternatives
        alternatives = LENIENT[name].alternatives * len(narrow.table(name).alternatives)
        wide[name] = LENIENT[name].model_copy(update={"alternatives": alternatives})
    rows = [
        narrow.model_copy(
            update={"miner": one, "validator": other} | (wide if "torch-bfloat16" in (one, other) else {})
        )
        for one in ADMITTED
        for other in ADMITTED
    ]
    network.amend(proof=proof_of(*rows))
    return network


async def test_miners_and_validators_of_two_arithmetics_accept_each_other():
    """One of the miners drafts with an 8-bit copy."""
    network = mixed_network()
    wide = Compute(models.build(network.policy), dtype=torch.bfloat16)
    network.computes = {"validator-1": wide, "miner-2": replace(wide, drafts=True)}
    async with run_nodes(network, miners=2):
        await network.until_window(6)
    observer = network.node("observer")
    for name, arithmetic in (("validator-0", "torch-float32"), ("validator-1", "torch-bfloat16")):
        ledger = await summaries(network, name, range(6))
        assert {entry.arithmetic for entry in ledger} == {arithmetic}
        declared = {row.miner: row.arithmetic for entry in ledger for row in entry.rows if row.submitted}
        assert declared == {key("miner-1").public: "torch-float32", key("miner-2").public: "torch-bfloat16"}
        assert [row for entry in ledger for row in entry.rows if row.rejected] == []
        assert await verify_ledger(observer, key(name).public, lambda line: None) >= 4
    assert network.events("trainer/training", "step")
    assert not network.events("trainer/download", "validators-disagree")
    used = [event for event in network.events("trainer/download", "collected") if event["used"]]
    assert {event["miner"] for event in used} == {key(name).public.hex()[:8] for name in ("miner-1", "miner-2")}
    # as soon as all validators have sealed: window 4 long before its seals are due
    assert {event["window"] for event in used} >= {1, 2, 3, 4}
    verdict = (await verdicts(network, "miner-2", range(3, 4)))[3]
    assert (verdict.miner_arithmetic, verdict.validator_arithmetic) == ("torch-bfloat16", "torch-float32")
    task, reference = network.task(observer), GroupReference(key("miner-1").public.hex(), 3, 0)
    group = await recheck(observer, task, network.compute, reference)
    assert group.judgement.accepted
    texts = {result.key: (result.text, result.contradicts) for result in group.validators}
    assert texts[key("validator-0").public.hex()] == ("accepted", False)
    assert texts[key("validator-1").public.hex()] == ("accepted, in torch-bfloat16", False)


async def test_a_node_that_nobody_has_measured_judges_nothing():
    """The program refuses to start it; here it has started."""
    network = Network(RULES)
    network.computes["validator-0"] = compute = Compute(models.build(network.policy), dtype=torch.bfloat16)
    async with run_nodes(network, miners=1):
        await network.until_window(4)
    ledger = await summaries(network, "validator-0", range(4))
    assert ledger
    assert [row for entry in ledger for row in entry.rows] == []
    errors = {event["error"] for event in network.events("validator-0", "not-judged")}
    assert any("no thresholds for miners in torch-float32 and validators in torch-bfloat16" in line for line in errors)
    announcement = await fetch_record(network.node("reader"), Announcement, paths.participant(key("miner-1").public))
    assert announcement.record.arithmetic in CALIBRATED
    with pytest.raises(PairError, match="validators in torch-bfloat16"):
        reference = GroupReference(key("miner-1").public.hex(), 2, 0)
        observer = network.node("observer")
        await recheck(observer, network.task(observer), compute, reference)
    prefix = paths.kind_prefix(key("validator-0").public, "verdicts")
    assert not [item async for item in network.store.list(prefix)]
