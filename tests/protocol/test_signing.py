"""Envelopes: only records with valid signatures by permitted keys are opened."""

import pytest
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from protocol import limits
from protocol.chain.manifest import Head
from protocol.chain.verifier import Trust
from protocol.encoding import content_digest, pack, unpack
from protocol.errors import MalformedError, SignatureError
from protocol.identity.participant import Announcement
from protocol.identity.signing import (
    Envelope,
    Signature,
    SigningKey,
    check_public_key,
    open_announced,
    open_signed,
    sign,
)
from tests.support.builders import samples
from tests.support.builders.samples import MINER, ROOT, TRAINER

P = 2**255 - 19
SMALL_ORDER = {
    "order 1": (1).to_bytes(32, "little"),
    "order 2": (P - 1).to_bytes(32, "little"),
    "order 4": bytes(32),
    "order 8": bytes.fromhex("c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac037a"),
    "order 8, other y": bytes.fromhex("26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc05"),
}
NOT_CANONICAL = {
    "p": P.to_bytes(32, "little"),
    "p + 1": (P + 1).to_bytes(32, "little"),
    "p + 18": (P + 18).to_bytes(32, "little"),
    "2^255 - 1, sign": b"\xff" * 32,
}


def with_sign(key: bytes) -> bytes:
    return key[:31] + bytes([key[31] | 0x80])


def enveloped(body: bytes, value: bytes, key: bytes = MINER.public, of: str = "announcement") -> bytes:
    return Envelope(body=body, of=of, signatures=(Signature(key=key, value=value),)).to_bytes()


def test_rfc_8032_vector() -> None:
    key = SigningKey(bytes.fromhex("4ccd089b28ff96da9db6c346ec114e0f5b8a319f35aba624da8cf6ed4fb8a6fb"))
    assert key.public.hex() == "3d4017c3e843895a92b70aa74d1b7ebc9c982ccf2ec4968cc0cd55f12af4660c"
    assert key.sign(b"\x72").hex() == (
        "92a009a9f0d4cab8720e820b5f642540a2b27b5416503f8fb3762223ebdb69da085ac1e43e15996e458f3613d0f11d8c387b2eaeb4302aeeb00d291612bb0c00"
    )


def test_a_secret_is_not_shown() -> None:
    assert samples.digest("key of miner").hex() not in f"{MINER!r}"
    with pytest.raises(ValueError, match="32 bytes"):
        SigningKey(b"short")


def test_the_digest_does_not_depend_on_the_signatures() -> None:
    one_signature = open_signed(sign(samples.head(), TRAINER), Head, [TRAINER.public])
    assert one_signature.digest == content_digest(samples.head().to_bytes())
    assert one_signature.signers == (TRAINER.public,)
    two_signatures = open_signed(sign(samples.head(), TRAINER, ROOT), Head, [TRAINER.public, ROOT.public])
    assert two_signatures.digest == one_signature.digest
    assert two_signatures.data != one_signature.data


@pytest.mark.parametrize(
    ("key", "refusal"),
    [
        *((key, "small order") for key in (*SMALL_ORDER.values(), *map(with_sign, SMALL_ORDER.values()))),
        *((key, "not canonical") for key in NOT_CANONICAL.values()),
        *((bytes(size), "") for size in (0, 31, 33)),
    ],
    ids=lambda value: value if isinstance(value, str) else value.hex()[-6:],
)
def test_a_key_that_is_no_sound_point_is_refused(key: bytes, refusal: str) -> None:
    with pytest.raises(SignatureError, match=refusal or None):
        check_public_key(key)


def test_the_library_accepts_one_signature_for_many_messages_under_a_key_of_small_order() -> None:
    """This is why check_public_key exists: with A of order 1, the equation R = [S]B - [k]A ignores the message."""
    identity = SMALL_ORDER["order 1"]
    signature = identity + bytes(32)  # R the identity, S = 0
    library = Ed25519PublicKey.from_public_bytes(identity)
    library.verify(signature, b"one message")
    library.verify(signature, b"another")
    forgery = enveloped(samples.announcement().to_bytes(), signature, identity)
    with pytest.raises(SignatureError, match="small order"):
        open_signed(forgery, Announcement, [identity])


def test_a_signature_with_s_beyond_the_order_is_refused() -> None:
    order = 2**252 + 27742317777372353535851937790883648493
    data = unpack(sign(samples.announcement(), MINER))
    value = data["signatures"][0]["value"]
    larger = value[:32] + (int.from_bytes(value[32:], "little") + order).to_bytes(32, "little")
    alteration = pack(data | {"signatures": ({"key": MINER.public, "value": larger},)})
    with pytest.raises(SignatureError):
        open_signed(alteration, Announcement, [MINER.public])


def test_a_point_that_is_not_on_the_curve_verifies_nothing() -> None:
    key = (2).to_bytes(32, "little")
    with pytest.raises(SignatureError):
        open_announced(enveloped(samples.announcement().to_bytes(), bytes(64), key), Announcement)


def test_a_signature_holds_for_one_kind_only() -> None:
    body = Trust(run=samples.RUN_ID, epoch=0, version=0, digest=samples.digest("x"), revision=0).to_bytes()
    value = MINER.sign(b"grailnode/1\x00announcement\x00" + body)
    with pytest.raises(SignatureError):
        open_signed(enveloped(body, value, of="trust"), Trust, [MINER.public])
    with pytest.raises(InvalidSignature):
        Ed25519PublicKey.from_public_bytes(MINER.public).verify(MINER.sign(body), b"grailnode/1\x00trust\x00" + body)


def test_an_envelope_with_one_invalid_signature_of_two_is_refused() -> None:
    data = unpack(sign(samples.head(), TRAINER, ROOT))
    first, second = data["signatures"]
    alteration = pack(data | {"signatures": (first, second | {"value": first["value"]})})
    with pytest.raises(SignatureError):
        open_signed(alteration, Head, [TRAINER.public, ROOT.public])


def test_the_body_is_parsed_after_the_signatures_were_verified() -> None:
    with pytest.raises(SignatureError):
        open_signed(enveloped(b"\xc1", bytes(64)), Announcement, [MINER.public])
    value = MINER.sign(b"grailnode/1\x00announcement\x00\xc1")
    with pytest.raises(MalformedError):
        open_signed(enveloped(b"\xc1", value), Announcement, [MINER.public])


def test_the_maximum_number_of_signatures_fits_the_envelope_limit() -> None:
    keys = [samples.key(f"signer {index}") for index in range(limits.MAX_SIGNATURES)]
    data = sign(samples.head(), *keys)
    assert len(data) - len(samples.head().to_bytes()) <= limits.MAX_ENVELOPE_BYTES
