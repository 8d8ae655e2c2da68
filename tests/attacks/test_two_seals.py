"""A validator that shows one seal to the others, so that they reveal, and another one to the trainer (docs/spec/ledger.md)."""

import pytest

from grailnode.replay import verify_ledger
from protocol import paths
from protocol.errors import ProtocolError
from protocol.ledger import Seal
from protocol.signing import SigningKey, sign
from tests.attacks.court import FIRST, SECOND, STRANGER, WINDOW, Court
from tests.attacks.target import attack
from tests.protocol.samples import digest

TWICE = "sealed twice"


def seal_of(court: Court, validator: SigningKey, window: int = WINDOW, by: SigningKey | None = None) -> bytes:
    """A seal of something that nobody reveals."""
    seal = Seal(run=court.run_id, window=window, validator=validator.public, summary=digest("nothing"))
    return sign(seal, by or validator)


def unheard(court: Court) -> list[tuple[str, str]]:
    """Which validators did not count, and the beginning of why."""
    lines = [line for line in court.log.named("validator-unheard") if line["window"] == WINDOW]
    return [(line["validator"], line["error"].partition(":")[0]) for line in lines]


@pytest.mark.parametrize("liar", [FIRST, SECOND], ids=["heard first", "heard last"])
def test_another_seal_in_a_witness_shuts_its_validator_up(liar: SigningKey) -> None:
    async def scenario() -> None:
        court = Court(quorum=2)
        await court.deliver()
        await court.say(FIRST)
        await court.say(SECOND)
        await court.attest(FIRST if liar is SECOND else SECOND, WINDOW, seal_of(court, liar))
        await court.listen()
        assert await court.outcomes() == {"no-quorum"}
        assert unheard(court) == [(liar.public.hex()[:8], TWICE)]

    attack(scenario)()


@attack
async def test_the_honest_validators_verdicts_still_count():
    court = Court(quorum=1)
    await court.deliver()
    await court.say(FIRST)
    await court.say(SECOND, court.judgement(0, digest=digest("invented")))
    await court.attest(FIRST, WINDOW, seal_of(court, SECOND))
    await court.listen()
    assert {outcome for outcome in (await court.account()).values() if outcome == "used"} == {"used"}
    assert unheard(court) == [(SECOND.public.hex()[:8], TWICE)]


@attack
async def test_the_same_seal_in_a_witness_and_what_is_none_speak_against_nobody():
    court = Court(quorum=2)
    await court.deliver()
    await court.say(FIRST)
    await court.say(SECOND)
    same = await court.store.get(paths.seal(SECOND.public, WINDOW), 512)
    strange = (
        b"",
        b"\xc1" * 400,
        same[:-1],
        seal_of(court, SECOND, by=FIRST),
        seal_of(court, SECOND, by=STRANGER),
        seal_of(court, SECOND, window=WINDOW + 1),
        seal_of(court, STRANGER),
        sign(court.summary(SECOND), SECOND)[:512],
    )
    await court.attest(FIRST, WINDOW, same, *strange)
    await court.listen()
    assert await court.outcomes() == {"used"}
    assert unheard(court) == []


@pytest.mark.parametrize("kind", ["missing", "another window's", "forged", "garbage", "oversized"])
def test_a_validator_whose_witness_cannot_be_read_is_not_heard(kind: str) -> None:
    async def scenario() -> None:
        court = Court(quorum=2)
        await court.deliver()
        await court.say(FIRST)
        await court.say(SECOND)
        place = paths.witness(FIRST.public, WINDOW)
        if kind == "missing":
            await court.store.delete(place)
        elif kind == "another window's":
            await court.attest(FIRST, WINDOW + 1)
            await court.store.put(place, await court.store.get(paths.witness(FIRST.public, WINDOW + 1), 1 << 20))
        else:
            forged = await court.store.get(paths.witness(SECOND.public, WINDOW), 1 << 20)
            await court.store.put(place, {"forged": forged, "garbage": b"\xc1", "oversized": bytes(1 << 22)}[kind])
        await court.listen()
        assert await court.outcomes() == {"no-quorum"}
        assert unheard(court) == [(FIRST.public.hex()[:8], "sealed, and not revealed in time")]
        assert len(court.log.named("witness-refused")) == (kind != "missing")

    attack(scenario)()


@attack
async def test_whoever_checks_the_ledger_sees_the_second_seal():
    court = Court()
    await court.say(FIRST)
    assert await verify_ledger(court.node, FIRST.public, lambda line: None) == 1
    await court.attest(SECOND, WINDOW, seal_of(court, FIRST))
    with pytest.raises(ProtocolError, match=f"{TWICE}.*another seal was shown to validator {SECOND.public.hex()[:8]}"):
        await verify_ledger(court.node, FIRST.public, lambda line: None)
