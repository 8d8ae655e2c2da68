"""Reads what the validators publish about one window: the seals, the witnesses, the summaries that were sealed, and
the verdicts that these list.

A verdict counts only if its summary was sealed before the round at which the other validators reveal theirs, and if no
witness shows another seal of its validator (docs/spec/ledger.md). Each validator is read in a task of its own, so one
whose storage hangs does not delay the others.

Verdicts on a miner are read only if the summaries of a quorum list one: fewer decide nothing. So miners that one
validator invents cost its summary, and nothing else: no request, no memory, and no object in the trainer's state.
"""

from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Set
from contextlib import asynccontextmanager, suppress
from math import inf
from typing import Final

import trio

from protocol import paths
from protocol.difficulty import Counts
from protocol.errors import MalformedError, ProtocolError
from protocol.judging.ledger import Summary
from protocol.judging.verdict import Verdict
from roles.gather import gather
from roles.node.identity import Node
from roles.ports import NotFoundError, StoreError, TooLargeError
from roles.records import fetch_record
from roles.rosters import fetch_witnessed_seals, find_seal
from roles.trainer.collect.validator_monitor import Absences

_AT_ONCE: Final = 64  # verdicts of one validator that are being read
_HANG_SECONDS: Final = 600.0  # a read of a validator's storage that takes longer is taken to hang


class VerdictReader:
    """Reads the validators of one window; verdicts on canaries even if only one summary lists them. If this node began
    to read (seconds since the Unix epoch) after the deadline for seals, a seal counts whenever it was put, because this
    node cannot tell when that was.
    """

    def __init__(
        self, node: Node, window: int, start_time: float, absences: Absences, canaries: Set[bytes] = frozenset()
    ) -> None:
        self._node = node
        self._window = window
        self._absences = absences
        self._canaries = canaries
        seal_deadline = node.run.beacon.round_time(node.run.schedule.seal(window))
        self._began_after_deadline = seal_deadline <= start_time
        self._sealed_digests: dict[bytes, bytes] = {}  # by validator, the summary that its own storage shows sealed
        self._all_sealed_digests: defaultdict[bytes, set[bytes]] = defaultdict(set)  # and those that witnesses show
        self._validators_with_witness: set[bytes] = set()
        self._summaries: dict[bytes, Summary] = {}  # without their rows and scores, which are long
        self._verdict_digests: dict[bytes, dict[bytes, bytes]] = {}  # by validator, what its summary lists, by miner
        self._dealt_miners: dict[bytes, set[bytes]] = {}  # those of whom groups were dealt to it
        self._scored_miners: dict[bytes, set[bytes]] = {}  # by validator, the miners that earn something
        self._reported_paths: set[str] = set()
        self._voters: tuple[Set[bytes], int] = (frozenset(), 0)  # those whose summaries count, and the quorum
        self._missing_verdicts: dict[bytes, set[bytes]] = {}  # by validator: miners, as of these voters and this quorum
        self._excluded_validators: set[bytes] = set()  # validators that do not count in this window
        self._read_starts: dict[bytes, float] = {}  # by validator that is being read, since when (trio's time)
        self._read_scopes: dict[bytes, trio.CancelScope] = {}  # by validator that is being read
        # by validator, complete reads since the window's deadline, since the last one that showed something new, and
        # since there is more to look for
        self._final_reads: Counter[bytes] = Counter()
        self._final_attempts: Counter[bytes] = Counter()  # by validator, all reads since the deadline, also failed ones
        self.verdicts: dict[bytes, dict[bytes, Verdict]] = {}
        """Verdicts by miner, then by validator."""
        self.unprocessed: set[bytes] = set()
        """Miners with verdicts that the collector has not processed; the reader adds to them."""
        self._verdict_counts: Counter[bytes] = Counter()  # by validator

    @property
    def equivocators(self) -> set[bytes]:
        """Validators that sealed two different summaries: their verdicts do not count."""
        return {validator for validator, digests in self._all_sealed_digests.items() if len(digests) > 1}

    def outstanding(self, ignored: set[bytes]) -> set[bytes]:
        """Return the validators of which something may still come."""
        missing_verdicts = self._missing(ignored)
        read = {validator for validator, miners in missing_verdicts.items() if not miners}
        return set(self._node.authority.validators) - self._excluded_validators - read - ignored

    def _missing(self, ignored: Set[bytes]) -> dict[bytes, set[bytes]]:
        """Return, by validator whose summary was read and counts, the miners on whom its verdict is to be read."""
        authority = self._node.authority
        voters = (self._verdict_digests.keys() & set(authority.validators)) - ignored - self.equivocators
        if self._voters != (voters, authority.quorum):
            listings = Counter(miner for voter in voters for miner in self._verdict_digests[voter])
            listed = {miner for miner, count in listings.items() if count >= authority.quorum} | self._canaries
            before, self._voters = self._missing_verdicts, (voters, authority.quorum)
            self._missing_verdicts = {
                voter: {
                    miner for miner in self._dealt_miners[voter] & listed if voter not in self.verdicts.get(miner, {})
                }
                for voter in voters
            }
            for voter, miners in self._missing_verdicts.items():
                if miners - before.get(voter, set()):  # which the reads up to now did not look for
                    self._final_reads[voter] = 0
        return self._missing_verdicts

    def state(self, ignored: set[bytes]) -> tuple[frozenset[bytes], ...]:
        """Return what decisions depend on beside the verdicts on a miner: other verdicts decide nothing about it."""
        return (
            frozenset(self.outstanding(ignored)),
            frozenset(self._summaries),
            frozenset(self.equivocators),
            frozenset(ignored),
        )

    def outstanding_on(self, miner: bytes, ignored: set[bytes]) -> set[bytes]:
        """Return the validators of which a verdict on a miner may still come."""
        have_verdict = self.verdicts.get(miner, {}).keys()
        list_none = {validator for validator, miners in self._dealt_miners.items() if miner not in miners}
        return self.outstanding(ignored) - have_verdict - list_none

    def stratum_counts(self, ignored: set[bytes]) -> dict[bytes, tuple[bytes, Counts]]:
        """Return, by validator whose summary counts, the digest of the summary and what it counts by stratum."""
        return {
            validator: (self._sealed_digests[validator], summary.strata)
            for validator, summary in self._summaries.items()
            if summary.strata is not None and validator not in ignored | self.equivocators
        }

    def paying(self, miner: bytes) -> set[bytes]:
        """Return the validators whose summaries give a miner a score."""
        return {validator for validator, scored_miners in self._scored_miners.items() if miner in scored_miners}

    def is_complete(self, reads: int, ignored: set[bytes], *, timed_out: bool) -> bool:
        """Whether every outstanding validator was read so many times since the window's deadline without any news.

        Storage that hides a seal, then a summary, then a verdict, each once, is read until all of them are there. After
        `timed_out`, reads count that failed, had news, or have been hanging for minutes.
        """

        def complete(validator: bytes) -> bool:
            hangs = trio.current_time() - self._read_starts.get(validator, inf) > _HANG_SECONDS
            return self._final_reads[validator] >= reads or (
                timed_out and (self._final_attempts[validator] >= reads or hangs)
            )

        return all(map(complete, self.outstanding(ignored)))

    def start_reading(self, ignored: set[bytes], after_deadline: bool, tasks: trio.Nursery) -> None:
        """Start a task for each outstanding validator that is not being read already."""
        for validator in sorted(self.outstanding(ignored) - self._read_starts.keys()):
            self._read_starts[validator], self._read_scopes[validator] = trio.current_time(), trio.CancelScope()
            tasks.start_soon(self._try_to_read, validator, ignored, after_deadline)

    async def _try_to_read(self, validator: bytes, ignored: set[bytes], after_deadline: bool) -> None:
        before = self._object_count(validator)
        try:
            with self._read_scopes[validator]:
                await self._read(validator, ignored)
            if after_deadline:
                has_news = self._object_count(validator) > before
                self._final_reads[validator] = 0 if has_news else self._final_reads[validator] + 1
        except StoreError as error:  # a validator with unreachable storage harms itself only
            self._report_once("validator-unreachable", f"of {validator.hex()}", error)
        finally:
            self._final_attempts[validator] += after_deadline
            del self._read_starts[validator], self._read_scopes[validator]

    def close(self, ignored: set[bytes]) -> None:
        """End the reads that still go on. Log which validators did not reveal in time, because their judgements do not
        count then, and on how many miners a validator lists a verdict that too few others list.
        """
        for scope in self._read_scopes.values():
            scope.cancel()
        for validator in sorted(self.outstanding(ignored)):
            if validator in self._sealed_digests:
                self._exclude(validator, "sealed, and not revealed in time")
            else:
                self._absences.add(validator, self._window)
        for validator, missing_miners in sorted(self._missing(ignored).items()):
            read_miners = {miner for miner, verdicts in self.verdicts.items() if validator in verdicts}
            unread_count = len(self._dealt_miners[validator] - read_miners - missing_miners)
            if unread_count:
                self._node.telemetry.event(
                    "verdicts-unread", window=self._window, validator=validator.hex()[:8], miners=unread_count
                )

    def _object_count(self, validator: bytes) -> int:
        """Return how many objects of a validator were read: its seal, witness and summary, and its verdicts."""
        single_objects = (self._sealed_digests, self._validators_with_witness, self._summaries)
        return sum(validator in objects for objects in single_objects) + self._verdict_counts[validator]

    async def _read(self, validator: bytes, ignored: set[bytes]) -> None:
        if validator not in self._sealed_digests:
            await self._read_seal(validator)
        if validator in self._sealed_digests and validator not in self._validators_with_witness:
            await self._read_witness(validator)
        if validator in self._validators_with_witness and validator not in self._summaries:
            await self._read_summary(validator)
        if validator in self._summaries:
            await self._read_verdicts(validator, ignored)

    async def _read_seal(self, validator: bytes) -> None:
        seal = None
        try:
            if await self._seals_still_count():
                seal = await find_seal(self._node, self._window, validator)
        except (ProtocolError, TooLargeError) as error:
            self._report_once("seal-refused", paths.seal(validator, self._window), error)
        if not await self._seals_still_count():  # storage may delay an answer until the others have revealed
            self._excluded_validators.add(validator)
            self._absences.add(validator, self._window)
        elif seal is not None:
            self._absences.end(validator, self._window)
            self._sealed_digests[validator] = seal.record.summary
            self._add_sealed_digest(validator, seal.record.summary)

    async def _seals_still_count(self) -> bool:
        """Whether a seal that is read now counts."""
        if self._began_after_deadline:
            return True
        return not await self._node.time.has_come(self._node.run.schedule.seal(self._window))

    def _add_sealed_digest(self, validator: bytes, digest: bytes) -> None:
        """Remember a summary that a validator sealed, whoever shows the seal."""
        digests = self._all_sealed_digests[validator]
        if digest not in digests:
            digests.add(digest)
            if len(digests) > 1:
                both = " and ".join(sorted(item.hex()[:16] for item in digests))
                self._exclude(validator, f"sealed twice: {both}")

    async def _read_witness(self, validator: bytes) -> None:
        async with self._reporting("witness-refused", paths.witness(validator, self._window)):
            seals = await fetch_witnessed_seals(self._node, self._window, validator)
            self._validators_with_witness.add(validator)
            for other_validator, digest in seals:
                self._add_sealed_digest(other_validator, digest)

    async def _read_summary(self, validator: bytes) -> None:
        path = paths.summary(validator, self._window)
        async with self._reporting("summary-refused", path):  # storage may have lied: it is read again
            signed = await fetch_record(self._node, Summary, path)
            if signed.digest != self._sealed_digests[validator]:
                raise MalformedError("not the summary that was sealed", path)
            rows = signed.record.rows
            self._summaries[validator] = signed.record.model_copy(update={"rows": (), "amendments": (), "scores": ()})
            self._verdict_digests[validator] = {row.miner: row.verdict for row in rows if row.verdict}
            self._dealt_miners[validator] = {row.miner for row in rows if row.dealt}
            self._scored_miners[validator] = {miner for miner, _ in signed.record.scores}

    async def _read_verdicts(self, validator: bytes, ignored: set[bytes]) -> None:
        """Read the verdicts on a quorum's miners that a validator's summary lists and that were not read before."""
        digests = self._verdict_digests[validator]

        async def read(miner: bytes) -> None:
            path = paths.verdict(validator, self._window, miner)
            async with self._reporting("verdict-refused", path):
                signed = await fetch_record(self._node, Verdict, path, self._node.run.verdict_bytes)
                if signed.digest != digests.get(miner):
                    raise MalformedError("not the verdict that the summary lists", path)
                self._check_arithmetics(signed.record, self._summaries[validator])
                self.verdicts.setdefault(miner, {})[validator] = signed.record
                self._verdict_counts[validator] += 1
                self.unprocessed.add(miner)
                self._missing(ignored).get(validator, set()).discard(miner)

        await gather(read, sorted(self._missing(ignored).get(validator, set())), at_once=_AT_ONCE)

    def _check_arithmetics(self, verdict: Verdict, summary: Summary) -> None:
        """Refuse a verdict by thresholds that are not those of the miner and of this validator."""
        self._node.run.proof.row(verdict.miner_arithmetic, verdict.validator_arithmetic)
        if verdict.validator_arithmetic != summary.arithmetic:
            raise MalformedError("in another arithmetic than its summary", verdict.path)

    @asynccontextmanager
    async def _reporting(self, event: str, path: str) -> AsyncIterator[None]:
        """Leave out what is not at a path yet, or not what it should be; log the latter, once for each path."""
        with suppress(NotFoundError):
            try:
                yield
            except (ProtocolError, TooLargeError) as error:
                self._report_once(event, path, error)

    def _report_once(self, event: str, path: str, error: Exception) -> None:
        if path not in self._reported_paths:
            self._reported_paths.add(path)
            self._node.telemetry.event(event, window=self._window, path=path, error=str(error))

    def _exclude(self, validator: bytes, reason: str) -> None:
        """Log that a validator's verdicts on this window do not count, and why."""
        self._excluded_validators.add(validator)
        self._node.telemetry.event(
            "validator-excluded", window=self._window, validator=validator.hex()[:8], error=reason
        )
