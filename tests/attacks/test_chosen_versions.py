"""A miner that generates with several versions once R0 is out, and commits to the one whose rewards it likes."""

from typing import Any

import pytest

from grailnode.store.memory import MemoryStore
from roles.validator.case_queue import CaseQueue
from roles.validator.judging_scheduler import JudgingScheduler
from roles.validator.ledger_state import Ledger
from roles.validator.window_cases import read_window_cases
from tests.support.attacked_nodes.trainer import WINDOW
from tests.support.attacked_nodes.validator import AttackedValidator
from tests.support.builders.chains import MINER
from tests.support.builders.samples import verdict
from tests.support.simulation.virtual_clock import simulate

SERVING = 7


class AnyFollower:
    """Has the weights of every version."""

    async def rebuild(self, version: int) -> int:
        return version


class AcceptingAuditor:
    """Accepts whatever reaches it."""

    async def audit(self, *_: Any, **__: Any) -> Any:
        return verdict(), {}


@pytest.mark.parametrize(
    ("pledged", "version", "counts"),
    [(7, 7, True), (7, 6, False), (7, 5, False), (6, 6, True), (6, 7, False), (5, 5, True), (5, 6, False)],
)
def test_only_the_version_that_the_pledge_binds_counts(pledged: int, version: int, counts: bool) -> None:
    async def scenario() -> None:
        testbed = AttackedValidator()
        node = testbed.validator
        await testbed.announce(version=pledged)
        await testbed.commit(version=version)
        pledges = await testbed.pledges.read()
        cases = await read_window_cases(node, WINDOW, pledges, versions=testbed.pledges.versions())
        queue = CaseQueue(node, await Ledger.open(MemoryStore(), node.run), bytes(32))
        follower, auditor, engine = AnyFollower(), AcceptingAuditor(), None
        scheduler = JudgingScheduler(node, follower, engine, auditor, queue, WINDOW, SERVING)  # type: ignore[arg-type]
        verdicts = await scheduler.judge(cases.cases, 60.0)
        assert len(verdicts) == counts
        assert scheduler.unbound_pledges == ({} if counts else {MINER.public: pledges[MINER.public]})

    simulate(scenario)
