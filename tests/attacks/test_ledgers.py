"""A validator that accepts what its own numbers refuse: whoever checks its ledger sees it (`grailnode verify --ledger`)."""

from typing import Any

import pytest

from grailnode.replay import verify_ledger
from protocol.digest import content_digest
from protocol.errors import ProtocolError
from protocol.ledger import Summary, scores
from tests.attacks.court import FIRST, Court
from tests.attacks.target import attack
from tests.protocol.samples import rejected


async def written(court: Court, windows: int, **changes: Any) -> None:
    """A ledger of so many windows, each of which accepts one group with these numbers."""
    ledger: list[Summary] = []
    for window in range(windows):
        verdict = court.verdict(FIRST, court.judgement(0, **changes), window=window)
        previous = content_digest(ledger[-1].to_bytes()) if ledger else b""
        changed = {"window": window, "previous": previous, "amendments": ()}
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
        (1, {"surprise": 300.0}, "a threshold of a group"),
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
