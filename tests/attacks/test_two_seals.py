"""A validator that shows one seal to the other validators, so that they reveal, and another one to the trainer
(docs/spec/ledger.md).
"""

import math
from dataclasses import replace

import pytest
import trio

from grailnode.observe.ledger_check import verify_ledger
from grailnode.store.memory import MemoryStore
from protocol import limits, paths
from protocol.errors import ProtocolError
from protocol.identity.signing import SigningKey, open_signed, sign
from protocol.judging.ledger import Seal, Witness
from roles.node.identity import Node
from roles.ports import StoreError
from roles.validator.ledger_state import Ledger
from roles.validator.reveal import Revealer
from tests.support.attacks.court import FIRST, SECOND, STRANGER, WINDOW, Court, Silent
from tests.support.attacks.target import attack
from tests.support.builders.chains import make_node
from tests.support.builders.samples import digest
from tests.support.simulation.network import Log

SEALED_TWICE = "sealed twice"


def seal_of(court: Court, validator: SigningKey, window: int = WINDOW, by: SigningKey | None = None) -> bytes:
    """Return a seal of a summary that is never revealed."""
    seal = Seal(run=court.run_id, window=window, validator=validator.public, summary=digest("nothing"))
    return sign(seal, by or validator)


def ignored_validators(court: Court) -> list[tuple[str, str]]:
    """Return the validators that did not count, each with the beginning of the reason."""
    lines = [line for line in court.log.named("validator-excluded") if line["window"] == WINDOW]
    return [(line["validator"], line["error"].partition(":")[0]) for line in lines]


async def court_with_records(quorum: int) -> Court:
    """Return a court in which the miner has delivered and both validators have accepted."""
    court = Court(quorum)
    await court.deliver()
    await court.say(FIRST)
    await court.say(SECOND)
    return court


@pytest.mark.parametrize("liar", [FIRST, SECOND], ids=["read first", "read last"])
def test_a_second_seal_in_a_witness_disqualifies_its_validator(liar: SigningKey) -> None:
    async def scenario() -> None:
        court = await court_with_records(quorum=2)
        await court.attest(FIRST if liar is SECOND else SECOND, WINDOW, seal_of(court, liar))
        await court.listen()
        assert await court.outcomes() == {"no-quorum"}
        assert ignored_validators(court) == [(liar.public.hex()[:8], SEALED_TWICE)]

    attack(scenario)()


@attack
async def test_two_seals_in_one_witness_disqualify_their_validator():
    court = await court_with_records(quorum=2)
    first_seal = await court.store.get(paths.seal(SECOND.public, WINDOW), 512)
    await court.attest(FIRST, WINDOW, seal_of(court, SECOND), first_seal)
    await court.listen()
    assert await court.outcomes() == {"no-quorum"}
    assert ignored_validators(court) == [(SECOND.public.hex()[:8], SEALED_TWICE)]


@attack
async def test_the_honest_validators_verdicts_still_count():
    court = Court(quorum=1)
    await court.deliver()
    await court.say(FIRST)
    await court.say(SECOND, court.judgement(0, digest=digest("invented")))
    await court.attest(FIRST, WINDOW, seal_of(court, SECOND))
    await court.listen()
    assert {outcome for outcome in (await court.account()).values() if outcome == "used"} == {"used"}
    assert ignored_validators(court) == [(SECOND.public.hex()[:8], SEALED_TWICE)]


@attack
async def test_the_same_seal_and_invalid_entries_in_a_witness_disqualify_nobody():
    court = await court_with_records(quorum=2)
    first_seal = await court.store.get(paths.seal(SECOND.public, WINDOW), 512)
    invalid_entries = (
        b"",
        b"\xc1" * 400,
        first_seal[:-1],
        seal_of(court, SECOND, by=FIRST),
        seal_of(court, SECOND, by=STRANGER),
        seal_of(court, SECOND, window=WINDOW + 1),
        seal_of(court, STRANGER),
        sign(court.summary(SECOND), SECOND)[:512],
    )
    await court.attest(FIRST, WINDOW, first_seal, *invalid_entries)
    await court.listen()
    assert await court.outcomes() == {"used"}
    assert ignored_validators(court) == []


@pytest.mark.parametrize("kind", ["missing", "another window's", "forged", "garbage", "oversized"])
def test_a_validator_without_a_readable_witness_does_not_count(kind: str) -> None:
    async def scenario() -> None:
        court = await court_with_records(quorum=2)
        path = paths.witness(FIRST.public, WINDOW)
        if kind == "missing":
            await court.store.delete(path)
        elif kind == "another window's":
            await court.attest(FIRST, WINDOW + 1)
            await court.store.put(path, await court.store.get(paths.witness(FIRST.public, WINDOW + 1), 1 << 20))
        else:
            forged = await court.store.get(paths.witness(SECOND.public, WINDOW), 1 << 20)
            await court.store.put(path, {"forged": forged, "garbage": b"\xc1", "oversized": bytes(1 << 22)}[kind])
        await court.listen()
        assert await court.outcomes() == {"no-quorum"}
        assert ignored_validators(court) == [(FIRST.public.hex()[:8], "sealed, and not revealed in time")]
        assert len(court.log.named("witness-refused")) == (kind != "missing")

    attack(scenario)()


@attack
async def test_a_check_of_the_ledger_finds_the_second_seal():
    court = Court()
    await court.say(FIRST)
    assert await verify_ledger(court.node, FIRST.public, lambda line: None) == 1
    await court.attest(SECOND, WINDOW, seal_of(court, FIRST))
    with pytest.raises(
        ProtocolError, match=f"{SEALED_TWICE}.*another seal was shown to validator {SECOND.public.hex()[:8]}"
    ):
        await verify_ledger(court.node, FIRST.public, lambda line: None)


class SealsLate(Silent):
    """Storage of the second validator: a fetch of its seal waits until the first has revealed, and seals only then."""

    court: Court

    async def get(self, path: str, max_bytes: int, *, offset: int = 0, size: int | None = None) -> bytes:
        if path == paths.seal(SECOND.public, WINDOW):
            while paths.summary(FIRST.public, WINDOW) not in {
                item.path async for item in self.list(FIRST.public.hex())
            }:
                await trio.sleep(0.1)
            if path not in {item.path async for item in self.list(SECOND.public.hex())}:
                await self.court.say(SECOND)
        return await super().get(path, max_bytes, offset=offset, size=size)


@attack
async def test_a_seal_that_is_made_while_the_trainer_fetches_it_does_not_count():
    court, store = Court(quorum=2), SealsLate()
    store.court, court.store, court.node = court, store, replace(court.node, store=store)
    await court.deliver()
    seal_time = court.run.beacon.round_time(court.run.schedule.seal(WINDOW))

    async def validate_honestly() -> None:
        verdict = court.verdict(FIRST)
        summary = court.summary(FIRST, verdict)
        await court.clock.sleep_until(seal_time - 1.0)
        await court.seal(FIRST, summary)
        await court.clock.sleep_until(seal_time + 0.3)
        await court.reveal(FIRST, summary, verdict)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(validate_honestly)
        await court.listen()
    assert await court.outcomes() == {"no-quorum"}
    assert ignored_validators(court) == [(SECOND.public.hex()[:8], "not sealed in time")]


class CrashAtSummary(MemoryStore):
    """Storage that kills its writer when it puts a summary."""

    writer: trio.CancelScope | None = None

    async def put(self, path: str, data: bytes) -> None:
        if self.writer is not None and "/summaries/" in path:
            self.writer.cancel()
        await super().put(path, data)


@pytest.mark.parametrize("late", [False, True], ids=["before the seal round", "after the seal round"])
def test_a_witness_is_the_same_after_a_crash(late: bool) -> None:
    async def scenario() -> None:
        court, store, state = Court(quorum=2), CrashAtSummary(), MemoryStore()

        def node() -> Node:
            return make_node(court.run_id, court.run, store, state, Log("v"), FIRST, clock=court.clock)

        async def witness() -> tuple[bytes, ...]:
            data = await store.get(paths.witness(FIRST.public, WINDOW), Witness.max_bytes + limits.MAX_ENVELOPE_BYTES)
            return open_signed(data, Witness, [FIRST.public]).record.seals

        await court.clock.sleep_until(court.run.deadline_time(WINDOW))
        seal, verdict = seal_of(court, SECOND), court.verdict(FIRST)
        await store.put(paths.seal(SECOND.public, WINDOW), seal)
        ledger = await Ledger.open(state, court.run.scoring)
        revealer = Revealer(node(), ledger)
        await revealer.store_verdicts(WINDOW, [verdict])
        await revealer.add_window(await ledger.record(court.summary(FIRST, verdict)))
        with trio.CancelScope() as store.writer:
            await revealer.run()
        store.writer = None
        assert await witness() == (seal,)
        await store.put(paths.seal(SECOND.public, WINDOW), sign(court.summary(SECOND), SECOND))
        if late:
            await court.clock.sleep_until(court.run.beacon.round_time(court.run.schedule.seal(WINDOW)) + 0.5)
        with trio.move_on_after(5.0):
            await Revealer(node(), await Ledger.open(state, court.run.scoring)).run()
        assert paths.summary(FIRST.public, WINDOW) in {item.path async for item in store.list(FIRST.public.hex())}
        assert await witness() == (seal,)
        assert [item.path async for item in state.list("witness/")] == []

    attack(scenario)()


class Full(MemoryStore):
    """State that takes no witness while it is full."""

    full = True

    async def put(self, path: str, data: bytes) -> None:
        if path.startswith("witness/") and self.full:
            raise StoreError(f"{path}: no space left on device")
        await super().put(path, data)


@attack
async def test_nothing_is_revealed_before_the_witness_is_stored():
    court, state = Court(quorum=2), Full()
    await court.clock.sleep_until(court.run.deadline_time(WINDOW))
    verdict = court.verdict(FIRST)
    node = make_node(court.run_id, court.run, court.store, state, Log("v"), FIRST, clock=court.clock)
    ledger = await Ledger.open(state, court.run.scoring)
    revealer = Revealer(node, ledger)
    await revealer.store_verdicts(WINDOW, [verdict])
    await revealer.add_window(await ledger.record(court.summary(FIRST, verdict)))
    await court.clock.sleep_until(court.run.beacon.round_time(court.run.schedule.seal(WINDOW)) + 0.5)
    with trio.move_on_after(2.5):
        await revealer.run()
    assert paths.witness(FIRST.public, WINDOW) not in {item.path async for item in court.store.list("")}
    state.full = False
    with trio.move_on_after(5.0):
        await Revealer(node, ledger).run()
    assert paths.summary(FIRST.public, WINDOW) in {item.path async for item in court.store.list("")}


class CrashAtDelete(MemoryStore):
    """State that kills its owner after some deletes."""

    def __init__(self) -> None:
        super().__init__()
        self.remaining_deletes = math.inf
        self.owner = trio.CancelScope()

    async def delete(self, path: str) -> None:
        self.remaining_deletes -= 1
        if self.remaining_deletes < 0:
            self.owner.cancel()
            await trio.lowlevel.checkpoint()
        await super().delete(path)


@pytest.mark.parametrize("deletes", range(4))
def test_a_witness_is_the_same_after_a_crash_while_its_state_is_deleted(deletes: int) -> None:
    async def scenario() -> None:
        court, state = Court(quorum=2), CrashAtDelete()
        node = make_node(court.run_id, court.run, court.store, state, Log("v"), FIRST, clock=court.clock)
        await court.clock.sleep_until(court.run.deadline_time(WINDOW))
        seal, verdict = seal_of(court, SECOND), court.verdict(FIRST)
        await court.store.put(paths.seal(SECOND.public, WINDOW), seal)
        ledger = await Ledger.open(state, court.run.scoring)
        await Revealer(node, ledger).store_verdicts(WINDOW, [verdict])
        await ledger.record(court.summary(FIRST, verdict))
        state.remaining_deletes = deletes
        with state.owner, trio.move_on_after(5.0):
            await Revealer(node, ledger).run()
        await court.clock.sleep_until(court.run.beacon.round_time(court.run.schedule.seal(WINDOW)) + 0.5)
        state.remaining_deletes, state.owner = math.inf, trio.CancelScope()
        with trio.move_on_after(5.0):
            await Revealer(node, ledger).run()
        data = await court.store.get(paths.witness(FIRST.public, WINDOW), Witness.max_bytes)
        assert open_signed(data, Witness, [FIRST.public]).record.seals == (seal,)
        assert [item.path async for item in state.list("") if not item.path.startswith("ledger/")] == []

    attack(scenario)()
