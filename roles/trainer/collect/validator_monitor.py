"""The trainer's eye on the validators: canaries that catch those who accept anything, and contradictions told to
everybody.
"""

import itertools
from collections.abc import Mapping

from protocol import paths
from protocol.judging.ledger import LedgerRow
from protocol.judging.report import CanaryFailure, Disagreement, ValidatorReport, canary_key, is_false
from protocol.judging.verdict import Reason, Verdict
from protocol.limits import MAX_GROUPS
from roles.node.identity import Node

_DISTRUSTED = "distrusted/"
_MOST_KEYS = 1 << 17  # of validators in a report's disagreements: 4 MiB of the 8 that a record may have
_TOGETHER = (Reason.WINDOW, Reason.HISTORY)


class ValidatorMonitor:
    """Compares what validators say of one miner's window, and of the trainer's own canaries.

    Args:
        canaries: how many canaries this trainer's node has run under keys of its own so far.
    """

    def __init__(self, node: Node, canaries: int) -> None:
        self._node = node
        self.canaries = {canary_key(node.key, number).public for number in range(canaries)}
        self.distrusted: set[bytes] = set()
        """Validators whose verdicts do not count: they accepted what was false on purpose."""
        self._examined: dict[int, set[tuple[bytes, bytes]]] = {}
        self._compared: dict[int, set[bytes]] = {}
        self._disagreements: dict[int, list[Disagreement]] = {}
        self._deceptions: dict[int, list[CanaryFailure]] = {}

    async def open(self) -> None:
        """Remember who was distrusted before a restart.

        Raises:
            StoreError: the state cannot be read.
        """
        async for item in self._node.state.list(_DISTRUSTED):
            self.distrusted.add(paths.key_at_end(item.path))

    async def examine(self, window: int, canary: bytes, verdicts: Mapping[bytes, Verdict]) -> None:
        """Hold what validators say of a canary against what is true, each once.

        Raises:
            StoreError: the state cannot be written; a deceiver is distrusted all the same, and examined again.
        """
        done = self._examined.setdefault(window, set())
        for validator, verdict in sorted(verdicts.items()):
            if (canary, validator) in done:
                continue
            found = self._deceptions_of(window, validator, verdict)
            if any(item.accepted for item in found):
                self.distrusted.add(validator)
                await self._node.state.put(_DISTRUSTED + validator.hex(), verdict.to_bytes())
            done.add((canary, validator))
            self._deceptions.setdefault(window, []).extend(found)
            for item in found:
                self._node.telemetry.event(
                    "validator-deceived",
                    window=window,
                    validator=validator.hex(),
                    index=item.index,
                    accepted=item.accepted,
                    verdict=LedgerRow.of(verdict).verdict.hex(),
                )

    def _deceptions_of(self, window: int, validator: bytes, verdict: Verdict) -> list[CanaryFailure]:
        false = {item.index for item in verdict.judgements if is_false(self._node.key, window, item.index)}
        return [
            CanaryFailure(validator=validator, canary=verdict.miner, index=item.index, accepted=item.accepted)
            for item in verdict.judgements
            if item.accepted == (item.index in false)
            and not (false and item.reason in _TOGETHER)  # true, and held together with the false ones
        ]

    def compare(self, window: int, miner: bytes, verdicts: Mapping[bytes, Verdict]) -> None:
        """Take notice, once, of where all verdicts (by validator) on a miner's window contradict each other."""
        if miner in self._compared.setdefault(window, set()):
            return
        self._compared[window].add(miner)
        said: dict[tuple[int, bytes], tuple[list[bytes], list[bytes]]] = {}
        for validator, verdict in sorted(verdicts.items()):
            for judgement in verdict.judgements:
                accepting, rejecting = said.setdefault((judgement.index, judgement.digest), ([], []))
                (accepting if judgement.accepted else rejecting).append(validator)
        for (index, digest), (accepting, rejecting) in sorted(said.items()):
            if accepting and rejecting:
                found = Disagreement(
                    miner=miner, index=index, digest=digest, accepting=tuple(accepting), rejecting=tuple(rejecting)
                )
                self._disagreements.setdefault(window, []).append(found)
                self._node.telemetry.event(
                    "validators-disagree",
                    window=window,
                    miner=miner.hex()[:8],
                    index=index,
                    accepting=len(accepting),
                    rejecting=len(rejecting),
                )

    def report(self, window: int) -> ValidatorReport | None:
        """What there is to say of a window that is over, as much as a report holds; None where there is nothing."""
        node = self._node
        self._examined.pop(window, None)
        self._compared.pop(window, None)
        disagreements, deceptions = self._disagreements.pop(window, []), self._deceptions.pop(window, [])
        keys = itertools.accumulate(len(item.accepting) + len(item.rejecting) for item in disagreements)
        told = [item for item, sum_of_keys in zip(disagreements, keys, strict=True) if sum_of_keys <= _MOST_KEYS]
        told, caught = told[:MAX_GROUPS], deceptions[:MAX_GROUPS]
        if len(told) < len(disagreements) or len(caught) < len(deceptions):
            error = f"of {len(disagreements)} disagreements and {len(deceptions)} deceptions it names {len(told)} and {len(caught)}"
            node.telemetry.event("report-cut", window=window, error=error)
        if not disagreements and not deceptions:
            return None
        return ValidatorReport(
            run=node.run_id,
            window=window,
            trainer=node.key.public,
            disagreements=tuple(told),
            deceptions=tuple(caught),
        )
