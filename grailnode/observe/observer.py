"""A bystander's eyes: the state of a run from public objects alone, every one of them checked (see
grailnode/observe/state.py).
"""

from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

from grailnode.observe.state import MinerRow, NetworkState, NodeRow, VersionRow, WindowRow
from protocol import limits, paths
from protocol.chain.manifest import Manifest
from protocol.chain.verifier import ChainVerifier
from protocol.errors import ExpiredError, MalformedError, ProtocolError
from protocol.identity.signing import open_signed
from protocol.judging.ledger import LedgerRow, Summary
from protocol.judging.report import ValidatorReport
from protocol.judging.verdict import Verdict
from roles.authority_updates import refresh_authority
from roles.gather import gather
from roles.node.identity import Node
from roles.participants import find_participants
from roles.ports import NotFoundError, StoreError, TooLargeError

RECENT_WINDOWS = 50
_DTYPE_BYTES = {"BF16": 2, "F16": 2, "F32": 4, "I32": 4, "I16": 2}


@dataclass
class _Miner:
    """Counts of one miner so far."""

    submitted: int = 0
    accepted: int = 0
    rejected: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True)
class OperatorKnowledge:
    """What only the operator of a network knows: names and kinds by public key, its processes, its plan."""

    names: Mapping[bytes, str] = field(default_factory=dict)
    kinds: Mapping[bytes, str] = field(default_factory=dict)
    windows_planned: int | None = None


async def newest_summarized(node: Node) -> int | None:
    """The newest window that a validator has summarized; None for none.

    Raises:
        StoreError: the store cannot be listed.
    """
    prefixes = [paths.windowed(validator, "summaries") for validator in node.authority.validators]
    recent = f"{max(0, node.window() - RECENT_WINDOWS):010d}"
    for after in (recent, ""):  # all of them are listed only where a run has ended
        found = []
        for prefix in prefixes:
            found += [item.path async for item in node.store.list(prefix, after=prefix + after if after else "")]
        windows = [window for window in map(paths.window_of, found) if window <= node.window()]
        if windows:
            return max(windows)
    return None


class Observer:
    """Reads a run's public objects, the new ones at every `refresh`.

    Args:
        node: whose store is read; nothing is written.
        first_window: windows before it are not looked at; last_window: nor those behind it, where one is given.
        known: what the operator adds.
    """

    def __init__(
        self, node: Node, first_window: int, known: OperatorKnowledge | None = None, last_window: int | None = None
    ) -> None:
        self._node = node
        self._known = known or OperatorKnowledge()
        self._chain = ChainVerifier(node.run_id, node.run, revisions=node.revisions)
        self._began = node.clock.now()
        self._next = first_window
        self._first_window = first_window
        self._last_window = last_window
        self._verdicts: dict[tuple[int, bytes], Verdict] = {}
        self._summaries: dict[tuple[int, bytes], Summary] = {}
        self._reported: dict[bytes, str] = {}
        self._names: dict[bytes, str] = {}
        self._alarms: list[str] = []
        self._unread = ""  # why storage could not be read at the last look

    async def refresh(self) -> None:
        """Look at what is new. What cannot be read now is read later; what is no good becomes an alarm, and hides
        nothing else.
        """
        self._unread = ""
        await self._leniently(self._read_chain)
        await self._leniently(self._read_names)
        now = self._node.window() if self._last_window is None else min(self._node.window(), self._last_window)
        for validator in self._node.authority.validators:
            for window in range(self._next, now + 1):
                if (window, validator) in self._summaries:
                    continue
                if not await self._leniently(partial(self._read_window, window, validator)):
                    break  # one that does not answer is asked again at the next look
        for trainer in self._node.authority.trainers:
            await self._leniently(partial(self._read_reports, trainer))
        open_for = -(-self._node.run.schedule.verdict_rounds // self._node.run.schedule.rounds)
        self._next = max(self._next, now - open_for)

    async def _leniently(self, read: Callable[[], Awaitable[None]]) -> bool:
        """Read something, whatever comes of it; whether storage answered."""
        try:
            await read()
        except (NotFoundError, TooLargeError):
            return True
        except StoreError as error:
            self._unread = self._unread or f"storage cannot be read now: {error}"
            return False
        except ProtocolError as error:
            self._alarm(str(error))
        return True

    def _alarm(self, line: str) -> None:
        if line not in self._alarms:
            self._alarms.append(line)

    async def _read_names(self) -> None:
        for announcement in await find_participants(self._node, "miner"):
            self._names[announcement.key] = announcement.name

    async def _read_chain(self) -> None:
        await refresh_authority(self._node)
        node, trainer = self._node, self._node.authority.trainers[0]
        data = await node.store.get(paths.head(trainer), limits.MAX_HEAD_BYTES + limits.MAX_ENVELOPE_BYTES)
        try:
            self._chain.accept_head(data, node.clock.now())
        except ExpiredError as error:
            self._alarm(f"{error}; this is how the run was left")
            self._chain.accept_head(data, node.clock.now(), even_expired=True)
        for version, digest in self._chain.missing():
            path = paths.manifest(trainer, version, digest)
            self._chain.accept_manifest(version, await node.store.get(path, limits.MAX_RECORD_BYTES))

    async def _read_window(self, window: int, validator: bytes) -> None:
        summary = await self._read_summary(window, validator)
        rows = [row for row in summary.rows if row.verdict and (window, row.miner) not in self._verdicts]
        for verdict in await gather(partial(self._read_verdict, validator, window), rows):
            self._verdicts[window, verdict.miner] = verdict
        self._summaries[window, validator] = summary
        for alarm in summary.alarms:
            self._alarm(alarm)

    async def _read_verdict(self, validator: bytes, window: int, row: LedgerRow) -> Verdict:
        path = paths.verdict(validator, window, row.miner)
        data = await self._node.store.get(path, self._node.run.verdict_bytes + limits.MAX_ENVELOPE_BYTES)
        signed = open_signed(data, Verdict, [validator])
        if signed.digest != row.verdict:
            raise ProtocolError("not the verdict that its summary lists", path)
        return signed.record

    async def _read_summary(self, window: int, validator: bytes) -> Summary:
        path = paths.summary(validator, window)
        data = await self._node.store.get(path, Summary.max_bytes + limits.MAX_ENVELOPE_BYTES)
        record = open_signed(data, Summary, [validator]).record
        if (record.run, record.window, record.validator) != (self._node.run_id, window, validator):
            raise MalformedError("of another run, window or validator", path)
        return record

    async def _read_reports(self, trainer: bytes) -> None:
        """What a trainer says of the validators. One that is no good is passed over for good: they are for people to
        see.
        """
        prefix = paths.windowed(trainer, "reports")
        async for item in self._node.store.list(prefix, after=self._reported.get(trainer, "")):
            try:
                await self._read_report(trainer, item.path)
            except (ProtocolError, NotFoundError, TooLargeError) as error:
                self._alarm(str(error))
            self._reported[trainer] = item.path

    async def _read_report(self, trainer: bytes, path: str) -> None:
        data = await self._node.store.get(path, ValidatorReport.max_bytes + limits.MAX_ENVELOPE_BYTES)
        report = open_signed(data, ValidatorReport, [trainer]).record
        if (report.run, report.trainer, paths.report(trainer, report.window)) != (self._node.run_id, trainer, path):
            raise MalformedError("of another run, window or trainer", path)
        for found in report.disagreements:
            self._alarm(
                f"window {report.window}: {len(found.accepting)} of {len(found.accepting) + len(found.rejecting)} "
                f"validators accept group {found.index} of miner {found.miner.hex()[:8]}"
            )
        for deceived in report.deceptions:
            said = "accepted a false" if deceived.accepted else "rejected a true"
            self._alarm(f"window {report.window}: validator {deceived.validator.hex()[:8]} {said} canary")

    def state(self, nodes: tuple[NodeRow, ...] = ()) -> NetworkState:
        """What is known now."""
        node, run = self._node, self._node.run
        now = node.clock.now()
        window = node.window()
        manifests = tuple(self._chain.manifests())
        seconds = run.schedule.rounds * run.beacon.period_ms / 1000
        return NetworkState(
            run_id=node.run_id.hex(),
            run_name=run.name,
            seconds=now - self._began,
            window=window if window >= 0 else None,
            windows_planned=self._known.windows_planned,
            window_seconds=seconds,
            window_elapsed=max(0.0, now - run.opening_time(window)) if window >= 0 else 0.0,
            full_bytes=full_bytes(manifests[-1]) if manifests else 0,
            versions=tuple(_version_row(manifest) for manifest in manifests),
            windows=self._window_rows(),
            miners=self._miner_rows(),
            nodes=nodes,
            tokens_generated=sum(j.tokens for verdict in self._verdicts.values() for j in verdict.judgements),
            tokens_verified=sum(
                j.tokens for verdict in self._verdicts.values() for j in verdict.judgements if j.accepted
            ),
            check_rate=self._check_rate(),
            alarms=(*self._alarms, *([self._unread] if self._unread else [])),
        )

    def weights_digest(self) -> bytes:
        """The digest of the newest version's weights, as the trainer signed it; empty before the first."""
        manifests = list(self._chain.manifests())
        return manifests[-1].weights if manifests else b""

    def _check_rate(self) -> float:
        """Return the completion tokens that a validator checks in a second of checking; 0 before the first summary."""
        tokens = sum(summary.verified_tokens for summary in self._summaries.values())
        milliseconds = sum(summary.verify_ms for summary in self._summaries.values())
        return 1000.0 * tokens / milliseconds if milliseconds else 0.0

    def _first_summaries(self) -> dict[int, Summary]:
        """One summary for each window: the first validator's that gave one."""
        found: dict[int, Summary] = {}
        for (window, _), summary in self._summaries.items():
            found.setdefault(window, summary)
        return found

    def _window_rows(self) -> tuple[WindowRow, ...]:
        rows = []
        for window, summary in sorted(self._first_summaries().items()):
            judgements = [j for (w, _), verdict in self._verdicts.items() if w == window for j in verdict.judgements]
            rewards = [reward for judgement in judgements for reward in judgement.rewards]
            accepted = sum(judgement.accepted for judgement in judgements)
            evaluation = summary.evaluation
            rows.append(
                WindowRow(
                    window=window,
                    version=summary.version,
                    accepted=accepted,
                    rejected=len(judgements) - accepted,
                    reward=sum(rewards) / len(rewards) if rewards else None,
                    pass_at_1=evaluation.solved / evaluation.problems if evaluation else None,
                )
            )
        return tuple(rows)

    def _miner_rows(self) -> tuple[MinerRow, ...]:
        miners: dict[bytes, _Miner] = {}
        for (_, key), verdict in sorted(self._verdicts.items()):
            miner = miners.setdefault(key, _Miner())
            miner.submitted += verdict.submitted
            miner.accepted += sum(judgement.accepted for judgement in verdict.judgements)
            miner.rejected.update(judgement.reason for judgement in verdict.judgements if judgement.reason)
        firsts = self._first_summaries()
        newest = firsts[max(firsts)] if firsts else None
        scores = dict(newest.scores) if newest else {}
        rows = [
            MinerRow(
                key=key.hex(),
                name=self._known.names.get(key) or self._names.get(key) or key.hex()[:8],
                kind=self._known.kinds.get(key, "unknown"),
                submitted=miner.submitted,
                accepted=miner.accepted,
                rejected=dict(sorted(miner.rejected.items())),
                score=scores.get(key, 0.0),
            )
            for key, miner in miners.items()
        ]
        return tuple(sorted(rows, key=lambda row: row.name))


def full_bytes(manifest: Manifest) -> int:
    """Size of a full checkpoint: the tensors' bytes."""
    total = 0
    for _, dtype, shape in manifest.tensors:
        elements = 1
        for size in shape:
            elements *= size
        total += elements * _DTYPE_BYTES.get(dtype, 1)
    return total


def _version_row(manifest: Manifest) -> VersionRow:
    return VersionRow(
        version=manifest.version,
        optimizer_step=manifest.optimizer_step,
        first_window=manifest.first_window,
        patch_bytes=manifest.patch.object.size if manifest.patch else None,
        anchor_bytes=sum(ref.size for ref in manifest.anchor) if manifest.anchor else None,
        changed=manifest.patch.changed if manifest.patch else 0,
        total=manifest.elements,
    )
