"""Revisions of the authority: who must sign them, their numbers and links; and which announcements are admitted."""

from typing import Any

import pytest

from protocol import limits
from protocol.errors import AdmissionError, MalformedError, SignatureError
from protocol.identity.admission import (
    AdmissionGate,
    Invite,
    ProofOfWorkSolution,
    do_work,
    leading_zero_bits,
    work_digest,
)
from protocol.identity.authority import Authority, Revision, Revisions
from protocol.identity.participant import Announcement
from protocol.identity.signing import SigningKey, sign
from tests.support.builders import samples
from tests.support.builders.samples import MINER, ROOT, RUN_ID, TRAINER, VALIDATOR, authority, revision

A, B, C, D = (samples.key(f"root {name}") for name in "abcd")
THREE = {"roots": (A.public, B.public, C.public), "root_threshold": 2}


def of(*keys: SigningKey, **changes: Any) -> Authority:
    """Return an authority in which two roots must sign; its roots are `keys`, or A, B and C."""
    roots = {"roots": tuple(key.public for key in keys), "root_threshold": 2} if keys else THREE
    return authority(**(roots | changes))


def revisions_of(*revisions: Revision) -> Revisions:
    """Return the revisions of a node that has adopted some, each signed by A and B."""
    node = Revisions(RUN_ID, of())
    for item in revisions:
        node.adopt(node.check(item.number, sign(item, A, B)))
    return node


def after(node: Revisions, **changes: Any) -> Revision:
    return revision(node.number + 1, node.digest, **({"authority": of()} | changes))


@pytest.mark.parametrize("role", ["roots", "trainers", "validators"])
@pytest.mark.parametrize("key", [bytes(32), b"\xff" * 32])
def test_unsound_keys_are_refused(role: str, key: bytes) -> None:
    authority().check_keys()
    with pytest.raises(SignatureError):
        authority(**{role: (key,)}).check_keys()
    node = revisions_of()
    with pytest.raises(SignatureError):
        node.check(1, sign(after(node, authority=of(**({role: (key,)} | {"root_threshold": 1}))), A, B))


def test_a_lower_threshold_needs_as_many_signatures_as_before() -> None:
    node = revisions_of()
    weaker = after(node, authority=of(root_threshold=1))
    with pytest.raises(SignatureError):
        node.check(1, sign(weaker, A))
    node.adopt(node.check(1, sign(weaker, A, B)))
    node.adopt(node.check(2, sign(after(node), A, B)))


def test_a_revision_out_of_order_is_an_error_of_the_caller() -> None:
    first = after(revisions_of(), note="one")
    node = revisions_of(first)
    with pytest.raises(ValueError, match="higher than the next one, 2"):
        node.check(3, sign(after(node), A, B))
    with pytest.raises(ValueError, match="does not follow"):
        node.adopt(node.check(1, sign(first, A, B)))


# Admission: which announcements each policy accepts, and which keys are refused before anything is fetched


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


def test_an_unsupported_credential_admits_nobody() -> None:
    stake_gate = gate(credential="stake", difficulty=50)
    check_refusal(stake_gate, samples.announcement(credential=b"rich"), "does not support the credential 'stake'")
