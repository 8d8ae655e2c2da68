"""A site or the coordinator is killed at one of its operations, starts again, and no update is lost or doubled."""

from functools import cache, partial
from itertools import pairwise

import torch
import trio

from protocol import pseudogradient
from protocol.outer.dithering import first_state
from protocol.outer.round_records import RoundRules
from roles.trainer.outer.round_files import FEEDBACK, SITE, SiteRecord, get_tensors, numbered
from roles.trainer.spool import INBOX, list_snapshots
from tests.support.builders.samples import round_rules
from tests.support.faults.crash_trigger import CrashTrigger, changes
from tests.support.simulation.network import key
from tests.support.simulation.outer_sites import OuterTestbed, first_weights
from tests.support.simulation.virtual_clock import running, simulate

ROUNDS = 4
RULES = round_rules(values="exact", fraction=0, local_steps=2, quorum=2)
DELAYED = RULES.model_copy(update={"delay": 1})
SPREAD = RULES.model_copy(update={"spread": 1})
STREAMED = RULES.model_copy(update={"streams": 3})
STREAMED_AND_DELAYED = DELAYED.model_copy(update={"streams": 3})


@cache
def operations_of(victim: str, rules: RoundRules = RULES, seed: int = 0) -> list[tuple[str, str]]:
    """Return the operations of a process in some rounds without a crash, as one simulation had them."""
    return kill(victim, 1 << 30, after=False, rules=rules, seed=seed)


def kill(victim: str, place: int, *, after: bool, rules: RoundRules = RULES, seed: int = 0) -> list[tuple[str, str]]:
    """Run some rounds in which one process is killed at its operation of a number; check what the rest has.

    Returns:
        The operations of the victim up to the crash.
    """
    return simulate(_run, victim, place, after, rules, seed)


async def _run(victim: str, place: int, after: bool, rules: RoundRules, seed: int) -> list[tuple[str, str]]:
    testbed = OuterTestbed(3, rules, seed=seed)
    operations: list[tuple[str, str]] = []

    def counts(operation: str, path: str) -> bool:
        """Note an operation that changes something; say that it counts."""
        if not changes(operation, path) or path.startswith(INBOX):
            return False
        operations.append((operation, path))
        return True

    trigger = CrashTrigger(counts, place, after)
    async with running(testbed.feed) as nursery:
        for name in testbed.names:
            if name != victim:
                nursery.start_soon(testbed.run_site, testbed.handles[name])
        if victim != "coordinator":
            nursery.start_soon(testbed.run_coordinator)
            handle = testbed.handles[victim]
            nursery.start_soon(testbed.run_killed, partial(testbed.run_site, handle), handle.state, trigger)
        else:
            state = testbed.coordinator_state
            nursery.start_soon(testbed.run_killed, testbed.run_coordinator, state, trigger)
        await testbed.until_round(ROUNDS)
        await trio.sleep(1)
    await check(testbed, victim)
    return operations


async def check(testbed: OuterTestbed, victim: str) -> None:
    """Check the invariants of a run that has ended."""
    manifests = await testbed.manifests()
    assert not testbed.rewritten
    for number in range(1, ROUNDS + 1):
        states = {table[number] for table in map(testbed.applied, testbed.names) if number in table}
        assert states == {manifests[number].state.weights.hex()[:16]}, number
    used = [group for manifest in manifests for item in manifest.counted for group in item.groups]
    assert len(used) == len(set(used))
    snapshots = [name.version for name in await list_snapshots(testbed.coordinator_state)]
    assert snapshots in [list(range(manifest.version + 1)) for manifest in (manifests[ROUNDS], manifests[-1])]
    incomplete = [manifest for manifest in manifests[1:] if len(manifest.counted) < 3]
    assert len(incomplete) <= 1, "more than the round of the crash was lost"
    for name in testbed.names:
        await check_sums(testbed, name)


async def check_sums(testbed: OuterTestbed, name: str) -> None:
    """Check that what a site sent and counted, and its error feedback, add up to its local updates that counted."""
    handle, manifests = testbed.handles[name], await testbed.manifests()
    record = SiteRecord.from_bytes(await handle.state.get(SITE, 1 << 20))
    total: dict[str, torch.Tensor] = {}
    shared, steps = first_state(first_weights(), manifests[0].rules), 0
    for opening, manifest in pairwise(manifests[: record.number + 1]):
        payloads = await testbed.payloads(manifest, shared, opening.rules)
        for item, payload in zip(manifest.counted, payloads, strict=True):
            if item.worker == key(name).public:
                steps += (await testbed.contribution(name, manifest.number)).record.local_steps
                for part, values in pseudogradient.decode(payload, shared.stream(opening.rules), opening.state.weights):
                    for tensor_name, sent in part.scatter(values).items():
                        update = shared.weights[tensor_name] - handle.learner.ends[steps][tensor_name]
                        total[tensor_name] = total.get(tensor_name, torch.zeros_like(update)) + update - sent
        shared = shared.after(payloads, [item.factor for item in manifest.counted], opening.rules)
        assert shared.digests == manifest.state
    assert record.feedback >= 0
    feedback = await get_tensors(
        testbed.node(handle.log, handle.state, handle.key), numbered(FEEDBACK, record.feedback)
    )
    for tensor_name, expected in total.items():
        assert torch.allclose(feedback[tensor_name], expected, atol=1e-6), tensor_name
