"""What a miner shows to be admitted: an invitation from a file, or a proof of work that this machine does."""

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

from grailnode.run.key_files import KeyFileError
from protocol import limits
from protocol.errors import ProtocolError
from protocol.identity.admission import AdmissionGate, ProofOfWorkSolution, do_work, leading_zero_bits, work_digest
from roles.node.identity import Node
from roles.ports import NotFoundError

SUFFIX: Final = ".invite"
_KEPT: Final = "proof-of-work"
_WORK_MS: Final = limits.MAX_WORK_MS // 2


def prover(invitation: Path) -> Callable[[Node], Awaitable[bytes]]:
    """Gives the proof that a run's current admission policy asks for.

    Args:
        invitation: the file with the token that `grailnode admit` printed.
    """

    async def prove(node: Node) -> bytes:
        admission = node.authority.admission
        if admission.policy == "invite":
            return _invitation(invitation)
        if admission.policy == "open" and admission.credential == "work":
            return await _work(node, admission.difficulty)
        return b""

    return prove


async def check_admitted(node: Node) -> None:
    """Return if this node's run takes notice of it as a miner: by its list, or by the invitation that it holds.

    Raises:
        AdmissionError: it does not, or not any more.
        KeyFileError: the invitation is missing.
    """
    if node.authority.admission.policy != "open":  # a proof of work is done when it is needed
        now = node.clock.now()  # nothing is signed here, so the time need not be proven yet
        AdmissionGate(node.run_id, node.authority).admit(await node.announcement("miner", now + 60.0), now * 1000)


def _invitation(path: Path) -> bytes:
    try:
        return bytes.fromhex(path.read_text(encoding="ascii").strip())
    except (OSError, ValueError):
        raise KeyFileError(
            f"{path}: no invitation; this run asks for one: put what `grailnode admit` prints into this file"
        ) from None


async def _work(node: Node, difficulty: int) -> bytes:
    """A proof of work that counts for a while, done again when half of its time is over."""
    now_ms = int(node.clock.now() * 1000)
    try:
        work = ProofOfWorkSolution.from_bytes(await node.state.get(_KEPT, limits.MAX_PROOF_BYTES))
        bits = leading_zero_bits(work_digest(node.run_id, node.key.public, work))
        if bits >= difficulty and now_ms + _WORK_MS // 2 < work.expires_ms <= now_ms + limits.MAX_WORK_MS:
            return work.to_bytes()
    except (NotFoundError, ProtocolError):
        pass  # none yet, or of no use: done now
    node.telemetry.event("working", bits=difficulty)
    done: ProofOfWorkSolution = await node.run_sync(
        do_work, node.run_id, node.key.public, difficulty, now_ms + _WORK_MS
    )
    await node.state.put(_KEPT, done.to_bytes())
    return done.to_bytes()
