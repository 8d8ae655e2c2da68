"""The golden vectors of docs/spec/authority.md: revisions of an authority with two roots, and proofs of work."""

from typing import Any

from protocol.encoding import content_digest
from protocol.identity.admission import ProofOfWorkSolution, do_work, leading_zero_bits, work_digest
from protocol.identity.signing import sign
from tests.support.builders import samples
from tests.support.builders.samples import MINER, ROOT, RUN_ID, TRAINER

SECOND, THIRD = samples.key("second root"), samples.key("third root")
OLD = {"roots": (ROOT.public, SECOND.public), "root_threshold": 2}
NEW = {"roots": (SECOND.public, THIRD.public), "root_threshold": 2}


def page() -> list[dict[str, Any]]:
    """Build the cases. A case's `revision` is read at the path of revision `number`, after those in `previous`."""
    first = samples.revision(authority=samples.authority(**OLD, revoked=(MINER.public,)))
    name = content_digest(first.to_bytes())
    second = samples.revision(2, name, authority=samples.authority(**NEW), note="new roots")
    one = sign(first, ROOT, SECOND).hex()

    def case(title: str, data: bytes, error: str | None = None, number: int = 1, *previous: str) -> dict[str, Any]:
        return {"name": title, "number": number, "previous": previous, "revision": data.hex(), "error": error}

    twin = first.model_copy(update={"note": "another"})
    other_link = second.model_copy(update={"previous": RUN_ID})
    other_run = first.model_copy(update={"run": samples.digest("other")})
    without = ProofOfWorkSolution(expires_ms=99, nonce=0)
    work = do_work(RUN_ID, MINER.public, 8, 99)
    return [
        {"name": "initial authority", "run_id": RUN_ID.hex(), "authority": samples.authority(**OLD).to_bytes().hex()},
        case("the first", bytes.fromhex(one)),
        case("by one root of two", sign(first, ROOT), "SignatureError"),
        case("by a root and another key", sign(first, ROOT, TRAINER), "SignatureError"),
        case("by both roots and another key", sign(first, ROOT, SECOND, TRAINER), "SignatureError"),
        case("new roots, signed by old and new", sign(second, ROOT, SECOND, THIRD), None, 2, one),
        case("new roots that did not sign", sign(second, ROOT, SECOND), "SignatureError", 2, one),
        case("new roots that signed alone", sign(second, SECOND, THIRD), "SignatureError", 2, one),
        case("a number too high", sign(second, ROOT, SECOND, THIRD), "GapError"),
        case("a number too low", bytes.fromhex(one), "RollbackError", 2, one),
        case("the same again", bytes.fromhex(one), None, 1, one),
        case("another of the same number", sign(twin, ROOT, SECOND), "ForkError", 1, one),
        case("that continues another", sign(other_link, ROOT, SECOND, THIRD), "ForkError", 2, one),
        case("of another run", sign(other_run, ROOT, SECOND), "ChainError"),
        {
            "name": "work",
            "run": RUN_ID.hex(),
            "key": MINER.public.hex(),
            "work": work.to_bytes().hex(),
            "digest": work_digest(RUN_ID, MINER.public, work).hex(),
            "bits": leading_zero_bits(work_digest(RUN_ID, MINER.public, work)),
            "bits without": leading_zero_bits(work_digest(RUN_ID, MINER.public, without)),
        },
    ]
