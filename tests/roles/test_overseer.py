"""What the trainer makes of verdicts on its canaries: which validators checked, which did not, and which refuse true work."""

import pytest

from grailnode.clock import TrioClock
from grailnode.store.memory import MemoryStore
from protocol import paths
from protocol.digest import digest_weights
from protocol.limits import MAX_GROUPS
from protocol.report import Report, canary_key, is_false
from protocol.signing import open_signed
from protocol.verdict import Judgement
from roles.trainer.overseer import Overseer
from tests.attacks.target import attack
from tests.network.simulation import BEGIN, Log
from tests.protocol.samples import judgement, rejected, verdict
from tests.roles.chains import TRAINER, make_node, small_run, small_weights

CANARY = canary_key(TRAINER, 0).public
WINDOW = next(w for w in range(100) if [is_false(TRAINER, w, i) for i in range(3)] == [False, True, False])
TRUE_WINDOW = next(w for w in range(100) if not any(is_false(TRAINER, w, i) for i in range(3)))


@pytest.mark.parametrize(
    ("window", "judgements", "told"),
    [
        (WINDOW, (judgement(0), rejected(1), judgement(2)), []),
        (WINDOW, (rejected(0, "improbable-window"), rejected(1), rejected(2, "improbable-window")), []),
        (WINDOW, (judgement(0), judgement(1)), [(1, True)]),
        (WINDOW, (rejected(0), rejected(1)), [(0, False)]),
        (WINDOW, (judgement(0), rejected(2, "improbable-window")), [(2, False)]),  # no false group was judged
        (TRUE_WINDOW, (judgement(0), judgement(1)), []),
        (TRUE_WINDOW, (rejected(0, "improbable-history"),), [(0, False)]),
    ],
)
def test_what_of_a_canarys_window_is_held_against_a_validator(
    window: int, judgements: tuple[Judgement, ...], told: list[tuple[int, bool]]
) -> None:
    async def scenario() -> None:
        log = Log("trainer")
        run_id, run = small_run(digest_weights(small_weights(0)))
        node = make_node(run_id, run, MemoryStore(), MemoryStore(), log, TRAINER, clock=TrioClock(BEGIN))
        overseer = Overseer(node, canaries=1)
        said = verdict(*judgements, window=window, miner=CANARY)
        await overseer.hear(window, CANARY, {said.validator: said})
        assert [(event["index"], event["accepted"]) for event in log.named("validator-deceived")] == told
        assert overseer.distrusted == ({said.validator} if any(accepted for _, accepted in told) else set())

    attack(scenario)()


def test_a_validator_that_contradicts_everybody_leaves_the_report_whole() -> None:
    async def scenario() -> None:
        log, store = Log("trainer"), MemoryStore()
        run_id, run = small_run(digest_weights(small_weights(0)))
        node = make_node(run_id, run, store, MemoryStore(), log, TRAINER, clock=TrioClock(BEGIN))
        overseer = Overseer(node, canaries=1)
        accepting = verdict(*map(judgement, range(16)), window=WINDOW)
        refusing = accepting.model_copy(update={"judgements": tuple(map(rejected, range(16))), "validator": bytes(32)})
        for number in range(MAX_GROUPS // 16 + 1):
            said = {accepting.validator: accepting, refusing.validator: refusing}
            await overseer.hear(WINDOW, number.to_bytes(32, "big"), said)
        await overseer.hear(WINDOW, CANARY, {accepting.validator: accepting})
        await overseer.report(WINDOW)
        data = await store.get(paths.report(TRAINER.public, WINDOW), Report.max_bytes)
        report = open_signed(data, Report, [TRAINER.public]).record
        assert len(report.disagreements) == MAX_GROUPS
        assert {found.validator for found in report.deceptions} == {accepting.validator}
        assert len(log.named("report-cut")) == 1

    attack(scenario)()
