"""Ed25519 envelopes with domain separation (docs/spec/encoding.md).

An envelope contains a record's canonical bytes, the record's kind, and signatures over both. Checks, in order: size,
form, kind, number of permitted signers, each key's soundness, each signature; only then is the body parsed.

`cryptography` (OpenSSL) accepts public keys of small order, under which one signature can verify for many messages, and
keys that are not canonically encoded; this module refuses both.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Annotated, ClassVar, Final, Generic, TypeVar

from blake3 import blake3
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from pydantic import AfterValidator, Field

from protocol import limits
from protocol.encoding import Record, content_digest
from protocol.errors import LimitError, MalformedError, SignatureError

KEY_BYTES: Final = 32
SIGNATURE_BYTES: Final = 64
_DOMAIN: Final = b"grailnode/1"

_P: Final = 2**255 - 19
_TORSION_Y: Final = (
    0,  # order 4
    1,  # order 1
    _P - 1,  # order 2
    0x7A03AC9277FDC74EC6CC392CFA53202A0F67100D760B3CBA4FD84D3D706A17C7,  # order 8
    0x05FC536D880238B13933C6D305ACDFD5F098EFF289F4C345B027B2C28F95E826,  # order 8
)
"""The y coordinates of the eight points whose order divides the cofactor."""

Key = Annotated[bytes, Field(min_length=KEY_BYTES, max_length=KEY_BYTES)]
"""A public key: 32 bytes, RFC 8032."""
Digest = Annotated[bytes, Field(min_length=32, max_length=32)]
"""A SHA-256 or BLAKE3 digest: 32 bytes."""


def _empty_or_digest(data: bytes) -> bytes:
    if len(data) not in (0, 32):
        raise ValueError("neither a digest nor empty")
    return data


OptionalDigest = Annotated[bytes, AfterValidator(_empty_or_digest)]
"""A digest, or empty where there is none to name."""


def check_public_key(key: bytes) -> bytes:
    """Return a public key; SignatureError if it has the wrong length, is not canonical, or has small order."""
    if len(key) != KEY_BYTES:
        raise SignatureError(f"a public key has {KEY_BYTES} bytes, this one {len(key)}")
    y = int.from_bytes(key, "little") & ((1 << 255) - 1)
    if y >= _P:
        raise SignatureError("the public key is not canonically encoded")
    if y in _TORSION_Y:
        raise SignatureError("the public key has small order")
    return key


class SigningKey:
    """A secret Ed25519 key of 32 bytes. Its representation never shows the secret."""

    def __init__(self, secret: bytes) -> None:
        if len(secret) != KEY_BYTES:
            raise ValueError(f"a secret key has {KEY_BYTES} bytes, this one {len(secret)}")
        self._key = Ed25519PrivateKey.from_private_bytes(secret)
        self.public: bytes = self._key.public_key().public_bytes_raw()

    def derive(self, purpose: str, *numbers: int) -> bytes:
        """Derive a secret of 32 bytes that only the owner of this key can compute, so that it need not be stored."""
        hasher = blake3(derive_key_context=f"grailnode/1 secret {purpose}")
        hasher.update(self._key.private_bytes_raw() + b"".join(number.to_bytes(8, "little") for number in numbers))
        return hasher.digest()

    def __repr__(self) -> str:
        return f"SigningKey(public={self.public.hex()})"

    def sign(self, message: bytes) -> bytes:
        """Return the 64-byte signature of a message."""
        return self._key.sign(message)


class Signature(Record):
    """The public key and the signature of one signer."""

    kind: ClassVar[str] = "signature"
    key: Key
    value: Annotated[bytes, Field(min_length=SIGNATURE_BYTES, max_length=SIGNATURE_BYTES)]


class Envelope(Record):
    """The wire form of a signed record. The body is parsed only after the signatures were verified."""

    kind: ClassVar[str] = "envelope"
    max_bytes: ClassVar[int] = limits.MAX_VERDICT_BYTES + limits.MAX_ENVELOPE_BYTES
    body: bytes
    of: Annotated[str, Field(max_length=32)]
    signatures: Annotated[tuple[Signature, ...], Field(min_length=1, max_length=limits.MAX_SIGNATURES)]


class PublishedRecord(Record):
    """A record that one key signs and that is stored at one path. Both follow from the record's fields."""

    run: Digest

    @property
    def path(self) -> str:
        """The only path at which this record may be stored (protocol/paths.py)."""
        raise NotImplementedError

    @classmethod
    def max_signed_bytes(cls) -> int:
        """Return the largest size in bytes of the record with its envelope."""
        return cls.max_bytes + limits.MAX_ENVELOPE_BYTES


R = TypeVar("R", bound=Record)


@dataclass(frozen=True)
class Signed(Generic[R]):
    """A record whose signatures were verified."""

    record: R
    signers: tuple[bytes, ...]  # the public keys that signed, in ascending order
    digest: bytes  # SHA-256 of the body, which identifies the record; it does not change when signatures are added
    data: bytes  # the envelope's bytes


def _message(kind: str, body: bytes) -> bytes:
    return b"\x00".join((_DOMAIN, kind.encode(), body))


def sign(record: Record, *keys: SigningKey) -> bytes:
    """Sign a record with one key or several, and return the envelope's bytes."""
    body = record.to_bytes()
    message = _message(record.kind, body)
    signatures = tuple(
        Signature(key=key.public, value=key.sign(message)) for key in sorted(keys, key=lambda key: key.public)
    )
    return Envelope(body=body, of=record.kind, signatures=signatures).to_bytes()


def open_signed(data: bytes, record_type: type[R], signers: Collection[bytes], threshold: int = 1) -> Signed[R]:
    """Verify an envelope, hostile bytes that a number of the signers must have signed, and parse the record in it.
    LimitError, MalformedError if it is no envelope of that type, or the body no such record; SignatureError if too few
    of the signers or another key signed it, or a signature is invalid.
    """
    envelope = _open_envelope(data, record_type)
    keys = [signature.key for signature in envelope.signatures]
    if keys != sorted(set(keys)):
        raise MalformedError("signatures not in ascending order of key", record_type.kind)
    if len(keys) < threshold or not set(keys) <= set(signers):
        raise SignatureError("not signed by keys that may sign it, or by too few", record_type.kind)
    message = _message(envelope.of, envelope.body)
    for signature in envelope.signatures:
        key = Ed25519PublicKey.from_public_bytes(check_public_key(signature.key))
        try:
            key.verify(signature.value, message)
        except InvalidSignature:
            raise SignatureError("the signature does not hold", record_type.kind) from None
    record = record_type.from_bytes(envelope.body)
    return Signed(record, tuple(keys), content_digest(envelope.body), data)


def _open_envelope(data: bytes, record_type: type[Record]) -> Envelope:
    if len(data) > record_type.max_bytes + limits.MAX_ENVELOPE_BYTES:
        raise LimitError(f"{len(data)} bytes are too many", record_type.kind)
    envelope = Envelope.from_bytes(data)
    if envelope.of != record_type.kind:
        raise MalformedError(f"holds a {envelope.of!r}", record_type.kind)
    return envelope


def claimed_signers(data: bytes, record_type: type[Record]) -> tuple[bytes, ...]:
    """Return the signers that an envelope (hostile bytes) claims; LimitError or MalformedError, nothing is verified."""
    return tuple(signature.key for signature in _open_envelope(data, record_type).signatures)


def open_announced(data: bytes, record_type: type[R]) -> Signed[R]:
    """Verify an envelope as `open_signed` that any keys may have signed; the caller decides what they may do."""
    return open_signed(data, record_type, claimed_signers(data, record_type))
