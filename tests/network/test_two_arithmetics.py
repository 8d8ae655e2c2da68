"""A run whose miners and validators compute in float32 and in bfloat16: the thresholds of its pair judge each."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from grailnode.engine import models
from grailnode.engine.compute import Compute
from grailnode.observe.ledger_check import verify_ledger
from grailnode.observe.recheck import GroupReference, recheck
from protocol import paths
from protocol.errors import PairError
from protocol.identity.participant import Announcement
from protocol.proof import CALIBRATED, MEASURED
from roles.records import fetch_record
from tests.support.builders.proofs import LENIENT, packaged_thresholds, proof_of
from tests.support.simulation.network import Network, key
from tests.support.simulation.network_runs import RULES, run_nodes, summaries, verdicts

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
    used = {event["miner"] for event in network.events("trainer/download", "collected") if event["used"]}
    assert used == {key(name).public.hex()[:8] for name in ("miner-1", "miner-2")}
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
