"""A validator that shows one seal to the other validators, so that they reveal, and another one to the trainer
(docs/spec/ledger.md).
"""

import pytest
import trio

from grailnode.observe.ledger_check import verify_ledger
from grailnode.store.decorators.retrying import WaitingState
from grailnode.store.memory import MemoryStore
from protocol import limits, paths
from protocol.errors import ProtocolError
from protocol.identity.signing import SigningKey, open_signed, sign
from protocol.judging.ledger import Seal, Summary, Witness
from roles.node.identity import Node
from roles.ports import ObjectStore
from roles.validator.ledger_state import Ledger
from roles.validator.reveal import Revealer
from tests.support.attacked_nodes.trainer import FIRST, SECOND, STRANGER, WINDOW, AttackedTrainer, make_honest_testbed
from tests.support.builders import samples
from tests.support.builders.chains import make_node
from tests.support.builders.samples import digest
from tests.support.faults.crash_trigger import CrashingStore, CrashTrigger, cancelling
from tests.support.faults.decorated_store import SlowStore, UnreachableStore
from tests.support.measuring import store_listing
from tests.support.simulation.network import Log

SEALED_TWICE = "sealed twice"


def seal_of(
    testbed: AttackedTrainer, validator: SigningKey, window: int = WINDOW, by: SigningKey | None = None
) -> bytes:
    """Return a seal of a summary that is never revealed."""
    seal = Seal(run=testbed.run_id, window=window, validator=validator.public, summary=digest("nothing"))
    return sign(seal, by or validator)


def ignored_validators(testbed: AttackedTrainer) -> list[tuple[str, str]]:
    """Return the validators that did not count, each with the beginning of the reason."""
    return [(validator, reason.partition(":")[0]) for validator, reason in testbed.exclusions()]


@pytest.mark.parametrize("has_both", [False, True], ids=["one seal", "both seals"])
@pytest.mark.parametrize("liar", [FIRST, SECOND], ids=["read first", "read last"])
async def test_a_second_seal_in_a_witness_disqualifies_its_validator(liar: SigningKey, has_both: bool) -> None:
    testbed = await make_honest_testbed(2)
    first_seal = await testbed.store.get(paths.seal(liar.public, WINDOW), 512)
    witness = FIRST if liar is SECOND else SECOND
    await testbed.attest(witness, WINDOW, seal_of(testbed, liar), *([first_seal] if has_both else []))
    await testbed.collect()
    assert await testbed.outcomes() <= {"no-quorum"}  # no entry if only one summary counted
    assert ignored_validators(testbed) == [(liar.public.hex()[:8], SEALED_TWICE)]


async def test_the_same_seal_and_invalid_entries_in_a_witness_disqualify_nobody():
    testbed = await make_honest_testbed(2)
    first_seal = await testbed.store.get(paths.seal(SECOND.public, WINDOW), 512)
    invalid_entries = (
        b"",
        b"\xc1" * 400,
        first_seal[:-1],
        seal_of(testbed, SECOND, by=FIRST),
        seal_of(testbed, SECOND, by=STRANGER),
        seal_of(testbed, SECOND, window=WINDOW + 1),
        seal_of(testbed, STRANGER),
        sign(testbed.summary(SECOND), SECOND)[:512],
    )
    await testbed.attest(FIRST, WINDOW, first_seal, *invalid_entries)
    await testbed.collect()
    assert await testbed.outcomes() == {"used"}
    assert ignored_validators(testbed) == []


@pytest.mark.parametrize("kind", ["missing", "another window's", "forged", "garbage", "oversized"])
async def test_a_validator_without_a_readable_witness_does_not_count(kind: str) -> None:
    testbed = await make_honest_testbed(2)
    path = paths.witness(FIRST.public, WINDOW)
    if kind == "missing":
        await testbed.store.delete(path)
    elif kind == "another window's":
        await testbed.attest(FIRST, WINDOW + 1)
        await testbed.store.put(path, await testbed.store.get(paths.witness(FIRST.public, WINDOW + 1), 1 << 20))
    else:
        forgery = await testbed.store.get(paths.witness(SECOND.public, WINDOW), 1 << 20)
        await testbed.store.put(path, {"forged": forgery, "garbage": b"\xc1", "oversized": bytes(1 << 22)}[kind])
    await testbed.collect()
    assert await testbed.outcomes() <= {"no-quorum"}  # no entry if only one summary counted
    assert ignored_validators(testbed) == [(FIRST.public.hex()[:8], "sealed, and not revealed in time")]
    assert len(testbed.log.named("witness-refused")) == (kind != "missing")


async def test_a_check_of_the_ledger_finds_the_second_seal():
    testbed = AttackedTrainer()
    await testbed.publish_records(FIRST)
    assert await verify_ledger(testbed.node, FIRST.public, lambda line: None) == 1
    await testbed.attest(SECOND, WINDOW, seal_of(testbed, FIRST))
    with pytest.raises(
        ProtocolError, match=f"{SEALED_TWICE}.*another seal was shown to validator {SECOND.public.hex()[:8]}"
    ):
        await verify_ledger(testbed.node, FIRST.public, lambda line: None)


def validator_node(testbed: AttackedTrainer, store: ObjectStore, state: ObjectStore) -> Node:
    return make_node(testbed.run_id, testbed.run, store, state, Log("v"), FIRST, clock=testbed.clock)


async def sleep_until_seal(testbed: AttackedTrainer, seconds: float) -> None:
    """Sleep until some seconds after the round of the seals."""
    await testbed.clock.sleep_until(testbed.run.beacon.round_time(testbed.run.schedule.seal(WINDOW)) + seconds)


async def witnessed_seals(store: ObjectStore) -> tuple[bytes, ...]:
    data = await store.get(paths.witness(FIRST.public, WINDOW), Witness.max_bytes + limits.MAX_ENVELOPE_BYTES)
    return open_signed(data, Witness, [FIRST.public]).record.seals


async def judged_window(testbed: AttackedTrainer, node: Node) -> tuple[Revealer, Ledger, Summary]:
    """Store the first validator's verdict, and record its window in its ledger, at the deadline."""
    await testbed.clock.sleep_until(testbed.run.deadline_time(WINDOW))
    verdict, ledger = testbed.verdict(FIRST), await Ledger.open(node.state, testbed.run)
    revealer = Revealer(node, ledger)
    await revealer.store_verdicts(WINDOW, [verdict])
    return revealer, ledger, await ledger.record(testbed.summary(FIRST, verdict))


class SealsLate(SlowStore):
    """Storage of the second validator: a fetch of its seal waits until the first has revealed, and seals only then."""

    testbed: AttackedTrainer

    async def get(self, path: str, max_bytes: int, *, offset: int = 0, size: int | None = None) -> bytes:
        if path == paths.seal(SECOND.public, WINDOW):
            while paths.summary(FIRST.public, WINDOW) not in await store_listing.paths(self):
                await trio.sleep(0.1)
            if path not in await store_listing.paths(self):
                await self.testbed.publish_records(SECOND)
        return await super().get(path, max_bytes, offset=offset, size=size)


async def test_a_seal_that_is_made_while_the_trainer_fetches_it_does_not_count():
    store = SealsLate()
    testbed = store.testbed = AttackedTrainer(2, store)
    await testbed.deliver()

    async def validate_honestly() -> None:
        verdict = testbed.verdict(FIRST)
        summary = testbed.summary(FIRST, verdict)
        await sleep_until_seal(testbed, -1.0)
        await testbed.seal(FIRST, summary)
        await sleep_until_seal(testbed, 0.3)
        await testbed.reveal(FIRST, summary, verdict)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(validate_honestly)
        await testbed.collect()
    assert await testbed.outcomes() <= {"no-quorum"}  # no entry if only one summary counted
    assert ignored_validators(testbed) == [(SECOND.public.hex()[:8], "not sealed in time")]


@pytest.mark.parametrize("late", [False, True], ids=["before the seal round", "after the seal round"])
async def test_a_witness_is_the_same_after_a_crash(late: bool) -> None:
    trigger = CrashTrigger(lambda operation, path: operation == "put" and "/summaries/" in path, 0, after=False)
    testbed, store, state = AttackedTrainer(quorum=2), CrashingStore(MemoryStore(), trigger), MemoryStore()
    seal = seal_of(testbed, SECOND)
    await store.put(paths.seal(SECOND.public, WINDOW), seal)
    revealer, _, summary = await judged_window(testbed, validator_node(testbed, store, state))
    await revealer.add_window(summary)
    with trio.CancelScope() as scope:
        trigger.crash = cancelling(scope)
        await revealer.run()
    assert await witnessed_seals(store) == (seal,)
    await store.put(paths.seal(SECOND.public, WINDOW), sign(testbed.summary(SECOND), SECOND))
    if late:
        await sleep_until_seal(testbed, 0.5)
    with trio.move_on_after(5.0):
        await Revealer(validator_node(testbed, store, state), await Ledger.open(state, testbed.run)).run()
    assert paths.summary(FIRST.public, WINDOW) in await store_listing.paths(store)
    assert await witnessed_seals(store) == (seal,)
    assert not await store_listing.paths(state, "witness/")


async def test_nothing_is_revealed_before_the_witness_is_stored():
    testbed = AttackedTrainer(quorum=2)
    disk = UnreachableStore(MemoryStore(), "witness/", operations=("put",), seconds=0.0)
    node = validator_node(testbed, testbed.store, WaitingState(disk, Log("v")))
    revealer, ledger, summary = await judged_window(testbed, node)
    await revealer.add_window(summary)
    await sleep_until_seal(testbed, 0.5)
    with trio.move_on_after(2.5):
        await revealer.run()
    assert paths.witness(FIRST.public, WINDOW) not in await store_listing.paths(testbed.store)
    disk.is_away = False
    with trio.move_on_after(5.0):
        await Revealer(node, ledger).run()
    assert paths.summary(FIRST.public, WINDOW) in await store_listing.paths(testbed.store)


@pytest.mark.parametrize("deletes", range(4))
async def test_a_witness_is_the_same_after_a_crash_while_its_state_is_deleted(deletes: int) -> None:
    trigger = CrashTrigger(lambda operation, path: operation == "delete", deletes, after=False)
    testbed, state = AttackedTrainer(quorum=2), CrashingStore(MemoryStore(), trigger)
    node, seal = validator_node(testbed, testbed.store, state), seal_of(testbed, SECOND)
    await testbed.store.put(paths.seal(SECOND.public, WINDOW), seal)
    _, ledger, _ = await judged_window(testbed, node)
    with trio.move_on_after(5.0) as scope:
        trigger.crash = cancelling(scope)
        await Revealer(node, ledger).run()
    await sleep_until_seal(testbed, 0.5)
    with trio.move_on_after(5.0):
        await Revealer(node, ledger).run()
    assert await witnessed_seals(testbed.store) == (seal,)
    assert all(path.startswith("ledger/") for path in await store_listing.paths(state))


@pytest.mark.parametrize("puts", range(5))
async def test_verdicts_whose_window_is_not_in_the_ledger_are_dropped_after_a_crash(puts: int) -> None:
    trigger = CrashTrigger(lambda operation, path: operation == "put", puts, after=False)
    testbed, state = AttackedTrainer(), CrashingStore(MemoryStore(), trigger)
    node = validator_node(testbed, testbed.store, state)
    verdicts = [testbed.verdict(FIRST, miner=samples.key(f"miner {number}").public) for number in range(4)]
    with trio.CancelScope() as scope:
        trigger.crash = cancelling(scope)
        await Revealer(node, await Ledger.open(state, testbed.run)).store_verdicts(WINDOW, verdicts)
    with trio.move_on_after(5.0):
        await Revealer(node, await Ledger.open(state, testbed.run)).run()
    assert not await store_listing.paths(state)


async def test_the_verdicts_of_many_miners_are_stored_and_revealed_side_by_side():
    testbed = AttackedTrainer()
    testbed.store = SlowStore(put_seconds=1.0)
    node = validator_node(testbed, testbed.store, SlowStore(put_seconds=1.0))
    verdicts = [testbed.verdict(FIRST, miner=samples.key(f"miner {number}").public) for number in range(200)]
    ledger = await Ledger.open(node.state, testbed.run)
    revealer, begin = Revealer(node, ledger), trio.current_time()
    await revealer.store_verdicts(WINDOW, verdicts)
    await revealer.add_window(await ledger.record(testbed.summary(FIRST)))
    with trio.move_on_after(60.0):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(revealer.run)
            while not node.telemetry.named("revealed"):  # type: ignore[attr-defined]
                await trio.sleep(0.1)
            nursery.cancel_scope.cancel()
    assert trio.current_time() - begin < 30.0
    assert {verdict.path for verdict in verdicts} <= set(await store_listing.paths(testbed.store))
