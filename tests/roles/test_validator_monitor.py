"""The validator monitor: who accepts false work, rejects true work or shifts log-probabilities, and what it reports."""

import math
from typing import Any

import numpy as np
import pytest

from grailnode.store.memory import MemoryStore
from protocol.digest import digest_weights
from protocol.errors import MalformedError
from protocol.judging.evidence import Tally, weigh_tally
from protocol.judging.report import ValidatorReport, canary_key, is_false_group
from protocol.judging.verdict import Judgement
from protocol.limits import MAX_GROUPS, MAX_KEYS
from protocol.proof import RATE_UNIT, Arithmetic, Thresholds
from roles.ports import StoreError
from roles.trainer.collect.logprob_bias import (
    BiasEvidence,
    Computed,
    EndEvidence,
    GroupSums,
    LogprobBias,
    add_groups,
    weigh_ends,
)
from roles.trainer.collect.quorum import decide
from roles.trainer.collect.validator_monitor import ValidatorMonitor
from roles.trainer.spool import CanaryNote, canary_path
from roles.trainer.tensor_shards import run_inline
from tests.support.builders import samples
from tests.support.builders.chains import TRAINER, make_node, small_run, small_weights
from tests.support.builders.proofs import packaged_thresholds, proof_of, with_thresholds
from tests.support.builders.samples import judgement, key, rejected, thresholds, verdict
from tests.support.faults.decorated_store import UnreachableStore
from tests.support.simulation.network import BEGIN, Log
from tests.support.simulation.virtual_clock import TrioClock

CANARY = canary_key(TRAINER, 0).public
WINDOW = next(w for w in range(1000) if [is_false_group(TRAINER, w, i) for i in range(3)] == [False, True, False])
TRUE_WINDOW = next(w for w in range(100) if not any(is_false_group(TRAINER, w, i) for i in range(3)))


def make_monitor(state: MemoryStore | None = None, canaries: int = 1) -> tuple[ValidatorMonitor, Log]:
    """Return the monitor of a trainer in a run that tolerates log-probabilities that differ by 0.005, and its log."""
    run_id, run = small_run(digest_weights(small_weights(0)))
    run = run.model_copy(update={"proof": with_thresholds(run.proof, logprob_tolerance=5_000, logprob_bias=1_000)})
    log = Log("trainer")
    node = make_node(run_id, run, MemoryStore(), state or MemoryStore(), log, TRAINER, clock=TrioClock(BEGIN))
    return ValidatorMonitor(node, canaries=canaries), log


@pytest.mark.parametrize(
    ("window", "judgements", "failures"),
    [
        (WINDOW, (judgement(0), rejected(1), judgement(2)), []),
        (WINDOW, (rejected(0, "improbable-window"), rejected(1), rejected(2, "improbable-window")), []),
        (WINDOW, (judgement(0), judgement(1)), [(1, True)]),
        (WINDOW, (rejected(0), rejected(1)), [(0, False)]),
        (WINDOW, (judgement(0), rejected(2, "improbable-window")), [(2, False)]),  # no false group was judged
        (TRUE_WINDOW, (judgement(0), judgement(1)), []),
        (TRUE_WINDOW, (rejected(0, "improbable-window"),), [(0, False)]),
    ],
)
async def test_the_failures_of_a_validator_in_a_canarys_window(
    window: int, judgements: tuple[Judgement, ...], failures: list[tuple[int, bool]]
) -> None:
    monitor, log = make_monitor()
    canary_verdict = verdict(*judgements, window=window, miner=CANARY)
    validator = canary_verdict.validator
    await monitor.examine(window, CANARY, {validator: canary_verdict})
    assert [(event["index"], event["accepted"]) for event in log.named("canary-failure")] == failures
    accepted_false_work = any(accepted for _, accepted in failures)
    assert monitor.distrusted_validators == ({validator} if accepted_false_work else set())


TRUTH = np.linspace(-3.0, -0.1, 5, dtype=np.float32)
LEADS = ((1 << 20, 2, 1 << 21), (1 << 20, 1 << 20))  # of the tokens of two rollouts: the second one nearly ties
HONEST = samples.key("honest validator").public


def shifted(index: int, change: float, **changes: Any) -> Judgement:
    """Return a judgement on a group with log-probabilities that are larger than the true ones by some number."""
    return judgement(index, logprobs=(TRUTH + np.float32(change)).astype("<f4").tobytes(), **changes)


async def note_truth(state: MemoryStore, window: int, *indices: int) -> None:
    """Note the true log-probabilities of groups, as the trainer's canary does."""
    leads = tuple(np.array(values, "<i4").tobytes() for values in LEADS)
    for index in indices:
        note = CanaryNote(arithmetic="torch-float32", judgement=shifted(index, 0.0), leads=leads)
        await state.put(canary_path(window, index, judgement(index).digest), note.to_bytes())


@pytest.mark.parametrize(("change", "is_false"), [(0.0, False), (0.004, False), (-0.7, True), (10.0, True)])
@pytest.mark.parametrize("miner", [CANARY, samples.MINER.public], ids=["canary", "stranger"])
async def test_a_validator_with_false_log_probabilities_of_what_the_trainer_computed_is_distrusted(
    miner: bytes, change: float, is_false: bool
) -> None:
    state = MemoryStore()
    monitor, _ = make_monitor(state)
    await note_truth(state, TRUE_WINDOW, 0)
    # The validator says that the miner computes more roughly than it does; nothing is noted of group 2.
    judged = verdict(
        shifted(0, change), judgement(2), window=TRUE_WINDOW, miner=miner, miner_arithmetic="torch-bfloat16"
    )
    monitor.compare(TRUE_WINDOW, miner, {judged.validator: judged}, is_paid=True)
    await monitor.finish(TRUE_WINDOW)
    assert monitor.distrusted_validators == ({judged.validator} if is_false else set())
    report = monitor.report(TRUE_WINDOW)
    failures, disagreements = (report.canary_failures, report.disagreements) if report else ((), ())
    assert [(item.index, item.about) for item in failures] == (
        [(0, "logprobs")] if is_false and miner == CANARY else []
    )
    by_trainer = [item.rejecting for item in disagreements if item.accepting == (TRAINER.public,)]
    assert by_trainer == ([(judged.validator,)] if is_false and miner != CANARY else [])
    await monitor.forget(TRUE_WINDOW - 1)
    assert [item.path async for item in state.list("canaries/")] == [canary_path(TRUE_WINDOW, 0, judgement(0).digest)]
    await monitor.forget(TRUE_WINDOW)
    assert not [item.path async for item in state.list("canaries/")]


@pytest.mark.parametrize(("change", "is_found"), [(0.004, True), (-0.004, True), (0.0009, False)])
async def test_a_validator_that_shifts_each_group_within_its_tolerance_is_distrusted(
    change: float, is_found: bool
) -> None:
    state = MemoryStore()
    for window in range(3):
        monitor, _ = make_monitor(state)  # as after a restart
        await monitor.open()
        assert not monitor.distrusted_validators
        await note_truth(state, window, *range(16))
        judged = verdict(*(shifted(index, change) for index in range(16)), window=window)
        honest = judged.model_copy(
            update={"validator": HONEST, "judgements": tuple(shifted(index, 0.0) for index in range(16))}
        )
        monitor.compare(window, judged.miner, {judged.validator: judged, HONEST: honest}, is_paid=True)
        await monitor.finish(window)
        monitor.report(window)
    assert monitor.distrusted_validators == ({judged.validator} if is_found else set())
    pairs = {frozenset((judged.validator, other)) for other in (HONEST, TRAINER.public)}
    assert monitor.logprob_rule.biased_pairs == (pairs if is_found else set())
    # No group counts that this validator and the honest one accept together.
    paying = {judged.validator, HONEST}
    decisions = decide([judged, honest], 2, set(), monitor.logprob_rule, paying, lambda group: paying)
    assert {item.reason for item in decisions} == {"logprobs-disagree" if is_found else ""}


@pytest.mark.parametrize(
    ("changes", "is_paid", "is_found"),
    [
        ({}, True, False),
        ({"ends": (1, 2)}, True, False),  # where another token nearly ties
        ({"ends": (2, 2)}, True, True),
        ({"ends": (3, 0)}, True, True),
        ({"rewards": (500_000, 2_000_000)}, True, True),
        ({"rewards": (500_000, 0)}, True, True),
        # free keys could show those groups alone in which an honest validator differs to one side
        ({"ends": (3, 0), "rewards": (500_000, 0)}, False, False),
    ],
)
async def test_a_validator_that_lies_in_ends_or_moves_rewards_to_one_side_is_distrusted(
    changes: dict[str, Any], is_paid: bool, is_found: bool
) -> None:
    """It lies in one rollout of each group, for three windows. Only groups of paid keys are evidence."""
    state = MemoryStore()
    monitor, _ = make_monitor(state)
    for window in range(3):
        await note_truth(state, window, *range(16))
        judged = verdict(*(shifted(index, 0.0, **changes) for index in range(16)), window=window)
        monitor.compare(window, judged.miner, {judged.validator: judged}, is_paid=is_paid)
        await monitor.finish(window)
        monitor.report(window)
    assert monitor.distrusted_validators == ({judged.validator} if is_found else set())


@pytest.mark.parametrize("path", ["logprob-bias", canary_path(0, 1, bytes(32))])
async def test_state_that_another_version_wrote_is_an_error_that_names_the_file_and_what_to_do(path: str) -> None:
    state = MemoryStore()
    await state.put(path, b"torch-float32\n" + bytes(8))
    monitor, _ = make_monitor(state)
    with pytest.raises(MalformedError, match=rf"{path} of this node's state \(if .*, delete it and run `grailnode"):
        await monitor.open()
        await monitor.finish(0)


async def test_of_three_validators_the_one_that_shifts_is_left_out_and_reported() -> None:
    monitor, _ = make_monitor(canaries=0)
    keys = [samples.key(f"validator {number}").public for number in range(3)]
    groups = [tuple(shifted(index, change) for index in range(16)) for change in (0.0, 0.003, 0.0)]
    for window in range(4):
        verdicts = {
            key: verdict(*judgements, window=window, validator=key)
            for key, judgements in zip(keys, groups, strict=True)
        }
        monitor.compare(window, samples.MINER.public, verdicts, is_paid=True)
        await monitor.finish(window)
        report = monitor.report(window)
        assert (report is None) == (window < 3)
    assert report is not None
    assert {(item.about, item.rejecting) for item in report.disagreements} == {("logprobs", (keys[1],))}
    decisions = decide(list(verdicts.values()), 2, set(), monitor.logprob_rule, keys, lambda group: set(keys))
    assert {item.reason for item in decisions} == {""}
    assert {opinion.validator for item in decisions for opinion in item.dissenting} == {keys[1]}
    assert not monitor.distrusted_validators


async def test_a_validator_that_contradicts_all_verdicts_does_not_break_the_report() -> None:
    monitor, log = make_monitor()
    accepting = verdict(*map(judgement, range(16)), window=WINDOW)
    rejecting = accepting.model_copy(update={"judgements": tuple(map(rejected, range(16))), "validator": bytes(32)})
    for number in range(MAX_GROUPS // 16 + 1):
        verdicts = {accepting.validator: accepting, rejecting.validator: rejecting}
        monitor.compare(WINDOW, number.to_bytes(32, "big"), verdicts, is_paid=True)
    await monitor.examine(WINDOW, CANARY, {accepting.validator: accepting})
    report = monitor.report(WINDOW)
    assert report is not None
    assert ValidatorReport.from_bytes(report.to_bytes()) == report
    assert len(report.disagreements) == MAX_GROUPS
    assert {failure.validator for failure in report.canary_failures} == {accepting.validator}
    assert len(log.named("report-truncated")) == 1


@pytest.mark.slow
async def test_a_report_on_very_many_validators_is_cut_to_what_a_record_holds() -> None:
    monitor, log = make_monitor(canaries=0)
    accepting, rejecting = verdict(*map(judgement, range(16))), verdict(*map(rejected, range(16)))
    keys = [number.to_bytes(32, "big") for number in range(MAX_KEYS)]
    verdicts = {key: accepting.model_copy(update={"validator": key}) for key in keys}
    verdicts[rejecting.validator] = rejecting
    miners = ValidatorReport.max_bytes // (16 * MAX_KEYS * 32) + 1
    for number in range(miners):
        monitor.compare(WINDOW, number.to_bytes(32, "big"), verdicts, is_paid=True)
    report = monitor.report(WINDOW)
    assert report is not None
    assert len(report.to_bytes()) < ValidatorReport.max_bytes
    assert ValidatorReport.from_bytes(report.to_bytes()) == report
    assert 0 < len(report.disagreements) < 16 * miners
    assert len(log.named("report-truncated")) == 1


async def test_a_validator_that_failed_is_distrusted_although_the_disk_is_full() -> None:
    disk: Any = UnreachableStore(MemoryStore(), "", operations=("put",), seconds=0.0)
    monitor, _ = make_monitor(disk)
    false_verdict = verdict(judgement(1), window=WINDOW, miner=CANARY)
    with pytest.raises(StoreError):
        await monitor.examine(WINDOW, CANARY, {false_verdict.validator: false_verdict})
    assert monitor.distrusted_validators == {false_verdict.validator}
    disk.is_away = False
    await monitor.examine(WINDOW, CANARY, {false_verdict.validator: false_verdict})
    report = monitor.report(WINDOW)
    assert report is not None
    assert [item.accepted for item in report.canary_failures] == [True]
    restarted, _ = make_monitor(disk)
    await restarted.open()
    assert restarted.distrusted_validators == {false_verdict.validator}


# Nodes whose log-probabilities differ to one side: who shifts them is found, and honest noise never is


ONE, OTHER = sorted(key(f"validator {number}").public for number in range(2))
BIAS = 2_000
PROOF = proof_of(thresholds(logprob_bias=BIAS))
GROUPS = 16  # of a window
NODES = 3  # two validators and the trainer
NOTHING = BiasEvidence(next_window=0, nodes=(), values=b"", ends=b"", biased=b"")
TOKENS, OPEN_TOKENS = 512, 154  # of a group; 3 in 10 tokens have a probability below 0.9
TOKEN_NOISE, SHARED_NOISE = 0.03, 0.003  # of each open token by itself, and the same for all of a group


def differences(groups: int, shift: float, seed: int) -> np.ndarray:
    """Return the sums over the tokens of groups of what two nodes in bfloat16 differ by, in millionths: int64 [groups].

    Args:
        shift: what one of them adds to the log-probability of each open token.
    """
    generator = np.random.default_rng(seed)
    noise = generator.normal(0.0, TOKEN_NOISE * math.sqrt(OPEN_TOKENS), groups)
    shared = generator.normal(0.0, SHARED_NOISE, groups) * OPEN_TOKENS
    return np.rint((noise + shared + shift * OPEN_TOKENS) * 1e6).astype(np.int64)


def computed(total: int, tokens: int = TOKENS, rewards: int | None = None) -> Computed:
    """Return what a node computes of a group."""
    return Computed("torch-float32", total, tokens, rewards)


def groups_of(values: np.ndarray) -> list[GroupSums]:
    """Return groups of which the sums of two nodes differ by these values."""
    return [{ONE: computed(value), OTHER: computed(0)} for value in values.tolist()]


def is_found(values: np.ndarray, nodes: int = NODES) -> bool:
    """Return whether two nodes whose sums differ by these values are found."""
    return any(add_groups(NOTHING, groups_of(values), (), PROOF, nodes).biased)


@pytest.mark.parametrize("factor", [1.02, 1 / 1.02, 1.1, 1.81])
def test_who_calls_every_open_token_more_or_less_likely_is_found_within_three_windows(factor: float) -> None:
    assert all(is_found(differences(3 * GROUPS, math.log(factor), seed)) for seed in range(50))


@pytest.mark.parametrize(
    ("offset", "windows"), [(0, 500), (-BIAS, 500), (BIAS, 500), pytest.param(BIAS, 10_000, marks=pytest.mark.slow)]
)
def test_honest_noise_is_not_found_whatever_its_allowed_bias(offset: int, windows: int) -> None:
    values = differences(windows * GROUPS, 0.0, seed=windows) + offset * TOKENS
    assert not is_found(values)


def test_a_shift_within_the_allowed_bias_is_not_found() -> None:
    shift = BIAS * 1e-6 * TOKENS / OPEN_TOKENS
    assert not is_found(differences(2_000, shift, seed=1))


@pytest.mark.parametrize(("nodes", "groups"), [(3, 40), (1024, 58)])
def test_more_nodes_need_more_evidence(nodes: int, groups: int) -> None:
    values = np.full(groups, 10**9)
    assert is_found(values, nodes)
    assert not is_found(values[1:], nodes)


def test_a_pair_that_was_found_stays_found() -> None:
    found = add_groups(NOTHING, groups_of(np.full(40, 10**9)), (), PROOF, NODES)
    assert add_groups(found, groups_of(np.zeros(40, np.int64)), (), PROOF, NODES).biased == found.biased != bytes(4)


@pytest.mark.parametrize(
    "group",
    [{ONE: computed(10**9), OTHER: computed(0, tokens=TOKENS - 1)}, {ONE: computed(10**9)}, {}],
    ids=["other numbers of tokens", "one node", "no node"],
)
def test_groups_that_two_nodes_do_not_judge_alike_are_no_evidence(group: GroupSums) -> None:
    assert not any(add_groups(NOTHING, [group] * 99, (), PROOF, NODES).biased)


async def test_a_window_counts_once_whatever_a_restart_repeats() -> None:
    state = MemoryStore()
    sums = {node: computed(-(10**9) * place) for place, node in enumerate((ONE, OTHER))}
    for window in range(3):
        for _ in range(3):
            bias = LogprobBias(state, run_inline)
            await bias.open()
            await bias.count(window, [sums] * 12, (), PROOF, NODES)
        assert not bias.biased_pairs
    await bias.count(3, [sums] * 12, (), PROOF, NODES)
    restarted = LogprobBias(state, run_inline)
    await restarted.open()
    assert restarted.biased_pairs == bias.biased_pairs == {frozenset((ONE, OTHER))}


# Ends and rewards


END_GROUPS, END_TOKENS = 20_000, 16 * 59  # groups of 16 rollouts with 59 tokens
ROWS = [("torch-bfloat16", "torch-bfloat16"), ("torch-bfloat16", "torch-float32"), ("torch-float32", "torch-float32")]


def added_by_ends(row: Thresholds, generator: np.random.Generator) -> list[EndEvidence]:
    """Return what an honest validator's ends add. Each token reaches each step as often as the row allows at most."""
    rates = np.array(row.margin.rates) / RATE_UNIT
    steps = generator.multinomial(END_TOKENS, [*(rates - np.append(rates[1:], 0.0)), 1.0 - rates[0]], END_GROUPS)
    tallies = (Tally(trials=END_TOKENS, steps=tuple(counts)) for counts in steps[:, :-1].tolist())
    return [(ONE, OTHER, weigh_tally(tally, row.margin)) for tally in tallies]


@pytest.mark.parametrize("pair", ROWS, ids="-".join)
def test_honest_ends_at_the_calibrated_rates_are_not_found(pair: tuple[Arithmetic, Arithmetic]) -> None:
    ends = added_by_ends(packaged_thresholds(*pair), np.random.default_rng(5))
    assert not any(add_groups(NOTHING, (), ends, PROOF, NODES).biased)


@pytest.mark.parametrize("rewarded", [0.005, 0.5])
def test_rewards_that_differ_to_either_side_are_not_found(rewarded: float) -> None:
    """Each two of 20 honest nodes differ in one group of 100, or of two, by one reward."""
    nodes = sorted(key(f"validator {number}").public for number in range(20))
    rewards = 10**6 * (np.random.default_rng(0).random((2_000, len(nodes))) < rewarded)
    groups = [dict(zip(nodes, [computed(0, rewards=own) for own in row], strict=True)) for row in rewards.tolist()]
    assert not any(add_groups(NOTHING, groups, (), PROOF, NODES).biased)


@pytest.mark.parametrize("raised", [10**6, -(10**6)])
def test_rewards_that_one_node_moves_to_one_side_are_found_after_forty_groups(raised: int) -> None:
    """They differ in one group of ten."""
    groups = [{ONE: computed(0, rewards=0), OTHER: computed(0, rewards=raised * (n % 10 == 0))} for n in range(400)]
    assert any(add_groups(NOTHING, groups, (), PROOF, NODES).biased)
    unknown = [{ONE: group[ONE], OTHER: group[OTHER]._replace(rewards=None)} for group in groups]
    assert not any(add_groups(NOTHING, unknown, (), PROOF, NODES).biased)


def test_filters_excuse_ends_where_a_token_may_not_pass() -> None:
    row = packaged_thresholds()
    leads = [np.array([1 << 20] * 9, "<i4").tobytes()] * 4
    (free, filtered) = (max(weigh_ends((9, 9, 0, 9), leads, row, has_filters=has)) for has in (False, True))
    assert free > row.threshold > 0 > filtered
