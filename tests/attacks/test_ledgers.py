"""A validator that accepts what its own numbers refuse: whoever checks its ledger sees it (`grailnode verify
--ledger`).
"""

from collections.abc import Mapping
from typing import Any

import pytest

from grailnode.observe.ledger_check import verify_ledger
from protocol import paths
from protocol.digest import content_digest
from protocol.errors import ProtocolError
from protocol.judging.ledger import Amendment, Summary, scores
from roles.ports import NotFoundError
from tests.support.attacks.court import FIRST, Court
from tests.support.attacks.target import attack
from tests.support.builders.chains import MINER
from tests.support.builders.samples import VALIDATOR, rejected


async def written(
    court: Court, windows: int, amendments: Mapping[int, tuple[Amendment, ...]] | None = None, **changes: Any
) -> None:
    """A ledger of so many windows, each of which accepts one group with these numbers; amendments by window."""
    amendments = amendments or {}
    ledger: list[Summary] = []
    for window in range(windows):
        verdict = court.verdict(FIRST, court.judgement(0, **changes), window=window)
        previous = content_digest(ledger[-1].to_bytes()) if ledger else b""
        changed = {"window": window, "previous": previous, "amendments": amendments.get(window, ())}
        entry = court.summary(FIRST, verdict, **changed)
        entry = entry.model_copy(update={"scores": scores([*ledger, entry], court.run.scoring)})
        await court.seal(FIRST, entry)
        await court.reveal(FIRST, entry, verdict)
        ledger.append(entry)


@attack
async def test_an_honest_ledger_holds():
    court = Court()
    await written(court, 12)
    said: list[str] = []
    assert await verify_ledger(court.node, FIRST.public, said.append) == 12


@pytest.mark.parametrize(
    ("windows", "changes", "why"),
    [
        (1, {"surprisal": 300.0}, "a threshold of a group"),
        (1, {"sketch_median": 254.0}, "a threshold of a group"),
        (1, {"worst_margin": 1e6}, "a threshold of a group"),
        (1, {"margin_misses": 5}, "improbable-window"),
        (12, {"margin_misses": 1}, "improbable-history"),
    ],
)
def test_lenient_against_its_own_numbers(windows: int, changes: dict[str, Any], why: str) -> None:
    async def scenario() -> None:
        court = Court()
        await written(court, windows, **changes)
        with pytest.raises(ProtocolError, match=f"accepts miner .* against its own numbers .{why}"):
            await verify_ledger(court.node, FIRST.public, lambda line: None)

    attack(scenario)()


@attack
async def test_lenient_with_the_lucky_group_of_a_window_that_another_policy_made():
    court = Court()
    verdict = court.verdict(FIRST, court.judgement(0), rejected(1), window=0)
    summary = court.summary(FIRST, verdict, window=0, previous=b"", amendments=())
    await court.seal(FIRST, summary)
    await court.reveal(FIRST, summary, verdict)
    with pytest.raises(ProtocolError, match=r"accepts miner .* against its own numbers \(improbable-window"):
        await verify_ledger(court.node, FIRST.public, lambda line: None)


def amendment(window: int, miner: bytes = MINER.public, **changes: Any) -> Amendment:
    nothing = Amendment(window=window, miner=miner, verdict=b"", accepted=0, rejected=0)
    return nothing.model_copy(update=changes)


@pytest.mark.parametrize(
    ("amendments", "why"),
    [
        ({3: (amendment(1, VALIDATOR.public),)}, "does not exist"),
        ({3: (amendment(1),), 5: (amendment(1),)}, "amended already"),
        ({3: (amendment(1, rejected=1),)}, "had not left unaudited, or without a verdict"),
        ({3: (amendment(1, rejected=4096, verdict=bytes(32)),)}, "had not left unaudited"),
    ],
)
def test_invented_second_looks_are_seen(amendments: dict[int, tuple[Amendment, ...]], why: str) -> None:
    """They would cost an honest miner its worth."""

    async def scenario() -> None:
        court = Court()
        await written(court, 7, amendments)
        with pytest.raises(ProtocolError, match=why):
            await verify_ledger(court.node, FIRST.public, lambda line: None)

    attack(scenario)()


async def expire(court: Court, *windows: int) -> None:
    """Lose a window's seal and verdicts, as a bucket does whose owner lets them expire."""
    for window in windows:
        await court.store.delete(paths.seal(FIRST.public, window))
        await court.store.delete(court.place(FIRST, window))


@attack
async def test_a_ledger_whose_oldest_verdicts_have_expired_holds_by_its_links_and_scores():
    court, said = Court(), list[str]()
    await written(court, 12)
    await expire(court, 0, 1, 2)
    assert await verify_ledger(court.node, FIRST.public, said.append) == 12
    assert "9 verdicts; of the first 3 only links and scores" in said[0]


@attack
async def test_withheld_verdicts_between_others_are_not_expired():
    court = Court()
    await written(court, 12)
    await expire(court, 0, 5)
    with pytest.raises(NotFoundError):
        await verify_ledger(court.node, FIRST.public, lambda line: None)
