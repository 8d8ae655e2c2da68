"""The trainer's checks of the validators: canaries show who accepts false work, and contradictions between validators
are published in a report. Which validators do not seal is reported when that begins and when it ends.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from protocol import paths
from protocol.errors import error_context
from protocol.judging.ledger import LedgerRow
from protocol.judging.report import CanaryFailure, Disagreement, ValidatorReport, canary_key, is_false_group
from protocol.judging.verdict import Judgement, Reason, Verdict
from protocol.limits import MAX_GROUPS
from protocol.rollout.challenge import continues_all
from protocol.run import RunManifest
from roles.node.identity import Node
from roles.ports import Telemetry
from roles.trainer.collect.logprob_bias import Computed, EndEvidence, LogprobBias, weigh_ends
from roles.trainer.collect.quorum import LogprobRule, Opinion, logprobs_agree, split_by_logprobs
from roles.trainer.spool import CANARIES, OTHER_VERSION, CanaryNote, canary_path
from roles.trainer.verified_batch import whole_logprobs

DISTRUSTED = "distrusted/"  # {validator}: the verdict for which it is distrusted
_MAX_REPORT_KEYS = 1 << 17  # of validators in a report's disagreements: 4 MiB of the 8 that a record may have


class ValidatorMonitor:
    """Compares validators' verdicts with each other, and with what is true of the trainer's own canaries."""

    def __init__(self, node: Node, canaries: int) -> None:
        self._node = node
        self.canaries = {canary_key(node.key, number).public for number in range(canaries)}
        self.distrusted_validators: set[bytes] = set()
        """Validators that accepted false work of a canary, or whose log-probabilities, rewards or ends are not those
        that this trainer computed: their verdicts do not count.
        """
        self._examined_verdicts: dict[int, set[tuple[bytes, bytes]]] = {}  # by window: (canary, validator)
        self._compared_miners: dict[int, set[bytes]] = {}  # by window
        # by window, the opinions that accept each group, and what they compute of it
        self._accepted_groups: dict[int, list[tuple[list[Opinion], dict[bytes, Computed]]]] = {}
        self._disagreements: dict[int, list[Disagreement]] = {}  # by window
        self._canary_failures: dict[int, list[CanaryFailure]] = {}  # by window
        self._bias = LogprobBias(node.state, node.run_sync)

    @property
    def logprob_rule(self) -> LogprobRule:
        """When the log-probabilities of two validators agree, by what is known of these."""
        return LogprobRule(self._node.run.proof, self._bias.biased_pairs)

    async def open(self) -> None:
        """Read what was known of the validators before a restart."""
        await self._bias.open()
        async for item in self._node.state.list(DISTRUSTED):
            self.distrusted_validators.add(paths.key_at_end(item.path))

    async def examine(self, window: int, canary: bytes, verdicts: Mapping[bytes, Verdict]) -> None:
        """Compare verdicts on a canary, by validator, with what is true of its groups; each verdict once."""
        examined_verdicts = self._examined_verdicts.setdefault(window, set())
        for validator, verdict in sorted(verdicts.items()):
            if (canary, validator) in examined_verdicts:
                continue
            failures = self._failures(window, validator, verdict)
            if any(failure.accepted for failure in failures):
                await self._distrust(validator, verdict.to_bytes())
            examined_verdicts.add((canary, validator))
            self._add_failures(window, failures, verdict)

    def _failures(self, window: int, validator: bytes, verdict: Verdict) -> list[CanaryFailure]:
        false = {item.index for item in verdict.judgements if is_false_group(self._node.key, window, item.index)}
        return [
            _failure(validator, verdict.miner, item, "verdict")
            for item in verdict.judgements
            if (item.accepted if item.index in false else item.rejected)
            and not (false and item.reason == Reason.WINDOW)  # a true group that was rejected with the false ones
        ]

    def _add_failures(self, window: int, failures: Sequence[CanaryFailure], verdict: Verdict) -> None:
        self._canary_failures.setdefault(window, []).extend(failures)
        for failure in failures:
            self._node.telemetry.event(
                "canary-failure",
                window=window,
                validator=failure.validator.hex(),
                index=failure.index,
                accepted=failure.accepted,
                about=failure.about,
                verdict=LedgerRow.of(verdict).verdict.hex(),
            )

    async def _distrust(self, validator: bytes, verdict: bytes) -> None:
        self.distrusted_validators.add(validator)
        await self._node.state.put(DISTRUSTED + validator.hex(), verdict)

    async def finish(self, window: int) -> None:
        """Compare a finished window with the trainer's own canary, and count differences to one side."""
        own, proof, accepted_groups = self._node.key.public, self._node.run.proof, self._accepted_groups.get(window, [])
        noted_paths = [item.path async for item in self._node.state.list(f"{CANARIES}{window:010d}-")]
        notes = dict[str, CanaryNote]()
        for path in noted_paths:
            with error_context(f"{path} {OTHER_VERSION}"):
                notes[path] = CanaryNote.from_bytes(await self._node.state.get(path, CanaryNote.max_bytes))
        noted: dict[bytes, Opinion] = {}  # by validator, about the last group that the canary has computed
        noted_groups = []
        for opinions, sums in accepted_groups:
            group = opinions[0].judgement
            if (note := notes.get(canary_path(window, group.index, group.digest))) is not None:
                noted |= {item.validator: item for item in opinions}
                noted_groups.append((opinions, sums, note))
        ends, false = await self._node.run_sync(_compare_with_canary, self._node.run, own, noted_groups)
        nodes = len(self._node.authority.validators) + 1
        await self._bias.count(window, [sums for _, sums in accepted_groups], ends, proof, nodes)
        biased_pairs = self._bias.biased_pairs
        biased = {validator: item for validator, item in noted.items() if {own, validator} in biased_pairs}
        for validator, opinion in sorted((biased | false).items()):
            await self._distrust(validator, opinion.verdict.to_bytes())
            miner, group = opinion.verdict.miner, opinion.judgement
            if miner in self.canaries:
                self._add_failures(window, [_failure(validator, miner, group, "logprobs")], opinion.verdict)
            else:
                self._add(window, miner, (group.index, group.digest), "logprobs", [own], [validator])

    async def forget(self, window: int) -> None:
        """Delete what the canary has noted on windows up to one, which has closed."""
        noted_paths = [item.path async for item in self._node.state.list(CANARIES)]
        for path in noted_paths:
            if paths.window_of(path.removeprefix(CANARIES)) <= window:
                await self._node.state.delete(path)

    def uncompared(self, window: int, miners: Iterable[bytes]) -> set[bytes]:
        """Return the miners of a window whose verdicts were not compared yet."""
        return set(miners) - self._compared_miners.get(window, set())

    def compare(self, window: int, miner: bytes, verdicts: Mapping[bytes, Verdict], *, is_paid: bool) -> None:
        """Note where the verdicts on a miner's window, by validator, contradict each other; once for each miner. Only
        groups by which it earns are evidence of bias: other keys are free, and could show those alone in which an
        honest validator happens to differ to one side.
        """
        if miner in self._compared_miners.setdefault(window, set()):
            return
        self._compared_miners[window].add(miner)
        opinions_by_group: dict[tuple[int, bytes], list[Opinion]] = {}
        for _, verdict in sorted(verdicts.items()):
            for judgement in verdict.judgements:
                opinions_by_group.setdefault((judgement.index, judgement.digest), []).append(
                    Opinion(judgement, verdict)
                )
        for group, opinions in sorted(opinions_by_group.items()):
            accepting = [opinion for opinion in opinions if opinion.judgement.accepted]
            rejecting = [opinion for opinion in opinions if opinion.judgement.rejected]
            if accepting:
                is_evidence = is_paid or miner in self.canaries
                judgements = {item.validator: (item.verdict.validator_arithmetic, item.judgement) for item in accepting}
                sums = _computed(judgements, has_rewards=self._node.run.exact_rewards) if is_evidence else {}
                self._accepted_groups.setdefault(window, []).append((accepting, sums))
            if accepting and rejecting:
                self._add(window, miner, group, "verdict", _validators(accepting), _validators(rejecting))
            agreeing, others = split_by_logprobs(accepting, self.logprob_rule)
            if others:
                self._add(window, miner, group, "logprobs", _validators(agreeing), _validators(others))

    def _add(
        self,
        window: int,
        miner: bytes,
        group: tuple[int, bytes],
        about: Literal["verdict", "logprobs"],
        accepting: Sequence[bytes],
        rejecting: Sequence[bytes],
    ) -> None:
        disagreement = Disagreement(
            miner=miner,
            index=group[0],
            digest=group[1],
            about=about,
            accepting=tuple(accepting),
            rejecting=tuple(rejecting),
        )
        self._disagreements.setdefault(window, []).append(disagreement)
        self._node.telemetry.event(
            "validators-disagree",
            window=window,
            miner=miner.hex()[:8],
            index=group[0],
            about=about,
            accepting=len(accepting),
            rejecting=len(rejecting),
        )

    def report(self, window: int) -> ValidatorReport | None:
        """Return the report on a finished window, cut to what a record may hold; None if there is nothing to report."""
        node = self._node
        self._examined_verdicts.pop(window, None)
        self._compared_miners.pop(window, None)
        self._accepted_groups.pop(window, None)
        disagreements, failures = self._disagreements.pop(window, []), self._canary_failures.pop(window, [])
        if not disagreements and not failures:
            return None
        key_counts = itertools.accumulate(len(item.accepting) + len(item.rejecting) for item in disagreements)
        fitting = [item for item, keys in zip(disagreements, key_counts, strict=True) if keys <= _MAX_REPORT_KEYS]
        reported_disagreements, reported_failures = fitting[:MAX_GROUPS], failures[:MAX_GROUPS]
        if len(reported_disagreements) < len(disagreements) or len(reported_failures) < len(failures):
            error = (
                f"it names {len(reported_disagreements)} of {len(disagreements)} disagreements and "
                f"{len(reported_failures)} of {len(failures)} canary failures"
            )
            node.telemetry.event("report-truncated", window=window, error=error)
        return ValidatorReport(
            run=node.run_id,
            window=window,
            trainer=node.key.public,
            disagreements=tuple(reported_disagreements),
            canary_failures=tuple(reported_failures),
        )


def _compare_with_canary(
    run: RunManifest, own: bytes, groups: Sequence[tuple[list[Opinion], dict[bytes, Computed], CanaryNote]]
) -> tuple[list[EndEvidence], dict[bytes, Opinion]]:
    """Return what the ends of groups add to the evidence against their validators, and for each validator with other
    log-probabilities than the trainer's canary its opinion of the last such group. `groups` has the opinions that
    accept each group, what they compute of it if it is evidence, and the canary's note, whose sums are added to that.
    """
    has_filters = run.sampling.params().filters.active
    has_rewards = run.exact_rewards and continues_all(run.sampling.max_tokens)  # else R1 decides what is continued
    ends: list[EndEvidence] = []
    false: dict[bytes, Opinion] = {}
    for opinions, sums, note in groups:
        computed = note.arithmetic, note.judgement.logprobs
        agrees = {item: logprobs_agree(computed, item, run.proof) for item in {item.computed for item in opinions}}
        false |= {item.validator: item for item in opinions if not agrees[item.computed]}
        if not sums:
            continue
        sums.update(_computed({own: (note.arithmetic, note.judgement)}, has_rewards=has_rewards))
        added: dict[tuple[str, tuple[int, ...]], tuple[int, ...]] = {}
        for item in opinions:
            claim = item.verdict.validator_arithmetic, item.judgement.ends
            row = run.proof.row_between(claim[0], note.arithmetic)
            if row is None:
                continue
            if claim not in added:
                added[claim] = weigh_ends(claim[1], note.leads, row, has_filters=has_filters)
            ends.append((item.validator, own, added[claim]))
    return ends, false


def _validators(opinions: Sequence[Opinion]) -> list[bytes]:
    return [opinion.validator for opinion in opinions]


def _computed(judgements: Mapping[bytes, tuple[str, Judgement]], *, has_rewards: bool) -> dict[bytes, Computed]:
    """Return what nodes compute of a group, without those whose log-probabilities cannot be right."""
    whole = {logprobs: whole_logprobs(logprobs) for logprobs in {item.logprobs for _, item in judgements.values()}}
    sums = {logprobs: int(values.sum()) for logprobs, values in whole.items() if values is not None}
    return {
        node: Computed(arithmetic, sums[item.logprobs], item.tokens, sum(item.rewards) if has_rewards else None)
        for node, (arithmetic, item) in judgements.items()
        if item.logprobs in sums
    }


def _failure(
    validator: bytes, canary: bytes, judgement: Judgement, about: Literal["verdict", "logprobs"]
) -> CanaryFailure:
    return CanaryFailure(
        validator=validator, canary=canary, index=judgement.index, accepted=judgement.accepted, about=about
    )


class Absences:
    """The validators whose seals do not come in time.

    `validator-excluded` with the first window that a validator does not seal in time stands for all that follow, until
    `validator-sealed-again` names the next window that it seals.
    """

    def __init__(self, telemetry: Telemetry) -> None:
        self._telemetry = telemetry
        self._first_windows: dict[bytes, int] = {}  # by absent validator
        self._sealed_windows: dict[bytes, int] = {}  # by validator, the newest that it sealed in time

    def add(self, validator: bytes, window: int) -> None:
        """Report a window that a validator did not seal in time, unless it is part of an absence that is reported."""
        first_window = self._first_windows.get(validator)
        if window < self._sealed_windows.get(validator, 0):  # windows may be read in any order
            self._report_exclusion(validator, window, "not sealed in time, but a later one was")
        elif first_window is None or window < first_window:
            self._first_windows[validator] = window
            self._report_exclusion(validator, window, "not sealed in time")

    def end(self, validator: bytes, window: int) -> None:
        """Report that a validator sealed a window in time, if it was absent before."""
        self._sealed_windows[validator] = max(window, self._sealed_windows.get(validator, 0))
        first_window = self._first_windows.get(validator, window)
        if first_window < window:
            del self._first_windows[validator]
            self._telemetry.event(
                "validator-sealed-again",
                window=window,
                validator=validator.hex()[:8],
                windows_missed=window - first_window,
            )

    def _report_exclusion(self, validator: bytes, window: int, error: str) -> None:
        self._telemetry.event("validator-excluded", window=window, validator=validator.hex()[:8], error=error)
