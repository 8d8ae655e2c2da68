"""The trainer's canary: a miner that falsifies groups picked by a secret coin, to test whether validators look.

Others cannot tell it from a miner: its key, its pledges and its true groups are ordinary. A false group is one that
only the policy shows to be false: its tokens and sketches are those of the policy, in the wrong place. The canary first
runs the validator's own judge on the group, because a group that honest validators might accept would accuse them.

A canary's own true groups are few. So it notes log-probabilities, rewards and near ties of some groups of all other
miners too, which a secret coin picks, for the trainer's collector to compare with what validators say (`CanaryAudit`):
a validator may end a rollout only where another token nearly ties, and its rewards have no bias. It does so between
the deadline of a window and the opening of the next one, while its engine still serves the window's version; groups of
other versions are passed over.
"""

from bisect import bisect_left
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import torch

from protocol import paths
from protocol.encoding import content_digest
from protocol.environments.base import SandboxLimitError
from protocol.errors import ProtocolError
from protocol.identity.signing import SigningKey
from protocol.judging.evidence import weigh_tally, whole_margins
from protocol.judging.ledger import SharesOf
from protocol.judging.report import is_false_group
from protocol.proof import StatisticName
from protocol.rollout import challenge, sampling, sketch
from protocol.rollout.batch import Commitment, Group, Rollout, open_group
from protocol.rollout.checking import Check, CheckRules
from roles.gather import gather
from roles.miner.produce import HonestProducer, MiningWindow
from roles.node.identity import Node
from roles.participants import find_participants
from roles.policy.assignment import Assignment, Task
from roles.ports import (
    BeaconError,
    Engine,
    EngineError,
    Generation,
    NotFoundError,
    ObjectStore,
    Request,
    StoreError,
    TooLargeError,
)
from roles.records import fetch_record
from roles.trainer.spool import CanaryNote, canary_path
from roles.validator.judge import Judge, check_requests, filter_bounds

_PLAIN_FACTOR = 2  # a false group has more evidence than so many times the threshold of any validator's row
_CAUTION = 2.0  # an edit counts as if its shortfall were so much smaller: other arithmetics compute another one
_MATCHES = 4  # edits of a rollout that change its noise least


Falsification = Callable[[MiningWindow, Group, Assignment], Awaitable[Group | None]]


@dataclass(frozen=True)
class Edit:
    """A token that could be replaced by the one with the second-best score."""

    rollout: int
    position: int
    token: int
    shortfall: float  # of its score, in units of logits / temperature
    evidence: int  # that it gives at least by itself, by the row of any validator, in micro-decades
    noise_change: float  # its noise minus that of the right token


class CanaryProducer(HonestProducer):
    """Produces honest groups and, in every second window, falsifies every second one.

    Of the false groups, which the coin of the trainer's key decides as well:

    - one in three has rollouts with one token replaced by the runner-up, from where they continue as the policy does;
    - one in three likewise, at the nearest ties that are no honest noise: there a quantized copy goes wrong, too;
    - one in three has the right tokens with the sketches of this policy's states behind another prompt.

    A validator without the policy could compare the noise of the chosen tokens, which is public, with that of other
    groups. So edits are made where they change the noise least, and in no more rollouts than a plain rejection needs.

    True groups are noted in the trainer's state, if it is there, for the collector, which compares what validators say
    with them.
    """

    def __init__(
        self, task: Task, engine: Engine, trainer: SigningKey, trainer_state: ObjectStore | None = None
    ) -> None:
        super().__init__(task, engine)
        proof = task.run.proof
        self._rows = [proof.row(engine.arithmetic, validator) for validator in proof.validators]
        self._plain_evidence = _PLAIN_FACTOR * max(row.threshold for row in self._rows)
        self._trainer = trainer
        self._trainer_state = trainer_state

    async def produce(self, mining_window: MiningWindow, indices: Sequence[int]) -> list[Group]:
        groups, arithmetic, state = [], self.engine.arithmetic, self._trainer_state
        randomness, shares_of = mining_window.randomness, mining_window.shares_of
        for group in await super().produce(mining_window, indices):
            if is_false_group(self._trainer, mining_window.window, group.index):
                groups.append(await self._falsify(mining_window, group))
                continue
            groups.append(group)
            if state is not None:
                await note_group(self.task, self.engine, group, arithmetic, randomness, state, shares_of)
        return groups

    async def _falsify(self, mining_window: MiningWindow, group: Group) -> Group:
        """Return the group with a change that honest validators plainly refuse.

        Where the first kind of change does not give that, for instance because the policy is certain of every token,
        the next kind follows; all-zero sketches are the last.
        """
        (assignment,) = self.assignments(mining_window, [group.index])
        first = self._trainer.derive("canary kind", mining_window.window, group.index)[0] % 3
        kinds: tuple[Falsification, ...] = (
            partial(self._edited, rank=lambda edit: abs(edit.noise_change)),  # runners-up
            partial(self._edited, rank=lambda edit: edit.shortfall),  # near ties
            self._with_states_of_another_prompt,
        )
        if self.task.run.episode is not None:  # an edit would change what the environment replies
            kinds, first = kinds[-1:], 0
        for kind in (*kinds[first:], *kinds[:first]):
            false_group = await kind(mining_window, group, assignment)
            if false_group is not None:
                return false_group
        zeroed = tuple(item.model_copy(update={"sketch": bytes(len(item.sketch))}) for item in group.rollouts)
        return group.model_copy(update={"rollouts": zeroed})

    async def _with_states_of_another_prompt(
        self, mining_window: MiningWindow, group: Group, assignment: Assignment
    ) -> Group | None:
        (other,) = self.assignments(mining_window, [assignment.index + 1])
        checks = await self._check(mining_window, group, replace(assignment, prompt=other.prompt))
        pairs = zip(group.rollouts, checks, strict=True)
        rollouts = tuple(item.model_copy(update={"sketch": sketch.rounded(check.sketch)}) for item, check in pairs)
        false_group = group.model_copy(update={"rollouts": rollouts})
        return false_group if await self._is_plain(mining_window, false_group, "sketch") else None

    async def _edited(
        self, mining_window: MiningWindow, group: Group, assignment: Assignment, rank: Callable[[Edit], float]
    ) -> Group | None:
        """Return the group with edits, one in a rollout, until honest validators plainly refuse it; None if they would
        not. Of each rollout and among these, the edits with the lowest ranks come first.
        """
        edits = []
        for rollout, check in enumerate(await self._check(mining_window, group, assignment, rivals=True)):
            tokens = group.rollouts[rollout].tokens
            words, positions = sampling.token_places([assignment.seeds[rollout]], [len(tokens)])
            rivals, shortfalls = check.rivals[:, 0].to(torch.int64).cpu(), check.rivals[:, 1].tolist()
            noise = sampling.gumbel(sampling.hash_pairs(words, positions, torch.stack([rivals, torch.tensor(tokens)])))
            columns = zip(rivals.tolist(), shortfalls, (noise[0] - noise[1]).tolist(), strict=True)
            candidates = [
                Edit(rollout, position, rival, shortfall, self._evidence(shortfall), change)
                for position, (rival, shortfall, change) in enumerate(columns)
            ]
            # All rollouts together must have enough evidence.
            candidates = [edit for edit in candidates if edit.evidence * len(group.rollouts) > self._plain_evidence]
            candidates.sort(key=lambda edit: abs(edit.noise_change))
            edits += [min(candidates[:_MATCHES], key=rank)] if candidates else []
        rollouts, evidence = list(group.rollouts), 0
        for edit in sorted(edits, key=rank):
            generation = await self._continued(mining_window, group.rollouts[edit.rollout], edit, assignment)
            rollouts[edit.rollout] = (await self.rollouts(mining_window, assignment, [generation]))[0]
            evidence += edit.evidence
            false_group = group.model_copy(update={"rollouts": tuple(rollouts)})
            if evidence > self._plain_evidence and await self._is_plain(mining_window, false_group, "margin"):
                return false_group
        return None

    async def _check(
        self, mining_window: MiningWindow, group: Group, assignment: Assignment, *, rivals: bool = False
    ) -> list[Check]:
        """Return what the policy says of the rollouts of a group behind the prompt of an assignment."""
        requests = check_requests(group, assignment, self.sketch_key(mining_window))
        return await self.engine.check(requests, CheckRules(self.task.run.sampling.params(), rivals=rivals))

    def _evidence(self, shortfall: float) -> int:
        """Return the evidence that a margin gives by itself, in the row in which that is the least."""
        value = shortfall / _CAUTION / sampling.NOISE_UNIT
        tables = [(table, bisect_left(table.beyond, value)) for table in (row.margin for row in self._rows)]
        return min(
            max(alternative.scores[reached - 1] for alternative in table.alternatives) if reached else 0
            for table, reached in tables
        )

    async def _continued(
        self, mining_window: MiningWindow, rollout: Rollout, edit: Edit, assignment: Assignment
    ) -> Generation:
        """Return a rollout with an edit, and the tokens that the policy samples behind it."""
        params, key = self.task.run.sampling.params(), self.sketch_key(mining_window)
        tokens = (*rollout.tokens[: edit.position], edit.token)
        # The state from which the edited token would be drawn depends on the tokens before it alone.
        own_sketch = rollout.sketch[: sketch.BYTES_PER_TOKEN * len(tokens)]
        if not params.is_complete(tokens):
            request = Request(assignment.prompt + tokens, assignment.seeds[edit.rollout], key, len(tokens))
            rest = replace(params, max_tokens=params.max_tokens - len(tokens))
            (behind,) = await self.engine.generate([request], rest)
            tokens += behind.tokens
            own_sketch += (await self.sketches(mining_window, [behind]))[0]
        return Generation(tokens, torch.empty(len(tokens), 0), (), own_sketch)

    async def _is_plain(self, mining_window: MiningWindow, group: Group, statistic: StatisticName) -> bool:
        """Return whether one statistic of a group is far beyond what honest validators of any arithmetic accept."""
        window, randomness = mining_window.window, mining_window.randomness
        judge = Judge(self.task, self.engine, window, randomness, mining_window.shares_of)
        item = group, content_digest(group.to_frame())
        for row in self._rows:
            (judgement,) = await judge.judge([item], row)
            if max(weigh_tally(judgement.counts.tally(statistic), row.table(statistic))) <= self._plain_evidence:
                return False
        return True


async def note_group(
    task: Task,
    engine: Engine,
    group: Group,
    arithmetic: str,
    randomness: bytes,
    trainer_state: ObjectStore,
    shares_of: SharesOf,
) -> None:
    """Note a group that an engine accepts as a validator's would: another one may be by other weights of the same
    number. Nothing is noted if the run has no bounds for what the engine computes.

    R1 has not come yet. It selects all rollouts if they are short, whatever it is; of longer ones, none is continued.
    """
    run, rows, version = task.run, task.run.proof.table, engine.version
    own = engine.arithmetic
    fitting = sorted((row for row in rows if row.miner == arithmetic), key=lambda row: row.validator != own)
    if group.version != version or not fitting or not any(own in row.pair for row in rows):
        return
    digest = content_digest(group.to_frame())
    draw = b"" if challenge.continues_all(run.sampling.max_tokens) else None
    judge = Judge(task, engine, group.window, randomness, shares_of, draw)
    (judgement,) = await judge.judge([(group, digest)], fitting[0])
    if not judgement.accepted:
        return
    place = group.window, randomness, group.miner, group.index, shares_of(version)
    assignment: Assignment = await task.run_sync(task.assign, *place)
    requests = check_requests(group, assignment, judge.sketch)
    rules = CheckRules(run.sampling.params(), *filter_bounds(fitting[0]), rivals=True)
    checks = await engine.check(requests, rules)
    leads = (whole_margins(check.rivals[:, 1].cpu().numpy(), sampling.NOISE_UNIT) for check in checks)
    note = CanaryNote(
        arithmetic=own, judgement=judgement, leads=tuple(values.astype("<i4").tobytes() for values in leads)
    )
    if engine.version == version:
        await trainer_state.put(canary_path(group.window, group.index, digest), note.to_bytes())


AUDIT_PPM: Final = 10_000
"""Groups of strangers that the canary computes, in millionths."""

_AT_ONCE: Final = 4  # miners whose groups are being read


@dataclass(frozen=True)
class CanaryAudit:
    """Computes picked groups, window after window, with the node, task and engine of the canary."""

    node: Node
    task: Task
    engine: Engine
    trainer: SigningKey  # the key whose secret picks groups
    trainer_state: ObjectStore  # where the groups are noted
    shares_of: SharesOf  # by which the groups of a version draw their strata
    share_ppm: int = AUDIT_PPM  # of the groups that are picked, in millionths

    async def run(self) -> None:
        node, window = self.node, -1
        while True:
            window = await node.next_window(window)
            await node.clock.sleep_until(node.run.deadline_time(window))
            try:
                await self._audit(window)
            except (StoreError, BeaconError) as error:
                node.telemetry.event("commitments-unread", window=window, error=str(error))

    async def _audit(self, window: int) -> None:
        node, version = self.node, self.engine.version
        randomness = await node.randomness(node.run.schedule.opening(window))
        picked: dict[bytes, list[int]] = {}
        for item in await find_participants(node, "miner"):
            if item.version == version and item.key != node.key.public:
                indices = range(min(item.groups, node.run.groups))
                picked[item.key] = [index for index in indices if self._picks(window, item.key, index)]

        async def audit(miner: bytes) -> None:
            try:
                await self._audit_miner(window, randomness, miner, picked[miner])
            except NotFoundError:
                return
            except (StoreError, ProtocolError, TooLargeError, EngineError, SandboxLimitError) as error:
                node.telemetry.event("commitment-unread", miner=miner.hex(), window=window, error=str(error))

        await gather(audit, [miner for miner, indices in picked.items() if indices], at_once=_AT_ONCE)

    def _picks(self, window: int, miner: bytes, index: int) -> bool:
        coin = self.trainer.derive("audit coin", window, int.from_bytes(miner[:8], "little"), index)
        return int.from_bytes(coin[:4], "little") * 1_000_000 < self.share_ppm << 32

    async def _audit_miner(self, window: int, randomness: bytes, miner: bytes, indices: list[int]) -> None:
        """Note the picked groups that a miner has committed to."""
        commitment = (await fetch_record(self.node, Commitment, paths.commitment(miner, window))).record
        path = paths.batch(miner, window, commitment.batch)
        for index in indices:
            if index < len(commitment.groups):
                offset, size = commitment.extent(index)
                frame = await self.node.store.get(path, size, offset=offset, size=size)
                group = open_group(frame, commitment, index, self.node.run.group_bytes)
                arithmetic, shares = commitment.arithmetic, self.shares_of
                await note_group(self.task, self.engine, group, arithmetic, randomness, self.trainer_state, shares)
