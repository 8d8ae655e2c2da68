"""Public randomness: drand's `bls-unchained-g1-rfc9380` scheme, as its quicknet runs it (docs/spec/beacon.md).

A round's signature is a BLS12-381 signature on G1 (48 bytes) under a public key on G2 (96 bytes) of SHA-256(round as
big-endian u64); its randomness is SHA-256(signature). A local chain differs only in its key and its clock, and
therefore in its chain hash; `verify_round` checks both.

An answer is checked in this order: size, JSON, fields, the requested round, the signature's encoding and subgroup, the
pairing. The answer's own `randomness` field is not read.

Source: drand `common/chain/info.go` (chain hash), `crypto/schemes.go` (scheme), RFC 9380 section 8.8.1 (hash to G1).
"""

import hashlib
import json
import re
import struct
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Annotated, Any, ClassVar, Final, Self

import pyblst
from pydantic import Field, field_validator

from protocol import bounded_json, limits
from protocol.encoding import Record
from protocol.errors import LimitError, MalformedError, SignatureError, error_context

PUBLIC_KEY_BYTES: Final = 96
SIGNATURE_BYTES: Final = 48

_DOMAIN: Final = b"BLS_SIG_BLS12381G1_XMD:SHA-256_SSWU_RO_NUL_"
_ORDER: Final = 0x73EDA753299D7D483339D80809A1D80553BDA402FFFE5BFEFFFFFFFF00000001
_INFINITY: Final = 0x40  # flag of the point at infinity in the first byte of a compressed point
_G2: Final = pyblst.BlstP2Element.uncompress(
    bytes.fromhex(
        "93e02b6052719f607dacd3a088274f65596bd0d09920b61ab5da61bbdc7f5049334cf11213945d57e5ac7d055d042b7e"
        "024aa2b2f08f0a91260805272dc51051c6e47ad4fa403b02b4510b647ae3d1770bac0326a805bbefd48056c8c121bdb8"
    )
)
_MILLISECOND_TAG: Final = b"grailnode beacon in milliseconds"
_signature_hex: Final = re.compile(r"[0-9a-f]{96}")


@lru_cache(maxsize=16)
def _public_key(data: bytes) -> Any:
    """Return the point of a public key: on the curve, in the subgroup of prime order (blst checks), not infinity."""
    if len(data) != PUBLIC_KEY_BYTES or data[0] & _INFINITY:
        raise ValueError("no beacon public key: 96 bytes of a point other than infinity")
    return pyblst.BlstP2Element.uncompress(data)


class ChainInfo(Record):
    """A beacon: its key, and the times of its rounds.

    drand counts in whole seconds; milliseconds let a chain on one machine run faster. Round 1 is due at genesis.
    """

    kind: ClassVar[str] = "beacon-chain"
    max_bytes: ClassVar[int] = limits.MAX_BEACON_BYTES

    public_key: bytes  # compressed G2 point, 96 bytes
    period_ms: Annotated[int, Field(ge=1, le=limits.MAX_BEACON_PERIOD_MS)]
    # when round 1 is due, in milliseconds since the Unix epoch
    genesis_ms: Annotated[int, Field(ge=0, le=limits.MAX_TIME_MS)]
    group_hash: Annotated[bytes, Field(min_length=32, max_length=32)]  # drand's genesis seed
    # drand's name of the beacon; 'default' is hashed as no name
    beacon_id: Annotated[str, Field(pattern=r"^[a-z0-9_-]{1,64}$")]

    @field_validator("public_key")
    @classmethod
    def _is_a_key(cls, value: bytes) -> bytes:
        _public_key(value)
        return value

    @property
    def chain_hash(self) -> bytes:
        """The chain's identifier, 32 bytes: drand's formula if both times are whole seconds.

        drand defines no hash for a chain in milliseconds. Here the preimage of such a hash begins with a tag; read as
        drand's period, the tag exceeds the longest period that is allowed, so no two chains share a hash.
        """
        if self.period_ms % 1000 == 0 and self.genesis_ms % 1000 == 0:
            times = struct.pack(">Iq", self.period_ms // 1000, self.genesis_ms // 1000)
        else:
            times = _MILLISECOND_TAG + struct.pack(">Iq", self.period_ms, self.genesis_ms)
        name = b"" if self.beacon_id == "default" else self.beacon_id.encode()
        return hashlib.sha256(times + self.public_key + self.group_hash + name).digest()

    def round_time(self, round_number: int) -> float:
        """Return the time at which a round is due: seconds since the Unix epoch."""
        _check_round(round_number)
        return (self.genesis_ms + (round_number - 1) * self.period_ms) / 1000

    def round_at(self, moment: float) -> int:
        """Return the newest round that is due at a time (seconds since the Unix epoch); 0 before genesis. The time is
        rounded to ten microseconds, more than a float's error, so that `round_at(round_time(r)) == r` for every round.
        """
        elapsed_ms = round(moment * 100_000) // 100 - self.genesis_ms
        return max(0, elapsed_ms // self.period_ms + 1)

    def path(self, round_number: int) -> str:
        """Return the path of a round on a relay, relative to the relay's root (drand's HTTP interface)."""
        _check_round(round_number)
        return f"{self.rounds_prefix}{round_number}"

    @property
    def rounds_prefix(self) -> str:
        """The prefix of the paths of this chain's rounds."""
        return f"{self.chain_hash.hex()}/public/"


quicknet: Final = ChainInfo(
    public_key=bytes.fromhex(
        "83cf0f2896adee7eb8b5f01fcad3912212c437e0073e911fb90022d3e760183c8c4b450b6a0a6c3ac6a5776a2d106451"
        "0d1fec758c921cc22b0e17e63aaf4bcb5ed66304de9cf809bd274ca73bab4af5a6e9c76a4bc09e76eae8991ef5ece45a"
    ),
    period_ms=3_000,
    genesis_ms=1_692_803_367_000,
    group_hash=bytes.fromhex("f477d5c89f21a17c863a7f937c6a6d15859414d2be09cd448d4279af331c5d3e"),
    beacon_id="quicknet",
)
"""The League of Entropy's chain 52db9ba7...84e971, with a round every 3 seconds since 23 August 2023."""


def _check_round(round_number: int) -> None:
    if not 1 <= round_number <= limits.MAX_BEACON_ROUND:
        raise ValueError(f"beacon rounds go from 1 to {limits.MAX_BEACON_ROUND}, not {round_number}")


def _message(round_number: int) -> Any:
    """Return the point on G1 that a round's signature is a multiple of."""
    digest = hashlib.sha256(struct.pack(">Q", round_number)).digest()
    return pyblst.BlstP1Element.hash_to_group(digest, _DOMAIN)


def parse_round(data: bytes, round_number: int) -> bytes:
    """Return the signature (48 bytes, unverified) in a relay's answer for one round: LimitError above MAX_BEACON_BYTES,
    MalformedError for no JSON, a missing or wrong field, or another round.
    """
    if len(data) > limits.MAX_BEACON_BYTES:
        raise LimitError(f"{len(data)} bytes where at most {limits.MAX_BEACON_BYTES} are allowed", "beacon answer")
    with error_context("beacon answer"):
        answer = bounded_json.parse(data, bounded_json.unique)
    if not isinstance(answer, dict):
        raise MalformedError("not a JSON object", "beacon answer")
    number, signature = answer.get("round"), answer.get("signature")
    if type(number) is not int:
        raise MalformedError("no round number", "beacon answer")
    if number != round_number:
        raise MalformedError(f"another round than the requested {round_number}", "beacon answer")
    if not isinstance(signature, str) or not _signature_hex.fullmatch(signature):
        raise MalformedError("no signature of 96 lower-case hex digits", "beacon answer")
    return bytes.fromhex(signature)


def verify_round(chain: ChainInfo, round_number: int, signature: bytes) -> bytes:
    """Verify the signature of a round (SignatureError), and return the round's randomness (32 bytes)."""
    _check_round(round_number)
    where = f"beacon round {round_number}"
    if len(signature) != SIGNATURE_BYTES or signature[0] & _INFINITY:
        raise SignatureError("a signature is 48 bytes of a point other than infinity", where)
    try:
        point = pyblst.BlstP1Element.uncompress(signature)
    except ValueError as error:
        raise SignatureError("the signature is no point of G1's prime-order subgroup", where) from error
    signature_pairing = pyblst.miller_loop(point, _G2)
    message_pairing = pyblst.miller_loop(_message(round_number), _public_key(chain.public_key))
    if not pyblst.final_verify(signature_pairing, message_pairing):
        raise SignatureError(f"not signed by the key of chain {chain.chain_hash.hex()[:8]}", where)
    return hashlib.sha256(signature).digest()


def open_round(chain: ChainInfo, round_number: int, data: bytes) -> bytes:
    """Parse and verify a relay's answer, and return the round's randomness (32 bytes)."""
    return verify_round(chain, round_number, parse_round(data, round_number))


@dataclass(frozen=True)
class LocalKey:
    """The secret key of a beacon that one machine runs. Whoever has it knows every round in advance. A round is a
    signature of its number alone, so each run needs a key of its own.
    """

    secret: int = field(repr=False)

    def __post_init__(self) -> None:
        if not 1 <= self.secret < _ORDER:
            raise ValueError("a beacon secret lies in [1, order of the group)")

    @classmethod
    def from_seed(cls, seed: bytes) -> Self:
        """Derive a key from at least 16 secret bytes."""
        if len(seed) < 16:
            raise ValueError("a beacon seed has at least 16 bytes")
        wide = hashlib.sha512(b"grailnode local beacon key" + seed).digest()
        return cls(int.from_bytes(wide, "big") % (_ORDER - 1) + 1)

    @property
    def public_key(self) -> bytes:
        """Compressed G2 point, 96 bytes."""
        compressed = _G2.scalar_mul(self.secret).compress()
        assert isinstance(compressed, bytes)
        return compressed

    def chain(self, period_ms: int, genesis_ms: int) -> ChainInfo:
        """Return the chain that this key signs."""
        public_key = self.public_key
        return ChainInfo(
            public_key=public_key,
            period_ms=period_ms,
            genesis_ms=genesis_ms,
            group_hash=hashlib.sha256(public_key).digest(),
            beacon_id="local",
        )

    def sign(self, round_number: int) -> bytes:
        """Sign a round: a compressed G1 point, 48 bytes."""
        _check_round(round_number)
        compressed = _message(round_number).scalar_mul(self.secret).compress()
        assert isinstance(compressed, bytes)
        return compressed

    def answer(self, round_number: int) -> bytes:
        """Return a relay's answer for a round, in the JSON form of drand's relays."""
        signature = self.sign(round_number)
        randomness = hashlib.sha256(signature).hexdigest()
        fields = {"round": round_number, "randomness": randomness, "signature": signature.hex()}
        return json.dumps(fields, separators=(",", ":")).encode()
