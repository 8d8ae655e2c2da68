"""Admission: which announcements each policy accepts, and which keys are refused before anything is fetched."""

from typing import Any

import pytest

from protocol import limits
from protocol.errors import AdmissionError, MalformedError, ProtocolError
from protocol.identity.admission import (
    CREDENTIALS,
    AdmissionGate,
    Invite,
    ProofOfWorkSolution,
    do_work,
    leading_zero_bits,
    lottery,
    work_digest,
)
from protocol.identity.participant import Announcement
from protocol.identity.signing import SigningKey, sign
from tests.support.builders import samples
from tests.support.builders.samples import MINER, ROOT, RUN_ID, TRAINER, VALIDATOR

NOW = 50.0
INVITER, STRANGER = samples.key("inviter"), samples.key("stranger")


def gate(revoked: tuple[bytes, ...] = (), **admission: Any) -> AdmissionGate:
    return AdmissionGate(RUN_ID, samples.authority(admission=samples.admission(**admission), revoked=revoked))


def check_refusal(gate: AdmissionGate, announcement: Announcement, match: str) -> None:
    with pytest.raises(AdmissionError, match=match):
        gate.admit(announcement, NOW)


def test_open_to_all_but_the_revoked() -> None:
    gate().admit(samples.announcement(), NOW)
    other = gate(revoked=(MINER.public,))
    assert not other.may_fetch(MINER.public, "miner")
    check_refusal(other, samples.announcement(), "may not be a miner")


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"run": samples.digest("other")}, "another run"),
        ({"expires_ms": 50}, "expired"),
        ({"role": "trainer"}, "may not be a trainer"),
        ({"role": "validator"}, "may not be a validator"),
        ({"key": VALIDATOR.public, "role": "trainer"}, "may not be a trainer"),
    ],
)
def test_announcements_that_are_always_refused(changes: dict[str, Any], match: str) -> None:
    check_refusal(gate(), samples.announcement(**changes), match)


def test_trainers_and_validators_need_no_admission() -> None:
    allowlist = gate(policy="allowlist")
    allowlist.admit(samples.announcement(key=TRAINER.public, role="trainer"), NOW)
    allowlist.admit(samples.announcement(key=VALIDATOR.public, role="validator"), NOW)


def test_an_allowlist_admits_only_its_keys() -> None:
    allowlist = gate(policy="allowlist", allowed=(MINER.public,))
    allowlist.admit(samples.announcement(), NOW)
    assert allowlist.may_fetch(MINER.public, "miner")
    assert not allowlist.may_fetch(STRANGER.public, "miner")  # its announcement is not even fetched
    check_refusal(allowlist, samples.announcement(key=STRANGER.public), "may not be a miner")


def invitation(*keys: SigningKey, **changes: Any) -> Announcement:
    fields: dict[str, Any] = {"run": RUN_ID, "key": MINER.public, "expires_ms": 60}
    return samples.announcement(credential=sign(Invite(**(fields | changes)), *keys))


def test_an_invitation_by_an_inviter_or_a_root_is_accepted() -> None:
    invite_only = gate(policy="invite", inviters=(INVITER.public,))
    for key in (INVITER, ROOT):
        invite_only.admit(invitation(key), NOW)


@pytest.mark.parametrize(
    ("announcement", "match"),
    [
        (samples.announcement(), "no invitation"),
        (samples.announcement(credential=b"\xc1"), "no invitation"),
        (
            samples.announcement(credential=Invite(run=RUN_ID, key=MINER.public, expires_ms=60).to_bytes()),
            "no invitation",
        ),
        (invitation(STRANGER), "no invitation"),
        (invitation(TRAINER), "no invitation"),
        (invitation(INVITER, STRANGER), "no invitation"),
        (invitation(INVITER, key=STRANGER.public), "another key"),
        (invitation(INVITER, run=samples.digest("other")), "another key or run"),
        (invitation(INVITER, expires_ms=50), "expired"),
    ],
)
def test_invalid_invitations_are_refused(announcement: Announcement, match: str) -> None:
    check_refusal(gate(policy="invite", inviters=(INVITER.public,)), announcement, match)


def announcement_with_work(difficulty: int = 8, expires_ms: int = 60, key: bytes = MINER.public) -> Announcement:
    work = do_work(RUN_ID, key, difficulty, expires_ms)
    return samples.announcement(credential=work.to_bytes())


def test_a_proof_of_work_is_accepted() -> None:
    work_gate = gate(credential="work", difficulty=8)
    work_gate.admit(announcement_with_work(), NOW)
    work_gate.admit(announcement_with_work(9), NOW)


@pytest.mark.parametrize(
    ("announcement", "match"),
    [
        (announcement_with_work(expires_ms=50), "expired"),
        (announcement_with_work(0, expires_ms=60 + limits.MAX_WORK_MS), "too far"),
        (announcement_with_work(key=STRANGER.public), "zero bits"),
        (announcement_with_work(0), "zero bits"),
    ],
)
def test_insufficient_work_is_refused(announcement: Announcement, match: str) -> None:
    check_refusal(gate(credential="work", difficulty=20), announcement, match)


def test_malformed_work_is_refused() -> None:
    for credential in (b"", b"\xc1", bytes(1024)):
        with pytest.raises(MalformedError):
            gate(credential="work", difficulty=1).admit(samples.announcement(credential=credential), NOW)


def test_work_is_bound_to_run_key_and_time() -> None:
    work = do_work(RUN_ID, MINER.public, 12, 60)
    assert leading_zero_bits(work_digest(RUN_ID, MINER.public, work)) >= 12
    others = (
        work_digest(samples.digest("other"), MINER.public, work),
        work_digest(RUN_ID, STRANGER.public, work),
        work_digest(RUN_ID, MINER.public, ProofOfWorkSolution(expires_ms=61, nonce=work.nonce)),
    )
    assert all(leading_zero_bits(other) < 12 for other in others)
    assert leading_zero_bits(bytes(32)) == 256


ACCOUNTS = {b"rich": 100, b"poor": 1}


def check_stake(announcement: Announcement, difficulty: int, _now_ms: float) -> None:
    """Check another credential: the name of an account with enough funds."""
    if ACCOUNTS.get(announcement.credential, 0) < difficulty:
        raise AdmissionError("too little at stake", "announcement")


def test_a_credential_can_be_added_and_an_unsupported_one_admits_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    stake_gate = gate(credential="stake", difficulty=50)
    check_refusal(stake_gate, samples.announcement(credential=b"rich"), "does not support the credential 'stake'")
    monkeypatch.setitem(CREDENTIALS, "stake", check_stake)
    stake_gate.admit(samples.announcement(credential=b"rich"), NOW)
    check_refusal(stake_gate, samples.announcement(credential=b"poor"), "too little")


def test_an_announcement_cannot_have_a_longer_credential_than_allowed() -> None:
    with pytest.raises(ProtocolError):
        Announcement.from_bytes(
            samples.announcement()
            .to_bytes()
            .replace(b"\xaacredential\xc4\x00", b"\xaacredential\xc5\x04\x01" + bytes(1025))
        )


def test_the_lottery_favours_no_key() -> None:
    keys = [samples.digest(str(number)) for number in range(200)]
    first = [min(keys, key=lambda key: lottery(salt.to_bytes(4, "big"), key)) for salt in range(50)]
    assert len(set(first)) > 30
