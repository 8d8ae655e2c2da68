"""The roster of a window, as nodes read it from published summaries."""

from collections.abc import Mapping, Sequence
from math import inf
from typing import Any

import pytest
import trio

from grailnode.store.memory import MemoryStore
from protocol import paths
from protocol.encoding import content_digest
from protocol.identity.signing import sign
from protocol.judging.evidence import NO_COUNTS
from protocol.judging.ledger import LedgerRow
from protocol.judging.roster import presence_windows
from roles.ports import StoreError
from roles.rosters import Rosters
from tests.support.attacked_nodes.trainer import SilentStore
from tests.support.builders import samples
from tests.support.builders.chains import TRAINER, make_node, small_run
from tests.support.faults.decorated_store import UnreachableStore
from tests.support.simulation.network import BEGIN, Log
from tests.support.simulation.virtual_clock import TrioClock, simulated

KEYS = sorted((samples.key(f"validator {number}") for number in range(4)), key=lambda key: key.public)
FOUR = tuple(key.public for key in KEYS)
WINDOW = 20


class FourValidators:
    """Four validators, of which `quorum` must accept, and their summaries."""

    def __init__(self, quorum: int = 1, spares: int = 0) -> None:
        _, run = small_run(samples.digest("genesis"))
        authority = run.authority.model_copy(update={"validators": FOUR, "quorum": quorum})
        self.run = run.model_copy(update={"authority": authority, "spares": spares})
        self.run_id = content_digest(self.run.to_bytes())
        self.store, self.log = SilentStore(), Log("reader")
        self.link = UnreachableStore(self.store, seconds=inf)
        clock = TrioClock(BEGIN)
        node = make_node(self.run_id, self.run, self.link, MemoryStore(), self.log, TRAINER, clock=clock)
        self.rosters = Rosters(node)
        self.windows = presence_windows(self.run.schedule, WINDOW)

    async def publish(self, validator: int, window: int, *rows: LedgerRow) -> None:
        key = KEYS[validator]
        fields: dict[str, Any] = {"run": self.run_id, "window": window, "validator": key.public, "scores": ()}
        data = sign(samples.summary(*rows, **fields), key)
        await self.store.put(paths.summary(key.public, window), data)

    async def members(self, shown: Mapping[int, Sequence[int]]) -> list[int]:
        """Return the numbers of the validators in the roster if these have judged in these windows."""
        for validator, windows in shown.items():
            for window in windows:
                await self.publish(validator, window, samples.row())
        roster = await self.rosters.get(WINDOW)
        return [FOUR.index(validator) for validator in roster.validators]


@simulated
async def test_who_has_judged_in_one_of_the_windows_is_present():
    testbed = FourValidators()
    first, _, last = testbed.windows
    shown = {0: [first], 1: [last], 2: [first - 1, last + 1]}
    assert await testbed.members(shown) == [0, 1]
    (event,) = testbed.log.named("roster")
    assert event["absent"] == f"{FOUR[2].hex()[:8]},{FOUR[3].hex()[:8]}"


@simulated
async def test_who_lists_and_never_judges_is_absent():
    testbed = FourValidators()
    idle = samples.row(dealt=4, audited=0, accepted=0, counts=NO_COUNTS)
    for window in testbed.windows:
        await testbed.publish(2, window, idle)
        await testbed.publish(3, window)
    assert await testbed.members({0: testbed.windows, 1: testbed.windows}) == [0, 1]


@simulated
async def test_without_a_quorum_all_are_dealt_to():
    assert await FourValidators(quorum=2).members({0: FourValidators().windows}) == [0, 1, 2, 3]
    assert await FourValidators(quorum=1).members({0: FourValidators().windows}) == [0]
    assert await FourValidators(quorum=2, spares=1).members(
        {0: FourValidators().windows, 1: FourValidators().windows}
    ) == [0, 1]


@simulated
async def test_where_all_judge_all_nothing_is_read():
    testbed = FourValidators(quorum=2, spares=2)
    assert await testbed.members({}) == [0, 1, 2, 3]
    assert testbed.store.read_count == 0


@simulated
async def test_a_roster_is_read_once_and_storage_that_hangs_delays_it_for_a_part_of_the_window_only():
    testbed = FourValidators()
    testbed.link.prefixes = (FOUR[3].hex(),)
    start = trio.current_time()
    assert await testbed.members(dict.fromkeys(range(4), testbed.windows)) == [0, 1, 2]
    schedule = testbed.run.schedule
    assert trio.current_time() - start <= schedule.audit_rounds * testbed.run.beacon.period_ms / 1000 / 2
    testbed.link.prefixes = ()
    reads = testbed.store.read_count
    assert await testbed.members({}) == [0, 1, 2]
    assert testbed.store.read_count == reads


@simulated
async def test_a_validator_whose_storage_does_not_answer_is_absent():
    testbed = FourValidators()
    testbed.store.silent_prefixes = (FOUR[1].hex(),)
    with pytest.raises(StoreError):
        await testbed.store.get(paths.summary(FOUR[1], WINDOW), 1)
    assert await testbed.members(dict.fromkeys(range(4), testbed.windows)) == [0, 2, 3]
