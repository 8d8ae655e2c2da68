"""The credential with which a miner asks to be admitted: an invitation from a file, or a proof of work."""

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

from grailnode import UserError
from protocol import limits
from protocol.errors import ProtocolError
from protocol.identity.admission import AdmissionGate, ProofOfWorkSolution, do_work, leading_zero_bits, work_digest
from roles.node.identity import Node
from roles.ports import NotFoundError, StateError

SUFFIX: Final = ".invite"
"""Of an invitation's file, beside the keys."""

_STATE_PATH: Final = "proof-of-work"
_WORK_MS: Final = limits.MAX_WORK_MS // 2


def make_credential_source(invitation_file: Path) -> Callable[[Node], Awaitable[bytes]]:
    """Return a function that computes the credential which the run's current admission policy asks for.

    The invitation, the token that `grailnode admit` printed, is read only where the policy asks for it.
    """

    async def credential(node: Node) -> bytes:
        admission = node.authority.admission
        if admission.policy == "invite":
            try:
                return bytes.fromhex(invitation_file.read_text(encoding="ascii").strip())
            except (OSError, ValueError):
                raise UserError(
                    f"{invitation_file}: no invitation; this run asks for one: put what `grailnode admit` prints into "
                    "this file"
                ) from None
        if admission.policy == "open" and admission.credential == "work":
            return await _proof_of_work(node, admission.difficulty)
        return b""

    return credential


async def check_admitted(node: Node) -> None:
    """Check that this node's run admits it as a miner, by its list of miners or by the node's invitation."""
    if node.authority.admission.policy != "open":  # a proof of work is computed when an announcement needs it
        now = node.clock.now()  # nothing is signed for others here, so the time need not be proven yet
        AdmissionGate(node.run_id, node.authority).admit(await node.announcement("miner", now + 60.0), now * 1000)


async def _proof_of_work(node: Node, difficulty: int) -> bytes:
    """Return a proof of work of at least `difficulty` leading zero bits.

    A solution is kept in the node's state, and computed anew after half of its lifetime.
    """
    now_ms = int(node.clock.now() * 1000)
    try:
        solution = ProofOfWorkSolution.from_bytes(await node.state.get(_STATE_PATH, limits.MAX_CREDENTIAL_BYTES))
        bits = leading_zero_bits(work_digest(node.run_id, node.key.public, solution))
        if bits >= difficulty and now_ms + _WORK_MS // 2 < solution.expires_ms <= now_ms + limits.MAX_WORK_MS:
            return solution.to_bytes()
    except (NotFoundError, StateError, ProtocolError):
        pass  # no solution in the state, or one that is damaged
    node.telemetry.event("proof-of-work", bits=difficulty)
    new: ProofOfWorkSolution = await node.run_sync(do_work, node.run_id, node.key.public, difficulty, now_ms + _WORK_MS)
    await node.state.put(_STATE_PATH, new.to_bytes())
    return new.to_bytes()
