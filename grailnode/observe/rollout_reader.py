"""`grailnode rollouts`: the rollouts of a window, their rewards and the validators' reasons, from public objects."""

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from math import inf
from operator import itemgetter
from typing import Final

from grailnode import UserError
from grailnode.engine.policy import Tokenizer
from protocol import paths
from protocol.encoding import REWARD_UNIT
from protocol.errors import ProtocolError
from protocol.identity.participant import Announcement
from protocol.judging.verdict import Judgement, Verdict
from protocol.rollout.batch import Commitment, Group, open_group
from roles.gather import answer_of
from roles.node.identity import Node
from roles.participants import list_announced_keys
from roles.ports import NotFoundError, StoreError
from roles.records import fetch_record
from roles.rosters import Rosters
from roles.trainer.verified_batch import VerifiedGroup, verified_group

_SHOWN_MINERS: Final = 20


@dataclass(frozen=True)
class PublishedRollout:
    """One rollout as the storage shows it."""

    miner: bytes  # its public key
    window: int
    group: int
    index: int  # of the rollout in its group
    version: int
    prompt: str
    completion: str  # the text after the prompt, up to `end`; in an episode with the environment's replies
    tokens: int  # of the policy, with those that do not count
    reward: float  # the median of those that count at accepting validators; without any, the miner's claim
    reasons: tuple[str, ...]  # why validators rejected the group, each once; empty if none did
    accepted: int
    judged: int
    turns: tuple[tuple[str, str], ...] = ()  # the completion in turns, each with its speaker: 'policy' or 'environment'
    end: int | None = None  # how many tokens count, if a continuation after them gave the reward
    uncounted: str = ""  # the text after `end`

    @property
    def place(self) -> str:
        """MINER/WINDOW/GROUP, as `grailnode verify --rollout` takes it."""
        return f"{self.miner.hex()[:16]}/{self.window}/{self.group}"

    @property
    def status(self) -> str:
        """What the validators said about the rollout's group, in words."""
        if self.reasons:
            return f"rejected: {', '.join(self.reasons)}"
        accepted = f"accepted by {self.accepted}" if self.accepted else "not judged"
        return accepted if self.end is None else f"{accepted}, ends at token {self.end}: the reward is a continuation's"


@dataclass(frozen=True)
class JudgedGroup:
    """A group as the storage shows it, the SHA-256 of its frame, and the judgements on it by validator."""

    group: Group
    digest: bytes
    judgements: Mapping[bytes, Judgement]


@dataclass(frozen=True)
class ReadWindow:
    """The rollouts of a window, and which miners' work could not be read and why."""

    rollouts: tuple[PublishedRollout, ...]
    unread: tuple[str, ...]


async def find_miners(node: Node, miner: str = "") -> list[bytes]:
    """Return the keys that announced themselves, in ascending order; with a text, those that begin with it or announced
    this name. UserError if there is none.
    """
    keys = sorted(await list_announced_keys(node))
    chosen = [key for key in keys if key.hex().startswith(miner.lower())]
    if chosen or not miner:
        return chosen
    names = {}
    for key in keys:
        with suppress(StoreError, ProtocolError):  # a miner whose announcement is gone or broken has no name
            announcement = (await fetch_record(node, Announcement, paths.participant(key))).record
            if announcement.role == "miner":
                names[key] = announcement.name
    if chosen := [key for key, name in names.items() if name == miner]:
        return chosen
    names_text = ", ".join(f"{name or '(no name)'} {key.hex()[:8]}" for key, name in [*names.items()][:_SHOWN_MINERS])
    raise UserError(
        f"--miner {miner}: no miner has this name, or a key that begins so; there are: {names_text or 'none'}"
    )


@dataclass(frozen=True)
class ReadingLimits:
    """When a reading ends: after so many rollouts or characters of all miners, or so many seconds for one miner."""

    rollouts: float = inf
    characters: float = inf
    seconds: float = inf

    def are_reached(self, rollouts: Sequence[PublishedRollout]) -> bool:
        if len(rollouts) >= self.rollouts or self.characters == inf:
            return len(rollouts) >= self.rollouts
        sizes = (len(item.prompt) + 2 * len(item.completion) + len(item.uncounted) for item in rollouts)
        return sum(sizes) > self.characters


async def read_rollouts(
    node: Node, tokenizer: Tokenizer, window: int, miners: Sequence[bytes], limits: ReadingLimits | None = None
) -> ReadWindow:
    """Read the rollouts that some miners delivered for a window, up to the end of the group that reaches a limit."""
    limits = limits or ReadingLimits()
    rollouts: list[PublishedRollout] = []
    unread: list[str] = []
    for key in miners:
        if limits.are_reached(rollouts):
            break
        try:
            await answer_of(partial(_read_miner, node, tokenizer, window, key, limits, rollouts), limits.seconds)
        except NotFoundError:
            continue  # no work in this window, or it was deleted since
        except (StoreError, ProtocolError) as error:
            unread.append(f"{key.hex()[:16]}: {error}")
    return ReadWindow(tuple(rollouts), tuple(unread))


async def _read_miner(
    node: Node, tokenizer: Tokenizer, window: int, miner: bytes, limits: ReadingLimits, rollouts: list[PublishedRollout]
) -> None:
    async with aclosing(read_judged_groups(node, window, miner)) as groups:
        async for item in groups:
            rollouts += await node.run_sync(_published_rollouts, tokenizer, item, node.run.exact_rewards)
            if limits.are_reached(rollouts):
                break


def _published_rollouts(tokenizer: Tokenizer, item: JudgedGroup, exact: bool) -> list[PublishedRollout]:
    group, judgements = item.group, item.judgements.values()
    accepting = tuple(judgement for judgement in judgements if judgement.accepted)
    verified = verified_group(group, item.digest, accepting, exact=exact)
    rewards = verified.rewards if verified else [rollout.reward / REWARD_UNIT for rollout in group.rollouts]
    ends = [len(tokens) // 4 for tokens in verified.completions] if verified else ()
    published = []
    for index, rollout in enumerate(group.rollouts):
        end = ends[index] if ends and ends[index] < len(rollout.tokens) else None
        drawn = groupby(zip(rollout.sequence[:end], rollout.drawn[:end], strict=True), itemgetter(1))
        published.append(
            PublishedRollout(
                miner=group.miner,
                window=group.window,
                group=group.index,
                index=index,
                version=group.version,
                prompt=tokenizer.decode(group.prompt_tokens),
                completion=tokenizer.decode(rollout.sequence[:end]),
                tokens=len(rollout.tokens),
                reward=rewards[index],
                reasons=tuple(dict.fromkeys(judgement.reason for judgement in judgements if judgement.rejected)),
                accepted=sum(judgement.accepted for judgement in judgements),
                judged=len(judgements),
                turns=tuple(
                    ("policy" if is_drawn else "environment", tokenizer.decode(tuple(token for token, _ in tokens)))
                    for is_drawn, tokens in drawn
                ),
                end=end,
                uncounted="" if end is None else tokenizer.decode(rollout.sequence[end:]),
            )
        )
    return published


async def read_judged_groups(node: Node, window: int, miner: bytes) -> AsyncGenerator[JudgedGroup]:
    """Read the groups that a miner delivered for a window one by one, with what validators said about them.

    Places and frames beyond the run's limits, which no validator accepts, are left out.
    """
    signed = await fetch_record(node, Commitment, paths.commitment(miner, window))
    commitment = signed.record
    verdicts = await _verdicts(node, signed.digest, window, miner)
    path = paths.batch(miner, window, commitment.batch)
    for place, (digest, size) in enumerate(commitment.groups[: node.run.groups]):
        if size > node.run.group_bytes:
            continue
        frame = await node.store.get(path, size, offset=commitment.extent(place)[0], size=size)
        group = await node.run_sync(open_group, frame, commitment, place, node.run.group_bytes)
        judgements = {
            verdict.validator: judgement
            for verdict in verdicts
            for judgement in verdict.judgements
            if judgement.index == place and judgement.digest == digest
        }
        yield JudgedGroup(group, digest, judgements)


async def read_verified_groups(node: Node, window: int) -> list[VerifiedGroup]:
    """Read the groups of a window that a quorum of the validators to which they were dealt accepted, as a trainer
    learns from them.

    What cannot be read is left out.
    """
    roster = await Rosters(node).get(window)
    draw = await node.randomness(node.run.schedule.audit(window))
    exact = node.run.exact_rewards
    verified: list[VerifiedGroup] = []
    for miner in sorted(await list_announced_keys(node)):
        with suppress(StoreError, ProtocolError):
            async for item in read_judged_groups(node, window, miner):
                judges = roster.judges_of(node.run_id, window, draw, miner, item.group.index)
                accepting = tuple(
                    judgement
                    for validator, judgement in item.judgements.items()
                    if judgement.accepted and validator in judges
                )
                if len(accepting) >= node.authority.quorum:
                    group = verified_group(item.group, item.digest, accepting, exact=exact)
                    verified += [] if group is None else [group]
    return verified


async def _verdicts(node: Node, commitment: bytes, window: int, miner: bytes) -> list[Verdict]:
    """Return the validators' verdicts on a commitment; those that cannot be read are left out."""
    verdicts: list[Verdict] = []
    for validator in node.authority.validators:
        try:
            verdict = (await fetch_record(node, Verdict, paths.verdict(validator, window, miner))).record
        except (StoreError, ProtocolError):
            continue
        if verdict.commitment == commitment:
            verdicts.append(verdict)
    return verdicts
