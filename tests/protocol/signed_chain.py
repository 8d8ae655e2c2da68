"""A trainer that signs chains of manifests and heads, and a verifier that follows them."""

from dataclasses import dataclass, field
from typing import Any

from protocol.chain.manifest import Manifest
from protocol.chain.verifier import ChainVerifier, Plan, Trust
from protocol.encoding import content_digest
from protocol.identity.signing import SigningKey, sign
from tests.support.builders import samples
from tests.support.builders.samples import RUN_ID, TRAINER

NOW = 1000.0
"""Seconds since the Unix epoch at which heads are accepted."""


@dataclass
class Trainer:
    """A trainer that signs any versions, valid or not."""

    key: SigningKey = TRAINER
    manifests: list[Manifest] = field(default_factory=list)

    def add(self, **changes: Any) -> "Trainer":
        """Add a manifest with changes, and return the trainer."""
        version = len(self.manifests)
        previous = content_digest(self.manifests[-1].to_bytes()) if self.manifests else b""
        self.manifests.append(samples.manifest(version, previous, **changes))
        return self

    def data(self, version: int) -> bytes:
        return sign(self.manifests[version], self.key)

    def head(self, newest: int | None = None, base: int = 0, **changes: Any) -> bytes:
        """Return a signed head from a base up to a version, with some fields changed."""
        manifests = self.manifests[base : len(self.manifests) if newest is None else newest + 1]
        fields: dict[str, Any] = {
            "manifests": tuple(content_digest(manifest.to_bytes()) for manifest in manifests),
            "base": base,
            "anchors": (base,),
            "oldest_patch": base + 1,
        }
        return sign(samples.head(**(fields | changes)), self.key)


def chain(versions: int) -> Trainer:
    """Return a trainer with a valid chain of versions."""
    trainer = Trainer()
    for _ in range(versions):
        trainer.add()
    return trainer


def verifier(trust: Trust | None = None) -> ChainVerifier:
    return ChainVerifier(RUN_ID, samples.run_manifest(), trust)


def follow(verifier: ChainVerifier, trainer: Trainer, head: bytes | None = None) -> ChainVerifier:
    """Let a verifier accept a head and all manifests that it lacks, and return it."""
    verifier.accept_head(trainer.head() if head is None else head, NOW)
    for version, _ in verifier.missing_manifests():
        verifier.accept_manifest(version, trainer.data(version))
    return verifier


def steps(plan: Plan) -> tuple[int | None, list[int]]:
    """Return the version of a plan's anchor, and the versions of its patches."""
    return plan.anchor.version if plan.anchor else None, [manifest.version for manifest in plan.patches]
