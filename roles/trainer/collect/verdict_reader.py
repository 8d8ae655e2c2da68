"""What the validators say of one window: seals first, then the summaries that were sealed, then the verdicts that these
list.

A verdict counts only if its summary was sealed before the round by which the others reveal theirs, and if nobody was
shown another seal of its validator (docs/spec/ledger.md).
Validators are heard beside one another, so that one whose storage hangs costs the others nothing.
"""

from collections import Counter, defaultdict
from math import inf
from typing import Final

import trio

from protocol import limits, paths
from protocol.errors import MalformedError, ProtocolError
from protocol.identity.signing import open_signed
from protocol.judging.ledger import LedgerRow, Summary
from protocol.judging.verdict import Verdict
from roles.gather import gather
from roles.node.identity import Node
from roles.ports import NotFoundError, StoreError, TooLargeError
from roles.seals import find_seal, find_witness

_HANGS_SECONDS: Final = 600.0  # after which a validator that is being heard is taken to hang


class VerdictReader:
    """One window's validators.

    Args:
        listening_since: when this node began to listen, seconds since the Unix epoch. Of a window whose seals were due
            before, a seal counts whenever it was put: whoever was away cannot tell.
    """

    def __init__(self, node: Node, window: int, listening_since: float) -> None:
        self._node = node
        self._window = window
        self._due = node.run.beacon.due(node.run.schedule.seal(window))
        self._away = self._due <= listening_since
        self._seals: dict[bytes, bytes] = {}
        self._signed: defaultdict[bytes, set[bytes]] = defaultdict(set)  # by validator, the digests that it sealed
        self._witnessed: set[bytes] = set()  # validators whose witness was read
        self._summaries: dict[bytes, Summary] = {}
        self._listed: dict[bytes, set[bytes]] = {}  # by validator, the miners on whom its summary lists a verdict
        self._told: set[str] = set()
        self._over: set[bytes] = set()  # validators of whom nothing more can come
        self._heard_now: dict[bytes, float] = {}  # since when (trio's time) a validator is being heard
        self._last_looks: Counter[bytes] = Counter()  # how often each was heard since the window was over
        self._last_tries: Counter[bytes] = Counter()  # likewise, or did not answer
        self.verdicts: dict[bytes, dict[bytes, Verdict]] = {}
        """By miner, then by validator."""

    @property
    def sealed_twice(self) -> set[bytes]:
        """Validators that showed one seal to some and another to others: their verdicts do not count."""
        return {validator for validator, digests in self._signed.items() if len(digests) > 1}

    def outstanding(self, ignored: set[bytes]) -> set[bytes]:
        """Validators of whom something may still come."""
        return set(self._node.authority.validators) - self._over - ignored

    def outstanding_on(self, miner: bytes, ignored: set[bytes]) -> set[bytes]:
        """Validators of whom a verdict on a miner may still come."""
        spoken = self.verdicts.get(miner, {}).keys()
        silent = {validator for validator, listed in self._listed.items() if miner not in listed}
        return self.outstanding(ignored) - spoken - silent

    def looked(self, times: int, ignored: set[bytes], *, given_up: bool) -> bool:
        """Whether everybody of whom something might still come was heard so often since the window was over.

        Args:
            given_up: whether it is enough to have tried, or to have been kept waiting for minutes.
        """

        def done(validator: bytes) -> bool:
            hangs = trio.current_time() - self._heard_now.get(validator, inf) > _HANGS_SECONDS
            return self._last_looks[validator] >= times or (
                given_up and (self._last_tries[validator] >= times or hangs)
            )

        return all(map(done, self.outstanding(ignored)))

    def listen(self, ignored: set[bytes], closed: bool, tasks: trio.Nursery) -> None:
        """Begin to hear every validator of whom something may come and who is not being heard already."""
        for validator in sorted(self.outstanding(ignored) - self._heard_now.keys()):
            self._heard_now[validator] = trio.current_time()
            tasks.start_soon(self._listen_to, validator, closed)

    async def _listen_to(self, validator: bytes, closed: bool) -> None:
        try:
            await self._hear(validator)
            self._last_looks[validator] += closed
        except StoreError as error:  # its own loss: the others are heard
            self._tell("validator-unread", f"of {validator.hex()}", error)
        finally:
            self._last_tries[validator] += closed
            del self._heard_now[validator]

    def close(self, ignored: set[bytes]) -> None:
        """Say of whom nothing came in time: what they judged is not trained on, and that is why."""
        for validator in self._node.authority.validators:
            if validator not in self._over and validator not in ignored:
                sealed = validator in self._seals
                self._refuse(validator, "sealed, and not revealed in time" if sealed else "not sealed in time")

    async def _hear(self, validator: bytes) -> None:
        if validator not in self._seals:
            await self._look_for_seal(validator)
        if validator in self._seals and validator not in self._witnessed:
            await self._look_for_witness(validator)
        if validator in self._witnessed and validator not in self._summaries:
            await self._look_for_summary(validator)
        if validator in self._summaries:
            await self._read_verdicts(validator)

    async def _look_for_seal(self, validator: bytes) -> None:
        seal = None
        try:
            if await self._in_time():
                seal = await find_seal(self._node, self._window, validator)
        except (ProtocolError, TooLargeError) as error:
            self._tell("seal-unread", paths.seal(validator, self._window), error)
        if not await self._in_time():  # an answer may be held back until the others have revealed
            self._refuse(validator, "not sealed in time")
        elif seal is not None:
            self._seals[validator] = seal.record.summary
            self._note(validator, seal.record.summary)

    async def _in_time(self) -> bool:
        """Whether a seal that is seen now counts."""
        return self._away or not await self._node.time.has_come(self._node.run.schedule.seal(self._window))

    def _note(self, validator: bytes, digest: bytes) -> None:
        """Remember what a validator signed, whoever was shown it."""
        signed = self._signed[validator]
        if digest not in signed:
            signed.add(digest)
            if len(signed) > 1:
                both = " and ".join(sorted(item.hex()[:16] for item in signed))
                self._refuse(validator, f"sealed twice: {both}")

    async def _look_for_witness(self, validator: bytes) -> None:
        try:
            seals = await find_witness(self._node, self._window, validator)
        except NotFoundError:
            return
        except (ProtocolError, TooLargeError) as error:
            self._tell("witness-refused", paths.witness(validator, self._window), error)
            return
        self._witnessed.add(validator)
        for other, digest in seals:
            self._note(other, digest)

    async def _look_for_summary(self, validator: bytes) -> None:
        path = paths.summary(validator, self._window)
        try:
            data = await self._node.store.get(path, Summary.max_bytes + limits.MAX_ENVELOPE_BYTES)
            signed = open_signed(data, Summary, [validator])
            record = signed.record
            if (record.run, record.window, record.validator) != (self._node.run_id, self._window, validator):
                raise MalformedError("of another run, window or validator", path)
            if signed.digest != self._seals[validator]:
                raise MalformedError("not the summary that was sealed", path)
        except NotFoundError:
            return
        except (
            ProtocolError,
            TooLargeError,
        ) as error:  # the storage may have lied: it is read again until the window is over
            self._tell("summary-refused", path, error)
            return
        self._summaries[validator] = record
        self._listed[validator] = {row.miner for row in record.rows if row.verdict}

    async def _read_verdicts(self, validator: bytes) -> None:
        """Read the verdicts of a summary that were not there before."""
        rows = [row for row in self._summaries[validator].rows if row.verdict]
        missing = [row for row in rows if validator not in self.verdicts.get(row.miner, {})]

        async def read(row: LedgerRow) -> bool:
            path = paths.verdict(validator, self._window, row.miner)
            try:
                data = await self._node.store.get(path, self._node.run.verdict_bytes + limits.MAX_ENVELOPE_BYTES)
                verdict: Verdict = await self._node.run_sync(self._opened, data, validator, row, path)
            except NotFoundError:
                return False
            except (ProtocolError, TooLargeError) as error:
                self._tell("verdict-refused", path, error)
                return False
            self.verdicts.setdefault(row.miner, {})[validator] = verdict
            return True

        if all(await gather(read, missing)):
            self._over.add(validator)

    def _opened(self, data: bytes, validator: bytes, row: LedgerRow, path: str) -> Verdict:
        """A verdict that a row lists.

        Raises:
            ProtocolError: it is not that one.
        """
        signed = open_signed(data, Verdict, [validator])
        verdict = signed.record
        if signed.digest != row.verdict:
            raise MalformedError("not the verdict that the summary lists", path)
        claimed = (verdict.run, verdict.window, verdict.validator, verdict.miner)
        if claimed != (self._node.run_id, self._window, validator, row.miner):
            raise MalformedError("of another run, window, validator or miner", path)
        return verdict

    def _tell(self, event: str, path: str, error: Exception) -> None:
        """Say it once for each object."""
        if path not in self._told:
            self._told.add(path)
            self._node.telemetry.event(event, window=self._window, path=path, error=str(error))

    def _refuse(self, validator: bytes, why: str) -> None:
        self._over.add(validator)
        self._node.telemetry.event("validator-unheard", window=self._window, validator=validator.hex()[:8], error=why)
