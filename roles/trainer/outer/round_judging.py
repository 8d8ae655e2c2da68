"""How the coordinator looks at the contributions of a round: when it saw which, and what is wrong with them."""

from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import trio

from protocol import limits, paths
from protocol.errors import ProtocolError, error_context
from protocol.identity.signing import Signed
from protocol.kernels.inner_products import Matrix
from protocol.objects import ObjectRef
from protocol.outer.comparing import check_payload
from protocol.outer.round_checks import RefusedContributionError, check_contribution
from protocol.outer.round_records import RefusalReason, RoundContribution, RoundManifest
from protocol.outer.shared_state import SharedState
from protocol.pseudogradient import File, Keep, Payload, in_memory
from protocol.pseudogradient.payload import largest_first_file
from roles.gather import ByteLimit, answer_of, gather
from roles.node.identity import Node
from roles.ports import NotFoundError, StoreError, TooLargeError
from roles.records import fetch_object, fetch_record, open_record
from roles.trainer.outer.round_files import SEEN, numbered
from roles.trainer.outer.round_reader import HEAD_START, HEAD_START_BYTES, fetch_files

PROJECTIONS: Final = "projections of contributions"
"""What the secret of a coordinator's projections is derived for."""


DOWNLOAD_BYTES: Final = 4 * limits.GIB
"""Bytes of payload files that are downloaded at the same time, and as many of large ones."""


@dataclass
class Attendance:
    """What the coordinator has seen of a round's workers: the first contributions, in order, and who is refused."""

    opening: Signed[RoundManifest]
    keep: Keep = in_memory  # stores the files of payloads
    files: dict[tuple[bytes, bytes], File] = field(default_factory=dict)  # fetched so far, by worker and digest
    contributions: dict[bytes, Signed[RoundContribution]] = field(default_factory=dict)
    refusals: dict[bytes, RefusalReason] = field(default_factory=dict)
    _lines: set[tuple[str, bytes, str]] = field(default_factory=set)
    _shares: dict[bytes, ByteLimit] = field(default_factory=dict)
    _large_files: ByteLimit = field(default_factory=lambda: ByteLimit(DOWNLOAD_BYTES))

    @property
    def number(self) -> int:
        return self.opening.record.number + 1

    async def recall(self, node: Node) -> None:
        """Read what this coordinator saw of the round before it was started again."""
        prefix = f"{numbered(SEEN, self.number)}-"
        for path in sorted([item.path async for item in node.state.list(prefix)]):
            worker = paths.key_at_end(path)
            data = await node.state.get(path, RoundContribution.max_signed_bytes())
            self.contributions[worker] = open_record(
                node, RoundContribution, paths.contribution(worker, self.number), data
            )

    async def look(self, node: Node, workers: Sequence[bytes], seconds: float) -> None:
        """Look at the contribution of some workers once, and remember the first one of each. A worker whose space has
        not answered after some seconds is left out; it holds up no other.
        """
        with trio.move_on_after(seconds):
            await gather(partial(self._look_at, node), workers, len(workers))

    async def _look_at(self, node: Node, worker: bytes) -> None:
        try:
            signed = await fetch_record(node, RoundContribution, paths.contribution(worker, self.number))
        except NotFoundError:
            return
        except StoreError as error:
            self.event("contribution-unread", node, worker, error)
            if isinstance(error, TooLargeError):
                self.refusals.setdefault(worker, RefusalReason.MALFORMED)
            return
        except ProtocolError as error:
            self.event("contribution-refused", node, worker, error)
            if worker not in self.contributions:
                self.refusals.setdefault(worker, RefusalReason.MALFORMED)
            return
        if self.refusals.get(worker) is RefusalReason.MALFORMED:
            del self.refusals[worker]  # storage showed something else before
        first = self.contributions.setdefault(worker, signed)
        if first is signed:
            await node.state.put(f"{numbered(SEEN, self.number)}-{worker.hex()}", signed.data)
        elif first.digest != signed.digest and worker not in self.refusals:
            self.refusals[worker] = RefusalReason.CONTRADICTORY
            node.alarm(f"worker {worker.hex()[:16]} signed two contributions to round {self.number}")

    async def download(self, worker: bytes, size: int, get: Callable[[], Awaitable[File]]) -> File:
        """Get a file of a worker's payload when there is room in memory for it; StoreError if it takes too long. Each
        worker has an equal share of DOWNLOAD_BYTES, which no other can use up. Of files that are larger than a share
        each worker has one at a time. They have as many bytes together, and wait for each other, so their time is
        limited.
        """
        share = DOWNLOAD_BYTES // len(self.opening.record.workers)
        async with self._shares.setdefault(worker, ByteLimit(share)).room(size):
            if size <= share:
                return await get()
            async with self._large_files.room(size):
                return await answer_of(get, HEAD_START + size / HEAD_START_BYTES)

    def event(self, event: str, node: Node, worker: bytes, error: Exception) -> None:
        """Log what is wrong with a worker's contribution; the same words once, however often it is looked at."""
        if (line := (event, worker, str(error))) not in self._lines:
            self._lines.add(line)
            node.telemetry.event(event, worker=worker.hex()[:16], error=str(error))

    def check(self, used_groups: Collection[bytes], revoked: Collection[bytes]) -> None:
        """Refuse the contributions whose records break the rules, or whose keys were revoked since the round began."""
        for worker, signed in self.contributions.items():
            if worker in self.refusals:
                continue
            if worker in revoked:
                self.refusals[worker] = RefusalReason.MALFORMED
                continue
            try:
                check_contribution(self.opening, signed.record, used_groups)
            except RefusedContributionError as error:
                self.refusals[worker] = error.reason

    def sound(self) -> list[bytes]:
        """Return the workers with a contribution that is not refused, in ascending order."""
        return sorted(worker for worker in self.contributions if worker not in self.refusals)


async def fetch_payload(
    node: Node, attendance: Attendance, worker: bytes, shared: SharedState, checks: trio.Semaphore
) -> tuple[Payload, Matrix]:
    """Fetch the files of a contribution's payload from its worker's space, and check them; `checks` limits how many
    payloads at a time.
    """
    contribution, rules = attendance.contributions[worker].record, attendance.opening.record.rules
    ref, parts = contribution.payload, shared.stream_parts(rules)

    def path(digest: bytes) -> str:
        return paths.payload(worker, contribution.number, digest)

    async def fetch(file: ObjectRef) -> File:
        # Tries are many where a file is withheld, and what is kept takes space until the round is over.
        if (own := (worker, file.digest)) not in attendance.files:
            attendance.files[own] = await attendance.download(worker, file.size, partial(get, file))
        return attendance.files[own]

    async def get(file: ObjectRef) -> File:
        kept: File = await node.run_sync(attendance.keep, await fetch_object(node, path(file.digest), file))
        return kept

    with error_context(path(ref.digest)):
        if ref.size > (largest := largest_first_file(parts)):
            raise RefusedContributionError(f"a file of {ref.size} bytes for weights that need at most {largest}")
        payload = await fetch_files(node, ref, parts, fetch)
        async with checks:
            secret = node.key.derive(PROJECTIONS)
            projection: Matrix = await node.run_sync(check_payload, shared, rules, secret, contribution, payload)
    return payload, projection
