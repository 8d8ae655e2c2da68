"""Reads the state of a run (grailnode/observe/state.py) from public objects alone, and checks each of them."""

from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from grailnode.observe.chain_check import read_chain
from grailnode.observe.state import STORAGE_ALARM, HeadRow, MinerKind, NetworkState, NodeRow, StageRow, VersionRow
from grailnode.observe.window_history import MOST_WINDOWS, RoundHistory, WindowHistory
from protocol import paths
from protocol.chain.manifest import Head, Manifest
from protocol.chain.verifier import ChainVerifier
from protocol.errors import ProtocolError
from protocol.identity.participant import Announcement
from protocol.judging.ledger import LedgerRow, Summary
from protocol.judging.report import ValidatorReport
from protocol.judging.verdict import Verdict
from roles.authority_updates import refresh_authority
from roles.gather import answer_of, gather
from roles.node.identity import Node
from roles.participants import find_participants
from roles.ports import NotFoundError, StoreError, TooLargeError
from roles.records import FOREIGN, fetch_envelope, fetch_record

RECENT_WINDOWS = 50
_MOST_ALARMS: Final = 200
_LOOKS_OF_AN_ENDED_RUN: Final = 60  # after so many the last window is asked for again
_LISTING_SECONDS: Final = 30.0  # for a validator's summaries
_SUMMARY_SECONDS: Final = 5.0  # for one of them
_VALIDATOR_SECONDS: Final = 60.0  # for all that is new of a validator; the rest is read at the next refresh


@dataclass(frozen=True)
class OperatorKnowledge:
    """Facts that only the operator of a network knows: names and kinds by public key, and the number of windows."""

    names: Mapping[bytes, str] = field(default_factory=dict)
    kinds: Mapping[bytes, MinerKind] = field(default_factory=dict)
    windows_planned: int | None = None


async def newest_summarized(node: Node) -> int | None:
    """Return the newest window that a validator has summarized; None if there is none."""
    recent = f"{max(0, node.window() - RECENT_WINDOWS):010d}"
    for after in (recent, ""):  # all of them are listed only if the run ended long ago
        windows: list[int] = []
        failures: list[StoreError] = []
        for validator in node.authority.validators:
            try:
                windows += await answer_of(partial(_summarized, node, validator, after), _LISTING_SECONDS)
            except StoreError as error:
                failures.append(error)
        if windows:
            return max(windows)
        if len(failures) == len(node.authority.validators):
            raise failures[0]
    return None


async def observe_newest(node: Node) -> "Observer":
    """Return an observer that has read the newest judged windows; it says itself what cannot be read."""
    observer = Observer(node, max(0, node.window() - RECENT_WINDOWS))
    await observer.follow()
    return observer


async def _summarized(node: Node, validator: bytes, after: str) -> list[int]:
    prefix = paths.kind_prefix(validator, "summaries")
    listed = [item.path async for item in node.store.list(prefix, after=prefix + after if after else "")]
    return [window for window in map(paths.window_of, listed) if window <= node.window()]


class Observer:
    """Reads a run's public objects, the new ones at every `refresh`, from a node's store; nothing is written. Only
    windows from the first to the last one are read, by default up to the current one.
    """

    def __init__(
        self, node: Node, first_window: int, operator: OperatorKnowledge | None = None, last_window: int | None = None
    ) -> None:
        self._node = node
        self._operator = operator or OperatorKnowledge()
        self._chain = ChainVerifier(node.run_id, node.run, revisions=node.revisions)
        self._started_at = node.clock.now()
        self._next_window = first_window
        self._oldest = first_window
        self.last_window = last_window
        self._history = WindowHistory(node.run.evaluation.pass_at, node.authority.quorum)
        self._last_report: dict[bytes, str] = {}
        self._names: dict[bytes, str] = {}
        self._names_window: int | None = None  # in which they were read,
        self._named: set[bytes] = set()  # of these keys
        self._silent: list[str] = []
        self._rounds = RoundHistory(node)
        self._alarms: deque[str] = deque(maxlen=_MOST_ALARMS)
        self._validator_alarms: deque[str] = deque(maxlen=_MOST_ALARMS)  # apart: one of them may have too many
        self._storage_alarm = ""  # why storage could not be read at the last refresh
        self._read_at: float | None = None
        self._looks = 0

    async def follow(self) -> None:
        """Refresh up to the newest window that a validator has summarized. Of a run that has ended it is read now and
        then: a validator that did not answer may have the last one.
        """
        self._looks += 1
        if self.last_window is None or not self._has_ended() or self._looks % _LOOKS_OF_AN_ENDED_RUN == 0:
            with suppress(StoreError, ProtocolError):
                await refresh_authority(self._node)
                self.last_window = await newest_summarized(self._node)
        if self.last_window is not None and not self._history.window_rows():
            self._next_window = self._oldest = max(0, self.last_window - RECENT_WINDOWS)
        await self.refresh()

    def _has_ended(self) -> bool:
        head = self._chain.head
        return head is not None and self._node.clock.now() * 1000 >= head.expires_ms

    async def refresh(self) -> None:
        """Read the objects that are new.

        An object that cannot be read now is read later. A bad object becomes an alarm, and hides no other object.
        """
        self._storage_alarm = ""
        await self._try_read(self._read_chain)
        await self._try_read(self._find_silent)
        now = self._node.window() if self.last_window is None else min(self._node.window(), self.last_window)
        for validator in self._node.authority.validators:
            read = partial(self._read_validator, range(self._next_window, now + 1), validator)
            await self._try_read(partial(answer_of, read, _VALIDATOR_SECONDS))
        for trainer in self._node.authority.trainers:
            await self._try_read(partial(self._read_reports, trainer))
        await self._try_read(self._read_names)
        if self._node.authority.workers:
            await self._try_read(self._rounds.refresh)
        open_for = -(-self._node.run.schedule.verdict_rounds // self._node.run.schedule.rounds)
        self._next_window = max(self._next_window, now - open_for)
        self._history.close(self._next_window)
        if not self._storage_alarm:
            self._read_at = self._node.clock.now()

    async def read_back(self, count: int) -> None:
        """Read one summary, and no verdict, of each of `count` windows before those that were read, for curves."""
        await self._try_read(partial(self._read_back, count))

    async def _read_back(self, count: int) -> None:
        windows = range(max(self._oldest - count, self._next_window - MOST_WINDOWS, 0), self._oldest)
        for summary in await gather(self._read_old, windows):
            if summary is not None:
                self._history.add_old(summary)
        self._oldest = windows.start

    async def _read_old(self, window: int) -> Summary | None:
        """Return a summary of a window; None if no space that answers has one."""
        failures: list[StoreError] = []
        for validator in self._node.authority.validators:
            fetch = partial(fetch_record, self._node, Summary, paths.summary(validator, window))
            try:
                return (await answer_of(fetch, _SUMMARY_SECONDS)).record
            except FOREIGN:
                continue
            except StoreError as error:
                failures.append(error)
        if len(failures) == len(self._node.authority.validators):
            raise failures[0]
        return None

    async def _try_read(self, read: Callable[[], Awaitable[None]], *, by_validator: bool = False) -> bool:
        """Read something; turn errors into alarms, and return whether storage answered."""
        try:
            await read()
        except (NotFoundError, TooLargeError):
            return True
        except StoreError as error:
            self._storage_alarm = self._storage_alarm or f"{STORAGE_ALARM}: {error}"
            return False
        except ProtocolError as error:
            self._alarm(str(error), by_validator=by_validator)
        return True

    def _alarm(self, line: str, *, by_validator: bool = False) -> None:
        alarms = self._validator_alarms if by_validator else self._alarms
        if line not in alarms:
            alarms.append(line)

    async def _read_names(self) -> None:
        """Read once in a window what the miners and sites that are shown call themselves, also in a run that has ended.
        A name is only a claim that its key has signed.
        """
        window = self._node.window()
        if window != self._names_window:
            self._names_window, self._named = window, set()
        keys = self._history.miners().union(self._node.authority.workers) - self._named
        for key, name in zip(keys, await gather(self._read_name, [*keys]), strict=True):
            if name is not None:
                self._names[key] = name
        self._named |= keys
        self._names = {key: name for key, name in self._names.items() if key in self._named}

    async def _read_name(self, key: bytes) -> str | None:
        """Return the name that a key announced, for however long; None if there is no announcement that it signed."""
        try:
            return (await fetch_record(self._node, Announcement, paths.participant(key))).record.name
        except FOREIGN:
            return None

    async def _find_silent(self) -> None:
        node, authority = self._node, self._node.authority
        titles = [("trainer", authority.trainers[0])]
        titles += [(f"validator {key.hex()[:8]}", key) for key in authority.validators]
        for _, key in titles:
            node.backoff.forget(key)  # whose announcement had expired may be back
        announced = {item.key for item in await find_participants(node, "trainer")}
        announced |= {item.key for item in await find_participants(node, "validator")}
        self._silent = [title for title, key in titles if key not in announced]

    async def _read_chain(self) -> None:
        await refresh_authority(self._node)
        head = await fetch_envelope(self._node, Head, paths.head(self._node.authority.trainers[0]))
        if expired := await read_chain(self._node, self._chain, head):
            self._alarm(f"{expired}; the run has ended, or its trainer has stopped")

    async def _read_validator(self, windows: range, validator: bytes) -> None:
        for window in windows:
            if self._history.has_summary(window, validator):
                continue
            if not await self._try_read(partial(self._read_window, window, validator), by_validator=True):
                break  # a space that does not answer is read again at the next refresh

    async def _read_window(self, window: int, validator: bytes) -> None:
        summary = (await fetch_record(self._node, Summary, paths.summary(validator, window))).record
        rows = [row for row in summary.rows if row.verdict and not self._history.is_judged_whole(window, row)]
        for verdict in await gather(partial(self._read_verdict, validator, window), rows):
            self._history.add_verdict(verdict)
        self._history.add_summary(summary)
        for alarm in summary.alarms:
            self._alarm(alarm, by_validator=True)

    async def _read_verdict(self, validator: bytes, window: int, row: LedgerRow) -> Verdict:
        path = paths.verdict(validator, window, row.miner)
        signed = await fetch_record(self._node, Verdict, path, self._node.run.verdict_bytes)
        if signed.digest != row.verdict:
            raise ProtocolError("not the verdict that its summary lists", path)
        return signed.record

    async def _read_reports(self, trainer: bytes) -> None:
        """Turn a trainer's reports on the validators into alarms. A bad report is not read again."""
        prefix = paths.kind_prefix(trainer, "reports")
        async for item in self._node.store.list(prefix, after=self._last_report.get(trainer, "")):
            try:
                report = (await fetch_record(self._node, ValidatorReport, item.path)).record
                for group in report.disagreements:
                    judges = len(group.accepting) + len(group.rejecting)
                    self._alarm(
                        f"window {report.window}: {len(group.accepting)} of {judges} validators accept group "
                        f"{group.index} of miner {group.miner.hex()[:8]}"
                    )
                for failure in report.canary_failures:
                    verb = "accepted a false" if failure.accepted else "rejected a true"
                    if failure.about == "logprobs":
                        verb = "gave false log-probabilities, rewards or ends of a"
                    self._alarm(f"window {report.window}: validator {failure.validator.hex()[:8]} {verb} canary")
            except FOREIGN as error:
                self._alarm(str(error))
            self._last_report[trainer] = item.path

    def state(self, nodes: tuple[NodeRow, ...] = ()) -> NetworkState:
        """Return the state as of the last refresh."""
        node, run = self._node, self._node.run
        now = node.clock.now()
        window = node.window()
        manifests = tuple(self._chain.manifests())
        seconds = run.schedule.rounds * run.beacon.period_ms / 1000
        names = {**self._names, **self._operator.names}
        miners, recent = self._history.miner_rows(names, self._operator.kinds)
        tokens = self._history.tokens()
        head = self._chain.head
        return NetworkState(
            run_id=node.run_id.hex(),
            run_name=run.name,
            pass_at=run.evaluation.pass_at,
            seconds=now - self._started_at,
            window=window if window >= 0 else None,
            windows_planned=self._operator.windows_planned,
            window_seconds=seconds,
            window_elapsed=max(0.0, now - run.opening_time(window)) if window >= 0 else 0.0,
            full_bytes=manifests[-1].weight_bytes if manifests else 0,
            versions=tuple(_version_row(manifest) for manifest in manifests),
            windows=self._history.window_rows(),
            miners=miners,
            recent=recent,
            validators=self._history.validator_rows(node.authority.validators, names),
            stages=self._stage_rows(window),
            head=self._head_row(),
            read_at=self._read_at,
            nodes=nodes,
            rounds=tuple(self._rounds.rows),
            sites=self._rounds.site_rows(names),
            tokens_generated=tokens["generated"],
            tokens_verified=tokens["verified"],
            check_rate=self._history.check_rate(),
            head_age=None if head is None else max(0.0, now - head.expires_ms / 1000 + run.head_ttl),
            has_ended=self._has_ended(),
            silent=tuple(self._silent),
            alarms=(*self._validator_alarms, *self._alarms, *([self._storage_alarm] if self._storage_alarm else [])),
        )

    def weights_digest(self) -> bytes:
        """Return the digest of the newest version's weights, as the trainer signed it; empty before the first."""
        manifests = list(self._chain.manifests())
        return manifests[-1].weights if manifests else b""

    def _head_row(self) -> HeadRow | None:
        head, manifests = self._chain.head, list(self._chain.manifests())
        if head is None or not manifests:
            return None
        return HeadRow(
            version=manifests[-1].version,
            made_at=self._node.run.beacon.round_time(manifests[-1].beacon_round),
            signed_at=head.expires_ms / 1000 - self._node.run.head_ttl,
            expires_at=head.expires_ms / 1000,
            epoch=head.epoch,
            revision=head.revision,
            base=head.base,
            oldest_patch=head.oldest_patch,
            anchors=head.anchors,
            weights=manifests[-1].weights.hex(),
        )

    def _stage_rows(self, current: int) -> tuple[StageRow, ...]:
        """Return the windows that are not decided yet, the newest first; none of a run whose head has expired."""
        run, now = self._node.run, self._node.clock.now()
        if self._chain.head is None or self._chain.head.expires_ms <= 1000 * now:
            return ()
        schedule, rows = run.schedule, []
        for window in range(current, max(-1, current - 1 - -(-schedule.verdict_rounds // schedule.rounds)), -1):
            ends = {
                "miners generate": schedule.deadline(window),
                "work is committed": schedule.audit(window),
                "validators judge": schedule.seal(window),
                "validators reveal": schedule.verdict(window),
            }
            coming = [(name, time) for name, end in ends.items() if (time := run.beacon.round_time(end)) > now]
            name, until = coming[0] if coming else ("decided", None)
            rows.append(StageRow(window, name, until, len(self._history.revealed(window))))
        return tuple(rows)


def _version_row(manifest: Manifest) -> VersionRow:
    return VersionRow(
        version=manifest.version,
        optimizer_step=manifest.optimizer_step,
        first_window=manifest.first_window,
        patch_bytes=manifest.patch.size if manifest.patch else None,
        anchor_bytes=sum(ref.size for ref in manifest.anchor) if manifest.anchor else None,
        changed=manifest.patch.changed if manifest.patch else 0,
        total=manifest.elements,
    )
