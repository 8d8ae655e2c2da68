"""protocol.beacon with rounds of drand's quicknet and of a local chain: verification, refusals, and due times."""

import hashlib
import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from protocol import limits
from protocol.beacon import ChainInfo, LocalKey, open_round, parse_round, quicknet, verify_round
from protocol.encoding import pack
from protocol.errors import LimitError, MalformedError, ProtocolError, SignatureError

ROUND = 657413
SIGNATURE = bytes.fromhex(
    "b713718a38ae728dfd477991af2822e08d2f305e47718cef9f7848ce4050e7be41076862b98fad56e91a6b85b89cd97b"
)
RANDOMNESS = bytes.fromhex("fc1873a13f3545aeade8401532ef5519920652eee6b0d2b19ca12643b87b3587")
KEY = LocalKey.from_seed(b"a seed for tests alone")
LOCAL = KEY.chain(250, 1_700_000_000_123)

# x = 4 is on the curve y^2 = x^3 + 4 over the field, but not in the subgroup of prime order
OUTSIDE_THE_SUBGROUP = bytes([0x80, *bytes(46), 4])


def answer(**changes: Any) -> bytes:
    fields: dict[str, Any] = {"round": ROUND, "signature": SIGNATURE.hex(), "randomness": RANDOMNESS.hex()}
    fields.update(changes)
    return json.dumps({name: value for name, value in fields.items() if value is not ...}).encode()


def verifies_by_py_ecc(public_key: bytes, number: int, signature: bytes) -> bool:
    """Return whether e(signature, G2) == e(H(round), key), computed by py_ecc."""
    from py_ecc.bls.hash_to_curve import hash_to_G1
    from py_ecc.bls.point_compression import decompress_G1, decompress_G2
    from py_ecc.bls.typing import G1Compressed, G2Compressed
    from py_ecc.optimized_bls12_381.optimized_curve import G2
    from py_ecc.optimized_bls12_381.optimized_pairing import pairing

    message = hashlib.sha256(number.to_bytes(8, "big")).digest()
    sha256: Any = hashlib.sha256  # its annotation names the digest where it takes the function
    point = hash_to_G1(message, b"BLS_SIG_BLS12381G1_XMD:SHA-256_SSWU_RO_NUL_", sha256)
    halves = (int.from_bytes(public_key[:48], "big"), int.from_bytes(public_key[48:], "big"))
    right_side = pairing(decompress_G2(G2Compressed(halves)), point)
    return pairing(G2, decompress_G1(G1Compressed(int.from_bytes(signature, "big")))) == right_side


class TestQuicknet:
    def test_the_vector_verifies(self):
        assert open_round(quicknet, ROUND, answer()) == RANDOMNESS

    def test_its_chain_hash_is_drands(self):
        assert quicknet.chain_hash.hex() == "52db9ba70e0cc0f6eaf7803dd07447a1f5477735fd3f661792ba94600c84e971"

    def test_the_relays_randomness_is_not_read(self):
        for randomness in [..., "00" * 32, 7, None]:
            assert open_round(quicknet, ROUND, answer(randomness=randomness)) == RANDOMNESS

    @pytest.mark.slow
    def test_another_library_agrees(self):
        assert verifies_by_py_ecc(quicknet.public_key, ROUND, SIGNATURE)
        assert not verifies_by_py_ecc(quicknet.public_key, ROUND + 1, SIGNATURE)


class TestLocalChain:
    def test_the_rounds_of_a_local_chain_verify(self):
        for number in (1, 2, 1000, limits.MAX_BEACON_ROUND):
            data = KEY.answer(number)
            assert open_round(LOCAL, number, data) == hashlib.sha256(KEY.sign(number)).digest()
            assert json.loads(data)["randomness"] == open_round(LOCAL, number, data).hex()

    def test_another_library_agrees(self):
        assert verifies_by_py_ecc(LOCAL.public_key, 7, KEY.sign(7))

    def test_one_seed_is_one_key(self):
        assert LocalKey.from_seed(b"a seed for tests alone") == KEY != LocalKey.from_seed(b"another seed, for tests")
        assert LOCAL.public_key == KEY.public_key

    def test_the_secret_is_not_printed(self):
        assert str(KEY.secret) not in repr(KEY)

    def test_invalid_secrets_are_refused(self):
        for secret in (0, -1, 1 << 255):
            with pytest.raises(ValueError, match="secret"):
                LocalKey(secret)
        with pytest.raises(ValueError, match="16 bytes"):
            LocalKey.from_seed(b"short")

    def test_different_chains_have_different_hashes(self):
        chains = [
            LOCAL,
            KEY.chain(251, 1_700_000_000_123),
            KEY.chain(250, 1_700_000_000_124),
            LOCAL.model_copy(update={"beacon_id": "other"}),
            LOCAL.model_copy(update={"beacon_id": "default"}),
            KEY.chain(1000, 1_700_000_000_000),
            KEY.chain(2000, 1_700_000_000_000),
            LocalKey.from_seed(b"another seed, for tests").chain(250, 1_700_000_000_123),
        ]
        assert len({chain.chain_hash for chain in chains}) == len(chains)


class TestRefusals:
    @pytest.mark.parametrize(
        "signature",
        [
            SIGNATURE[:-1] + bytes([SIGNATURE[-1] ^ 1]),
            bytes([SIGNATURE[0] ^ 0x20]) + SIGNATURE[1:],  # the point's negative
            bytes(48),
            bytes([0xC0, *bytes(47)]),  # infinity
            bytes([0xE0, *bytes(47)]),
            bytes([0xC0, *bytes(46), 1]),
            b"\xff" * 48,
            bytes([SIGNATURE[0] & 0x7F]) + SIGNATURE[1:],  # says it is not compressed
            OUTSIDE_THE_SUBGROUP,
            SIGNATURE[:-1],
            SIGNATURE + b"\0",
            b"",
            KEY.sign(ROUND),
        ],
        ids=lambda signature: signature.hex()[:6] + f"-{len(signature)}",
    )
    def test_false_signatures(self, signature):
        with pytest.raises(SignatureError, match="beacon round 657413"):
            verify_round(quicknet, ROUND, signature)

    def test_a_true_signature_of_another_round(self):
        with pytest.raises(SignatureError):
            verify_round(quicknet, ROUND + 1, SIGNATURE)
        with pytest.raises(MalformedError, match="another round"):
            open_round(quicknet, ROUND + 1, answer())

    @pytest.mark.parametrize(
        "data",
        [
            *(answer(round=value) for value in (..., str(ROUND), float(ROUND), True, None)),
            *(answer(signature=value) for value in (..., 7, SIGNATURE.hex().upper(), SIGNATURE.hex() + "\n")),
            *(answer(signature=value) for value in (SIGNATURE.hex()[:-2] + " 7b", "0x" + SIGNATURE.hex()[2:])),
            *(b"", b"null", b"[]", b"657413", b"{", b"\xff\xfe"),
            answer()[:-1] + b',"round":657413}',
            b'{"round":' + b"9" * 4000 + b"}",
            b'{"round":1e400}',
        ],
    )
    def test_what_is_no_answer_or_has_fields_in_another_form_is_refused(self, data):
        with pytest.raises(MalformedError):
            parse_round(data, ROUND)

    def test_an_answer_has_a_maximum_size(self):
        with pytest.raises(LimitError):
            parse_round(answer(padding="x" * limits.MAX_BEACON_BYTES), ROUND)
        for data in (b"[" * limits.MAX_BEACON_BYTES, b'{"a":' * 800):
            with pytest.raises(MalformedError):
                parse_round(data, ROUND)

    @given(st.binary(max_size=200) | st.text(max_size=100).map(str.encode))
    def test_any_bytes_raise_a_protocol_error(self, data):
        with pytest.raises(ProtocolError):
            open_round(quicknet, ROUND, data)

    @given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(max_size=10), st.lists, max_leaves=5))
    def test_any_json_in_a_field_raises_a_protocol_error(self, value):
        for field in ("round", "signature"):
            with pytest.raises(ProtocolError):
                open_round(quicknet, ROUND, answer(**{field: value}))

    def test_invalid_round_numbers_raise_a_value_error(self):
        for number in (0, -1, limits.MAX_BEACON_ROUND + 1):
            with pytest.raises(ValueError, match="beacon rounds"):
                verify_round(quicknet, number, SIGNATURE)
            with pytest.raises(ValueError, match="beacon rounds"):
                quicknet.path(number)


class TestChainInfo:
    @pytest.mark.parametrize(
        "changes",
        [
            {"public_key": quicknet.public_key[:-1]},
            {"public_key": bytes(96)},
            {"public_key": bytes([0xC0, *bytes(95)])},
            {"public_key": quicknet.public_key[:-1] + b"\0"},
            {"period_ms": 0},
            {"period_ms": limits.MAX_BEACON_PERIOD_MS + 1},
            {"genesis_ms": limits.MAX_TIME_MS + 1},
            {"beacon_id": "a/b"},
            {"beacon_id": "quicknet\n"},
        ],
    )
    def test_descriptions_that_are_refused(self, changes):
        with pytest.raises(MalformedError):
            ChainInfo.from_bytes(pack({**quicknet.model_dump(), **changes}))


class TestTime:
    def test_times_of_quicknet_rounds(self):
        assert quicknet.round_time(1) == 1692803367.0
        assert quicknet.round_time(ROUND) == 1692803367.0 + 3 * (ROUND - 1)
        assert quicknet.round_at(1692803366.9) == 0
        assert quicknet.round_at(1692803367.0) == 1
        assert quicknet.round_at(1692803369.999) == 1

    @given(st.integers(1, limits.MAX_BEACON_PERIOD_MS), st.integers(0, limits.MAX_TIME_MS // 2), st.integers(1, 10**6))
    @example(86399978, 1, 99429)  # in 2242 a float's last bit is worth two microseconds
    def test_a_round_is_the_newest_exactly_when_it_is_due(self, period_ms, genesis_ms, number):
        chain = quicknet.model_copy(update={"period_ms": period_ms, "genesis_ms": genesis_ms})
        if genesis_ms + number * period_ms > limits.MAX_TIME_MS:
            return
        assert chain.round_at(chain.round_time(number)) == number
        assert chain.round_at(chain.round_time(number) - 0.0005) == number - 1
