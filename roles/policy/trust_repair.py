"""Rebuilds the trust of a node that follows a chain: from the trainer's signed head, and never behind what the node has
used (docs/guide/operate.md).
"""

from protocol.errors import ChainError
from roles.node.identity import Node
from roles.policy.follower import TRUST_PATH, Follower
from roles.ports import RepairError


async def repair_trust(node: Node, used_version: int, used_weights: bytes | None = None) -> str:
    """Put the trust in the chain that storage shows into a node's state, which has none; return a line about it.

    Args:
        used_version: the newest version that this node is known to have used; -1 for none.
        used_weights: the digest of its weights, if that is known.

    Raises:
        RepairError: storage shows an older chain, or another one.
        StoreError, ProtocolError: storage shows no chain that can be followed.
    """
    follower = await Follower.open(node)
    await follower.refresh()
    trust = follower.chain.trust
    if trust is None or trust.version < used_version:
        version = trust.version if trust is not None else -1
        raise RepairError(
            f"{TRUST_PATH}: storage shows version {version}, but this node has used version {used_version}; trust must "
            "not go back, so try again when the trainer's storage is up to date"
        )
    if used_weights is not None:
        try:
            manifest = follower.chain.manifest(used_version)
        except ChainError:
            pass  # it is older than what the head lists
        else:
            if manifest.weights != used_weights:
                raise RepairError(f"{TRUST_PATH}: storage shows another chain than the one that this node has used")
    basis = f"at least version {used_version}, which this node has used" if used_version >= 0 else "as a new node does"
    return f"{TRUST_PATH}: version {trust.version}, which storage shows now ({basis})"
