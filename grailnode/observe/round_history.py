"""Reads the outer rounds of a run (docs/spec/outer-round.md) from public objects, and checks each round manifest."""

from collections import Counter, defaultdict, deque
from collections.abc import Mapping
from typing import Final

from grailnode.observe.state import RoundRow, SiteRow
from protocol import paths
from protocol.errors import ForkError
from protocol.identity.signing import Signed
from protocol.outer.round_checks import check_next_manifest
from protocol.outer.round_records import CountedContribution, RoundContribution, RoundManifest, RoundPointer
from roles.node.identity import Node
from roles.ports import NotFoundError, TooLargeError
from roles.records import fetch_record

_RECENT_ROUNDS: Final = 64
_MOST_ROUNDS: Final = 4_096


class RoundHistory:
    """The rounds of one run: at each `refresh` those that are new, the newest 64 at most."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._newest: Signed[RoundManifest] | None = None
        self.rows: deque[RoundRow] = deque(maxlen=_MOST_ROUNDS)
        self._work: dict[bytes, Counter[str]] = {}  # of each site, by field of SiteRow
        self._refused: defaultdict[bytes, Counter[str]] = defaultdict(Counter)

    async def refresh(self) -> None:
        """Read the round manifests that are new, and the contributions that they name."""
        node = self._node
        trainer = node.authority.trainers[0]
        pointer = (await fetch_record(node, RoundPointer, paths.newest_round(trainer))).record
        read = -1 if self._newest is None else self._newest.record.number
        for number in range(max(read, pointer.newest - _RECENT_ROUNDS) + 1, pointer.newest + 1):
            try:
                signed = await fetch_record(node, RoundManifest, paths.round_manifest(trainer, number))
            except NotFoundError:
                continue  # an old one, which no site needs any more
            self._check(signed)
            steps = {item.worker: await self._local_steps(item, number) for item in signed.record.counted}
            self._add(signed.record, steps)
            self._newest = signed

    def _check(self, signed: Signed[RoundManifest]) -> None:
        before = self._newest
        if before is None or before.record.number + 1 != signed.record.number:
            return
        try:
            check_next_manifest(before, signed)
        except ForkError:
            if signed.record.epoch <= before.record.epoch:
                raise  # else another coordinator took over, and went on from an earlier round

    async def _local_steps(self, item: CountedContribution, number: int) -> int:
        """Return the local steps of a contribution; 0 if its record is no longer there."""
        try:
            signed = await fetch_record(self._node, RoundContribution, paths.contribution(item.worker, number))
        except (NotFoundError, TooLargeError):
            return 0
        return signed.record.local_steps if signed.digest == item.contribution else 0

    def _add(self, manifest: RoundManifest, steps: Mapping[bytes, int]) -> None:
        for worker in manifest.workers:
            self._work.setdefault(worker, Counter())
        if manifest.number == 0:
            return
        for item in manifest.counted:
            work = self._work.setdefault(item.worker, Counter())
            work.update(rounds=1, steps=steps[item.worker], groups=len(item.groups), payload_bytes=item.payload.total)
        for refusal in manifest.refused:
            self._work.setdefault(refusal.worker, Counter())
            self._refused[refusal.worker][refusal.reason] += 1
        self.rows.append(
            RoundRow(
                number=manifest.number,
                step=manifest.state.step,
                version=manifest.version,
                counted=len(manifest.counted),
                sites=len(manifest.counted) + len(manifest.refused),
                local_steps=sum(steps.values()),
                groups=sum(len(item.groups) for item in manifest.counted),
                payload_bytes=sum(item.payload.total for item in manifest.counted),
            )
        )

    def site_rows(self, names: Mapping[bytes, str]) -> tuple[SiteRow, ...]:
        """Return the sites of these rounds, by name."""
        rows = [
            SiteRow(
                key=key.hex(),
                name=names.get(key) or key.hex()[:8],
                rounds=work["rounds"],
                refused=dict(sorted(self._refused[key].items())),
                steps=work["steps"],
                groups=work["groups"],
                payload_bytes=work["payload_bytes"],
            )
            for key, work in self._work.items()
        ]
        return tuple(sorted(rows, key=lambda row: row.name))
