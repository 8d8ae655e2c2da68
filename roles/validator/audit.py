"""From a commitment to a verdict: fetch what the second round picked, open it, judge it."""

from collections.abc import Sequence

from protocol import challenge, paths
from protocol.errors import ProtocolError
from protocol.evidence import bar, window_surprise
from protocol.rollout import Commitment, Group, open_group
from protocol.run import ProofSpec
from protocol.verdict import Judgement, Reason, Verdict
from roles.node import Node
from roles.ports import StoreError
from roles.validator.docket import Case
from roles.validator.judge import Judge, rejected

_FOREIGN = (Reason.PROMPT, Reason.SKETCH, Reason.SAMPLING)
"""What a copy is caught by: as a rule its prompt, but two seeds may name one problem."""


class Auditor:
    """Audits the cases of one window.

    Args:
        node: whose store to read from.
        judge: serves the version that `audit` is given cases of.
        draw: randomness of the window's second round, which picks the groups.
        works: work digest -> miner of groups accepted lately; grows with every accepted group.
    """

    def __init__(self, node: Node, judge: Judge, draw: bytes, works: dict[bytes, bytes]) -> None:
        self._node = node
        self._judge = judge
        self._draw = draw
        self._works = works

    async def audit(self, case: Case) -> tuple[Verdict, dict[int, bytes]]:
        """Judge the picked groups of a case.

        Returns:
            The verdict, and the work digest of each rejected group that may be a copy: of a group that is accepted later in
            the window, it can only be named then.

        Raises:
            EngineError: the engine broke; there is no verdict.
        """
        commitment = case.commitment.record
        opened, judgements = await self._open(commitment, picked_groups(self._node, commitment, self._draw))
        judged = await self._judge.judge([(group, commitment.groups[group.index][0]) for group in opened])
        judged = _together(judged, self._node.run.proof)
        strange: dict[int, bytes] = {}
        for group, judgement in zip(opened, judged, strict=True):
            work = group.work_digest()
            if judgement.accepted:
                self._works.setdefault(work, commitment.miner)
            elif judgement.reason in _FOREIGN:
                strange[group.index] = work
        judgements += judged
        return verdict_on(self._node, case, sorted(judgements, key=lambda judgement: judgement.index)), strange

    def name_copies(self, verdict: Verdict, strange: dict[int, bytes]) -> Verdict:
        """The verdict with its strange groups called copies where the work is known to be another's, or done before."""
        judgements = tuple(
            judgement.model_copy(update={"reason": Reason.COPIED.value})
            if strange.get(judgement.index) in self._works
            else judgement
            for judgement in verdict.judgements
        )
        return verdict.model_copy(update={"judgements": judgements})

    async def _open(self, commitment: Commitment, picked: tuple[int, ...]) -> tuple[list[Group], list[Judgement]]:
        """The picked groups that are what was promised, and the judgements on those that are not."""
        path = paths.batch(commitment.miner, commitment.window, commitment.batch)
        groups: list[Group] = []
        judgements: list[Judgement] = []
        for index in picked:
            offset, size = commitment.extent(index)
            try:
                frame = await self._node.store.get(path, size, offset=offset, size=size)
                groups.append(open_group(frame, commitment, index))
            except StoreError:
                judgements.append(rejected(index, commitment.groups[index][0], Reason.MISSING))
            except ProtocolError:
                judgements.append(rejected(index, commitment.groups[index][0], Reason.MALFORMED))
        return groups, judgements


def _together(judgements: Sequence[Judgement], proof: ProofSpec) -> list[Judgement]:
    """The judgements, or none of them accepting where honest work would not make all the accepted ones together."""
    counts = [(item.tokens, item.sketch_misses, item.margin_misses) for item in judgements if item.accepted]
    if window_surprise(counts, proof) <= bar(proof):
        return list(judgements)
    refusal = {"reason": Reason.WINDOW.value, "rewards": (), "logprobs": b""}
    return [item.model_copy(update=refusal) if item.accepted else item for item in judgements]


def picked_groups(node: Node, commitment: Commitment, draw: bytes) -> tuple[int, ...]:
    """The group indices that the second round picks from a commitment."""
    return challenge.audited(
        node.run_id,
        commitment.window,
        draw,
        commitment.miner,
        groups=len(commitment.groups),
        share_ppm=node.run.proof.audit_ppm,
    )


def verdict_on(node: Node, case: Case, judgements: Sequence[Judgement]) -> Verdict:
    """The verdict that these judgements make."""
    commitment = case.commitment.record
    return Verdict(
        run=node.run_id,
        window=commitment.window,
        version=commitment.version,
        miner=commitment.miner,
        validator=node.key.public,
        commitment=case.commitment.digest,
        submitted=len(commitment.groups),
        judgements=tuple(judgements),
        seen_ms=int(case.seen * 1000),
    )


def condemned(node: Node, case: Case, draw: bytes, reason: Reason) -> Verdict:
    """The verdict on a case that needs no look at its groups: every picked group rejected for one reason."""
    commitment = case.commitment.record
    picked = picked_groups(node, commitment, draw)
    return verdict_on(node, case, [rejected(index, commitment.groups[index][0], reason) for index in picked])
