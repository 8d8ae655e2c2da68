"""The validator: in every window, see what was committed in time, let the second round pick, judge, and publish.

Watching and judging are two tasks. A case counts only if its commitment was seen before the second round was out, so watching
never waits for judging; judging may fall behind, up to the round after which nobody waits for a verdict.
"""

from dataclasses import dataclass

import trio

from protocol import paths
from protocol.digest import content_digest
from protocol.errors import GapError, ProtocolError
from protocol.signing import sign
from protocol.verdict import Evaluation, Reason, Summary, Verdict
from roles.assignment import Task
from roles.follower import Follower, Held
from roles.node import Node
from roles.ports import Engine, EngineError, StoreError
from roles.serving import keep_fresh, serve
from roles.validator.audit import Auditor, condemned
from roles.validator.docket import Case, docket
from roles.validator.judge import Judge
from roles.validator.ledger import Ledger

ANNOUNCED_SECONDS = 600.0
_BACKLOG_WINDOWS = 64  # windows seen and not judged yet
_REMEMBERED_WORKS = 100_000  # work digests of accepted groups, to name copies


@dataclass(frozen=True)
class ValidatorSettings:
    """What a validator's operator decides.

    Attributes:
        evaluation_problems: held-out problems solved greedily for every version that serves a window; 0 for none.
        poll_seconds: how often to look for a newer version.
    """

    evaluation_problems: int
    poll_seconds: float


class Validator:
    """One validator of a run."""

    def __init__(
        self, node: Node, follower: Follower, engine: Engine, task: Task, ledger: Ledger, settings: ValidatorSettings
    ) -> None:
        self._node = node
        self._follower = follower
        self._engine = engine
        self._task = task
        self._ledger = ledger
        self._settings = settings
        self._works: dict[bytes, bytes] = {}
        self._evaluation: Evaluation | None = None

    async def run(self) -> None:
        """Validate window after window, for ever."""
        node = self._node
        seen, to_judge = trio.open_memory_channel[tuple[int, list[Case]]](_BACKLOG_WINDOWS)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(node.keep_announced, "validator", ANNOUNCED_SECONDS)
            nursery.start_soon(keep_fresh, node, self._follower, self._settings.poll_seconds)
            nursery.start_soon(self._watch, seen)
            async for window, cases in to_judge:
                idle = not to_judge.statistics().current_buffer_used
                await self._window(window, cases, evaluate=idle)

    async def _watch(self, seen: "trio.MemorySendChannel[tuple[int, list[Case]]]") -> None:
        """Note every window's commitments before its second round is out; whoever was not looking then abstains."""
        node = self._node
        window = max(0, self._ledger.newest + 1, node.window())
        while True:
            await node.clock.sleep_until(node.run.deadline_time(window))
            draw_due = node.run.beacon.due(node.run.schedule.audit(window))
            try:
                cases = [case for case in await docket(node, window) if case.seen < draw_due]
                seen.send_nowait((window, cases))
            except (StoreError, trio.WouldBlock) as error:
                node.telemetry.event("window-missed", window=window, error=str(error) or "too far behind")
            window = max(window + 1, node.window())

    async def _window(self, window: int, cases: list[Case], evaluate: bool) -> None:
        node, schedule = self._node, self._node.run.schedule
        try:
            if node.clock.now() >= node.run.beacon.due(schedule.verdict(window)):
                node.telemetry.event("window-abandoned", window=window, error="nobody waits for its verdicts any more")
                return
            version, weights = await self._expected(window)
            opening = await node.randomness(schedule.opening(window))
            draw = await node.randomness(schedule.audit(window))
            began = trio.current_time()
            verdicts = await self._judge(window, version, cases, opening, draw)
            seconds = trio.current_time() - began
            await self._ledger.record(window, verdicts)
            if evaluate:
                await self._evaluate(weights)
            await self._summarize(window, weights, verdicts, seconds)
        except (StoreError, ProtocolError, EngineError) as error:
            node.telemetry.event("window-abandoned", window=window, error=str(error))

    async def _expected(self, window: int) -> tuple[int, Held]:
        """The version that serves a window, rebuilt.

        Raises:
            StoreError, ProtocolError: it cannot be had.
        """
        version = self._follower.chain.version_for(window)
        return version, await self._follower.hold(version)

    async def _judge(self, window: int, version: int, cases: list[Case], opening: bytes, draw: bytes) -> list[Verdict]:
        """Judge every case, those of one version together, and publish each verdict."""
        node = self._node
        auditor = Auditor(node, Judge(self._task, self._engine, window, opening), draw, self._works)
        verdicts: list[Verdict] = []
        undecided: list[tuple[Verdict, dict[int, bytes]]] = []
        for case in sorted(cases, key=lambda case: (-case.commitment.record.version, case.commitment.record.miner)):
            commitment = case.commitment.record
            held = await self._acceptable(commitment.version, version)
            if held is None or len(commitment.groups) > node.run.groups:
                reason = Reason.VERSION if held is None else Reason.QUOTA
                verdicts.append(await self._publish(condemned(node, case, draw, reason)))
                continue
            await serve(node, self._engine, held)
            verdict, strange = await auditor.audit(case)
            if strange:
                undecided.append((verdict, strange))
            else:
                verdicts.append(await self._publish(verdict))
        for verdict, strange in undecided:
            verdicts.append(await self._publish(auditor.name_copies(verdict, strange)))
        self._forget_old_works()
        return verdicts

    async def _acceptable(self, claimed: int, serving: int) -> Held | None:
        """The weights of a version that may serve the window; None where it may not.

        Raises:
            StoreError, ProtocolError: it may, and cannot be rebuilt.
        """
        if not serving - self._node.run.schedule.max_lag <= claimed <= serving:
            return None
        try:
            return await self._follower.hold(claimed)
        except GapError:
            return None

    def _forget_old_works(self) -> None:
        excess = len(self._works) - _REMEMBERED_WORKS
        for work in list(self._works)[: max(0, excess)]:
            del self._works[work]

    async def _publish(self, verdict: Verdict) -> Verdict:
        node = self._node
        path = paths.verdict(node.key.public, verdict.window, verdict.miner)
        await node.publish(path, sign(verdict, node.key))
        accepted = sum(judgement.accepted for judgement in verdict.judgements)
        node.telemetry.event(
            "verdict",
            window=verdict.window,
            miner=verdict.miner.hex()[:8],
            accepted=accepted,
            rejected=len(verdict.judgements) - accepted,
            reasons=",".join(sorted({judgement.reason for judgement in verdict.judgements if judgement.reason})),
        )
        return verdict

    async def _evaluate(self, weights: Held) -> None:
        """Greedy decoding of the held-out problems, once for each version."""
        count = self._settings.evaluation_problems
        if count == 0 or (self._evaluation is not None and self._evaluation.version == weights.version):
            return
        task = self._task
        problems = [task.environment.held_out(index) for index in range(count)]
        prompts = [task.tokenizer.encode(problem.prompt) for problem in problems]
        await serve(self._node, self._engine, weights)
        completions = await self._engine.greedy(prompts, task.run.sampling.params())
        solved = sum(reward >= 1.0 for reward in await task.rewards_of(list(zip(problems, completions, strict=True))))
        self._evaluation = Evaluation(version=weights.version, problems=count, solved=solved)

    async def _summarize(self, window: int, weights: Held, verdicts: list[Verdict], seconds: float) -> None:
        node = self._node
        evaluation = self._evaluation
        summary = Summary(
            run=node.run_id,
            window=window,
            version=weights.version,
            validator=node.key.public,
            weights=weights.digest,
            verdicts=tuple(sorted((verdict.miner, _body_digest(verdict)) for verdict in verdicts)),
            scores=tuple(sorted(self._ledger.shares().items())),
            evaluation=evaluation if evaluation and evaluation.version == weights.version else None,
            verified_tokens=sum(judgement.tokens for verdict in verdicts for judgement in verdict.judgements),
            verify_ms=round(seconds * 1000),
            alarms=(),
        )
        await node.publish(paths.summary(node.key.public, window), sign(summary, node.key))


def _body_digest(verdict: Verdict) -> bytes:
    return content_digest(verdict.to_bytes())
