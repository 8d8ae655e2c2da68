"""Networks in which R1 deals the groups to some of the validators: silent, returning, idle and lying ones."""

from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from functools import partial

import pytest

from grailnode.engine.compute import make_engine
from grailnode.observe.ledger_check import verify_ledger
from grailnode.observe.observer import Observer
from grailnode.observe.rollout_reader import read_verified_groups
from protocol import paths
from protocol.errors import ProtocolError
from protocol.identity.signing import SigningKey
from protocol.judging.report import canary_key
from protocol.judging.roster import Roster
from protocol.judging.verdict import Judgement, Verdict
from protocol.rollout.batch import Commitment, open_group
from roles.authority_updates import under_authority
from roles.policy.follower import Follower
from roles.records import fetch_record
from roles.rosters import Rosters
from roles.validator.ledger_state import Ledger
from roles.validator.validator import Validator
from roles.validator.validator_settings import ValidatorSettings
from roles.validator.window_cases import WindowCases
from tests.support.builders.proofs import FLOAT32
from tests.support.builders.recipes import demo_rules
from tests.support.builders.samples import counts, judgement
from tests.support.pytest_options.few_daily import few_daily
from tests.support.simulation.network import Network, key, randomness
from tests.support.simulation.network_runs import FalseSketches, run_nodes, summaries, used_groups, verdicts
from tests.support.simulation.virtual_clock import running


class LyingValidator(Validator):
    """Accepts every group that is dealt to it, or every group at all.

    Attributes:
        greedy: whether it accepts groups that are not dealt to it, and says that they are.
    """

    greedy = False

    async def _judge(
        self, cases: WindowCases, version: int, roster: Roster, opening: bytes, draw: bytes
    ) -> list[Verdict]:
        verdicts = await super()._judge(cases, version, roster, opening, draw)
        return [await self._with_lies(verdict, roster, draw) for verdict in verdicts]

    async def _with_lies(self, verdict: Verdict, roster: Roster, draw: bytes) -> Verdict:
        if not any(item.rejected for item in verdict.judgements):
            return verdict
        node, window, miner = self._node, verdict.window, verdict.miner
        commitment = (await fetch_record(node, Commitment, paths.commitment(miner, window))).record
        dealt = (
            tuple(range(verdict.submitted))
            if self.greedy
            else roster.dealt_groups(
                node.run_id, window, draw, miner, groups=verdict.submitted, validator=node.key.public
            )
        )
        return verdict.model_copy(update={"dealt": len(dealt), "judgements": await self._lies(commitment, dealt)})

    async def _lies(self, commitment: Commitment, dealt: Sequence[int]) -> tuple[Judgement, ...]:
        path = paths.batch(commitment.miner, commitment.window, commitment.batch)
        row = self._node.run.proof.row(*FLOAT32)
        judgements = []
        for index in dealt:
            offset, size = commitment.extent(index)
            group = open_group(await self._node.store.get(path, size, offset=offset, size=size), commitment, index)
            tokens = sum(len(rollout.completion) // 4 for rollout in group.rollouts)
            judgements.append(
                judgement(
                    index,
                    digest=commitment.groups[index][0],
                    tokens=tokens,
                    counts=counts(row, sketch=(tokens,), margin=(tokens,), stop=(len(group.rollouts),)),
                    rewards=tuple(rollout.reward for rollout in group.rollouts),
                    logprobs=bytes(4 * tokens),
                )
            )
        return tuple(judgements)


RULES = demo_rules(groups=4, group_size=4, max_tokens=4, seal_rounds=9, verdict_rounds=14, spares=0)
MINERS = 2
CHEAT = "impostor"
GROUPS = MINERS * RULES.groups


async def judges(network: Network, windows: range, miner: SigningKey) -> dict[tuple[int, int], set[str]]:
    """Return the validators that judged each group (window, index) of a miner."""
    result = defaultdict(set)
    for name in network.validators:
        for window, verdict in (await verdicts(network, miner, windows, name)).items():
            for item in verdict.judgements:
                result[window, item.index].add(name)
    return result


async def due_judges(network: Network, miner: str, window: int) -> list[Collection[bytes]]:
    """Return the judges of each group of a miner in a window, by what everybody can read."""
    roster = await Rosters(network.node("checker")).get(window)
    draw, public = randomness(network.run.schedule.audit(window)), key(miner).public
    return [roster.judges_of(network.signed.digest, window, draw, public, group) for group in range(RULES.groups)]


async def dealt_to(network: Network, name: str, window: int) -> int:
    """Return how many groups of the miners of a window were dealt to a validator."""
    by_miner = [await due_judges(network, f"miner-{number + 1}", window) for number in range(MINERS)]
    return sum(key(name).public in judges for groups in by_miner for judges in groups)


async def test_four_validators_share_the_groups_and_agree():
    network = Network(RULES, validators=4, quorum=2)
    async with run_nodes(network, miners=MINERS):
        await network.until_window(8)
    assert used_groups(network, range(1, 6)) == dict.fromkeys(range(1, 6), GROUPS)
    loads: Counter[str] = Counter()
    for number in range(MINERS):
        by_group = await judges(network, range(1, 6), key(f"miner-{number + 1}"))
        assert len(by_group) == 5 * RULES.groups
        assert all(len(names) == 2 for names in by_group.values())
        loads.update(name for names in by_group.values() for name in names)
    assert sum(loads.values()) == 2 * 5 * GROUPS
    assert max(loads.values()) <= 2 * 5 * GROUPS * 0.45  # a quarter each, on average
    assert not network.events("trainer/download", "validators-disagree")
    checker = network.node("checker")
    for name in network.validators:
        assert await verify_ledger(checker, key(name).public, lambda line: None) >= 5
    observer = Observer(network.node("observer"), 0, last_window=5)
    await observer.refresh()
    shown = {row.window: row.accepted for row in observer.state().windows}
    assert {shown[window] for window in range(1, 6)} == {GROUPS}
    assert len(await read_verified_groups(checker, 4)) == GROUPS


@pytest.mark.slow
async def test_the_groups_of_a_silent_validator_are_judged_by_the_others_until_it_is_back():
    silent, back, last = 3, 10, 16
    network = Network(RULES, validators=4, quorum=2)
    name = network.validators.pop()
    async with run_nodes(network, miners=MINERS) as nursery:
        async with running(network.run_validator, name):
            await network.until_window(silent)
        await network.until_window(back)
        nursery.start_soon(network.run_validator, name)
        await network.until_window(last)
    used = used_groups(network, range(1, last - 2))
    delay = 2 + 2  # windows until nobody waits for a summary, and those of which one is enough
    by_window = {summary.window: summary for summary in await summaries(network, "validator-0", range(last))}
    # where the trainer publishes several versions within a window, the version that a miner has pledged may lapse
    lapsed = {w: sum(row.submitted for row in s.rows if row.lapsed) for w, s in by_window.items()}
    whole = [*range(1, silent - 1), *range(silent + delay, last - 2)]
    assert {window: used[window] + lapsed[window] for window in whole} == dict.fromkeys(whole, GROUPS)
    assert sum(map(bool, lapsed.values())) <= 2
    silence = [window for window in range(silent, silent + delay) if not lapsed[window]]
    lost = {window: await dealt_to(network, name, window) for window in silence}
    assert sum(lost.values()) > 0
    assert {window: GROUPS - used[window] for window in lost} == lost
    absent = [window for window, summary in by_window.items() if len(summary.roster) == 3]
    assert absent == [*range(silent + delay, absent[-1] + 1)]
    assert back + 1 <= absent[-1] <= back + 4
    own = {summary.window: summary for summary in await summaries(network, name, range(back, last))}
    assert any(summary.shows_work for window, summary in own.items() if window <= absent[-1])


async def test_with_a_spare_a_silent_validator_costs_nothing():
    network = Network(RULES.changed(spares=1), validators=4, quorum=2)
    network.validators.pop()
    async with run_nodes(network, miners=MINERS):
        await network.until_window(6)
    assert used_groups(network, range(1, 4)) == dict.fromkeys(range(1, 4), GROUPS)


async def run_liar(network: Network, name: str, greedy: bool = False) -> None:
    node = network.node(name)

    async with under_authority(node):
        ledger, follower = await Ledger.open(node.state, node.run), await Follower(node, keep=16).open()
        engine = make_engine(network.compute, node.run_sync)
        settings = ValidatorSettings(evaluate=False, poll_seconds=0.2)
        liar = LyingValidator(node, follower, engine, network.task(node), ledger, settings)
        liar.greedy = greedy
        await liar.run()


async def dealt_to_liar_alone(network: Network, liar: str, windows: range) -> dict[int, int]:
    """Return how many groups of the cheat in each window have the liar as their only judge."""
    alone = {key(liar).public}
    return {window: sum(set(own) == alone for own in await due_judges(network, CHEAT, window)) for window in windows}


async def run_with_liar(quorum: int, *, greedy: bool = False) -> tuple[Network, str]:
    """Run four validators, one of which lies, an honest miner and a cheat; return the network and the liar's name."""
    network = Network(RULES, validators=4, quorum=quorum)
    liar = network.validators.pop()
    async with run_nodes(network, miners=1) as nursery:
        nursery.start_soon(run_liar, network, liar, greedy)
        nursery.start_soon(partial(network.run_miner, CHEAT, RULES.groups, FalseSketches))
        await network.until_window(9)
    return network, liar


@pytest.mark.parametrize("quorum", few_daily([1, 2], 2))
async def test_one_liar_of_four_gets_a_cheat_only_the_groups_of_which_it_is_the_only_judge(quorum: int):
    network, liar = await run_with_liar(quorum)
    windows = range(1, 6)
    expected = await dealt_to_liar_alone(network, liar, windows)
    assert used_groups(network, windows, CHEAT) == expected
    assert (sum(expected.values()) > 0) == (quorum == 1)
    assert used_groups(network, windows, "miner-1") == dict.fromkeys(windows, RULES.groups)
    checker = network.node("checker")
    assert await verify_ledger(checker, key(liar).public, lambda line: None) >= 4  # its lie is consistent


async def test_a_liar_that_accepts_what_was_not_dealt_to_it_gains_nothing_and_is_found():
    network, liar = await run_with_liar(1, greedy=True)
    windows = range(1, 6)
    assert used_groups(network, windows, CHEAT) == await dealt_to_liar_alone(network, liar, windows)
    with pytest.raises(ProtocolError, match="not dealt to it"):
        await verify_ledger(network.node("checker"), key(liar).public, lambda line: None)


async def test_a_canary_finds_a_liar_to_which_a_part_of_its_groups_is_dealt():
    network = Network(RULES, validators=4, quorum=1)
    liar = network.validators.pop()
    async with run_nodes(network, miners=1, canaries=1) as nursery:
        nursery.start_soon(run_liar, network, liar)
        nursery.start_soon(network.run_canary)
        await network.until_window(8)
    failures = network.events("trainer/download", "canary-failure")
    assert failures
    assert {event["validator"] for event in failures} == {key(liar).public.hex()}
    judged = await judges(network, range(1, 6), canary_key(key("trainer"), 0))
    assert {name for names in judged.values() for name in names} == set(network.validators)
    rosters = Rosters(network.node("checker"))
    for (window, _), names in judged.items():  # one that is not on the roster, as nothing was dealt to it, may join
        roster = (await rosters.get(window)).validators
        assert sum(key(name).public in roster for name in names) <= 1
