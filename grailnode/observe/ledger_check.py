"""`grailnode verify --ledger`: check everything that a validator wrote about its windows, from public objects alone."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Final

from protocol import paths
from protocol.encoding import content_digest
from protocol.errors import GapError, ProtocolError, error_context
from protocol.judging.accounts import Accounts
from protocol.judging.evidence import NO_EVIDENCE
from protocol.judging.ledger import Amendment, LedgerRow, Seal, Summary, accepted_groups
from protocol.judging.verdict import (
    OWN_REASONS,
    Judgement,
    Reason,
    ReauditVerdict,
    Verdict,
    joint_rejection,
    own_rejection,
)
from protocol.proof import ProofSpec, Thresholds
from protocol.rollout import challenge
from protocol.rollout.batch import Commitment
from roles.gather import answer_of, gather
from roles.node.identity import Node
from roles.policy.follower import Follower
from roles.ports import BeaconError, LineReporter, NotFoundError, StoreError
from roles.records import FOREIGN, fetch_record
from roles.rosters import fetch_witnessed_seals

_BEACON_SECONDS: Final = 10.0  # for a round: a run's own beacon keeps the newest ones alone
_ROUNDS_AT_ONCE: Final = 16


async def verify_ledger(node: Node, validator: bytes, say: LineReporter) -> int:
    """Check a validator's ledger: links, seals, rows against verdicts, verdicts against their own numbers, scores
    against rows. Return the number of summaries, or raise the first contradiction as ProtocolError.

    Seals and verdicts expire, the oldest first, in a bucket that deletes old objects (`grailnode init --bucket`).
    """
    items = node.store.list(paths.kind_prefix(validator, "summaries"))
    ledger = [(await fetch_record(node, Summary, item.path)).record async for item in items]
    for before, after in itertools.pairwise(ledger):
        if after.previous != content_digest(before.to_bytes()):
            raise ProtocolError(f"does not follow the summary of window {before.window}", f"window {after.window}")
    rows = {(entry.window, row.miner): row for entry in ledger for row in entry.rows}
    whole = bool(ledger) and ledger[0].previous == b""
    follower = await Follower(node, allow_expired=True).open()
    if node.run.difficulty is not None:  # the chain's tables say how groups drew their strata
        await follower.refresh()
    accounts = Accounts(node.run.scoring, node.run.proof)
    draws = await _read_draws(node, ledger)
    expired = 0  # summaries, the oldest ones, whose seals and verdicts are no longer in storage
    unscored = 0  # summaries whose scores follow from some that storage does not show
    complete = whole  # whether the accounts have all that counts in them
    for place, summary in enumerate(ledger):
        try:
            draw = draws.get(summary.window)
            verdicts = await _check_summary(node, validator, summary, draw, accounts, complete=complete)
            if place or whole:
                await _check_strata(node, summary, ledger[place - 1] if place else None, verdicts, follower)
            for amendment in summary.amendments:
                row = rows.get((amendment.window, amendment.miner))
                if row is not None or whole or amendment.window >= ledger[0].window:
                    await _check_amendment(node, summary, amendment, row, accounts)
        except NotFoundError:
            if expired < place:
                raise
            expired += 1
        accounts.add(summary)
        complete = whole or ledger[0].window <= summary.window - node.run.scoring.windows
        unscored += not complete
        if complete and summary.scores != accounts.scores():
            raise ProtocolError("the scores do not follow from the rows", f"window {summary.window}")
    if ledger:
        say(f"validator {validator.hex()[:16]}: {_result(ledger, expired, len(ledger) - len(draws), unscored)}")
    return len(ledger)


def _result(ledger: Sequence[Summary], expired: int, undrawn: int, unscored: int) -> str:
    verdicts = sum(1 for summary in ledger[expired:] for row in summary.rows if row.verdict)
    note = f"; of the first {expired} only links and scores, as their verdicts have expired" if expired else ""
    if undrawn:
        note += f"; picks unchecked in {undrawn} windows, whose second rounds the beacon did not give"
    if unscored:
        note += (
            f"; scores and refusals of whole windows unchecked in {unscored} windows: storage lacks earlier summaries"
        )
    first, last = ledger[0].window, ledger[-1].window
    return f"windows {first} to {last}, {len(ledger)} summaries linked, {verdicts} verdicts{note}"


async def _check_strata(
    node: Node, summary: Summary, before: Summary | None, verdicts: Sequence[Verdict], follower: Follower
) -> None:
    """Raise ProtocolError if what a summary counts by stratum does not follow from its verdicts and the summary before;
    NotFoundError if that cannot be known any more.
    """
    rule, counts, head = node.run.difficulty, None, follower.chain.head
    place = f"window {summary.window} of validator {summary.validator.hex()[:16]}"
    if rule is not None:
        earlier, windows = (None, 0) if before is None else (before.strata, summary.window - before.window)
        if node.revisions.rewind is not None and head is not None and summary.version > head.version:
            return  # the roots have taken back the version that served then, and with it the table
        try:
            if follower.chain.manifest(summary.version).weights != summary.weights:
                return  # so they have, and the trainer has made another version of this number
            opening = await node.randomness(node.run.schedule.opening(summary.window))
            groups = list(accepted_groups(node.run_id, opening, verdicts, follower.shares))
        except (BeaconError, GapError) as error:
            raise NotFoundError(f"{place}: {error}") from error
        counts = rule.count(earlier, windows, groups)
    if summary.strata != counts:
        raise ProtocolError("what it counts by stratum does not follow from its verdicts", place)


async def _check_summary(
    node: Node, validator: bytes, summary: Summary, draw: bytes | None, accounts: Accounts, *, complete: bool
) -> list[Verdict]:
    """Return the verdicts of a summary; ProtocolError if it is not sealed, or does not follow from what it lists, from
    the second round's randomness, if that is known, and from the accounts before it, if these are complete.
    """
    verdicts: list[Verdict] = []
    clean_windows = accounts.clean_windows() if complete else None
    place = f"window {summary.window} of validator {validator.hex()[:16]}"
    await _check_sealed(node, validator, summary, place)
    for row in summary.rows:
        if row.pledged > node.run.groups:
            raise ProtocolError(f"miner {row.miner.hex()[:8]} cannot have pledged {row.pledged} groups", place)
        if row.verdict:
            verdict = (await fetch_record(node, Verdict, paths.verdict(validator, summary.window, row.miner))).record
            if LedgerRow.of(verdict) != row:
                raise ProtocolError(f"the row of miner {row.miner.hex()[:8]} is not what its verdict says", place)
            if verdict.validator_arithmetic != summary.arithmetic:
                raise ProtocolError(f"the verdict on miner {row.miner.hex()[:8]} is in another arithmetic", place)
            await _check_commitment(node, verdict, place)
            _check_version(verdict, summary.version, node.run.schedule.max_lag, place)
            thresholds = _check_reasons(verdict, node.run.proof, place)
            evidence = accounts.evidence_of(verdict.miner, verdict.miner_arithmetic)
            refusal = partial(joint_rejection, evidence=evidence, thresholds=thresholds)
            _check_groups(node, summary, verdict, draw, clean_windows, refusal, place)
            _check_joint_reason(verdict, refusal(verdict.judgements), place, complete=complete)
            verdicts.append(verdict)
    return verdicts


async def _check_sealed(node: Node, validator: bytes, summary: Summary, place: str) -> None:
    """Raise ProtocolError if a summary is not the only one that its validator sealed for its window."""
    digest = content_digest(summary.to_bytes())
    seal = await fetch_record(node, Seal, paths.seal(validator, summary.window))
    if seal.record.summary != digest:
        raise ProtocolError("not the summary that was sealed", place)
    for other in sorted(set(node.authority.validators) - {validator}):
        seals: set[tuple[bytes, bytes]] = set()
        with suppress(*FOREIGN):  # a bad witness is no evidence against anybody
            seals = await fetch_witnessed_seals(node, summary.window, other)
        if any(sealer == validator and other_digest != digest for sealer, other_digest in seals):
            raise ProtocolError(f"sealed twice: another seal was shown to validator {other.hex()[:16]}", place)


async def _check_amendment(
    node: Node, summary: Summary, amendment: Amendment, row: LedgerRow | None, accounts: Accounts
) -> None:
    """Raise ProtocolError if a re-audit is not of groups that a row left unaudited, differs from its verdict, or has no
    cause in the accounts before its summary.
    """
    miner, validator = amendment.miner, summary.validator
    place = f"amendment of window {amendment.window}, miner {miner.hex()[:8]}, validator {validator.hex()[:16]}"
    groups = amendment.accepted + amendment.rejected
    if row is None:
        raise ProtocolError("of a row that does not exist", place)
    if groups > row.dealt - row.audited or (groups and not amendment.verdict):
        raise ProtocolError("counts groups that the row had not left unaudited, or without a verdict on them", place)
    counts = amendment.window > summary.window - node.run.scoring.windows  # else it changes nothing
    if counts and (amendment.window, miner) not in accounts.unaudited(summary.window):
        why = "of a row that was rejected, has lapsed, is amended already or had no unaudited groups, or of a miner"
        raise ProtocolError(f"{why} that no later window rejects", place)
    if amendment.verdict:
        path = paths.reaudit(validator, amendment.window, miner)
        reaudit = (await fetch_record(node, ReauditVerdict, path)).record
        new_row = LedgerRow.of(reaudit)
        if any(getattr(new_row, name) != getattr(amendment, name) for name in ("verdict", "accepted", "rejected")):
            raise ProtocolError("not what its verdict says", place)
        await _check_commitment(node, reaudit, place)
        thresholds = _check_reasons(reaudit, node.run.proof, place)
        with suppress(NotFoundError):  # the first verdict may have expired
            first = (await fetch_record(node, Verdict, paths.verdict(validator, amendment.window, miner))).record
            if {item.index for item in first.judgements} & {item.index for item in reaudit.judgements}:
                raise ProtocolError("judges groups a second time", place)
            comparable = first.judgements if first.validator_arithmetic == reaudit.validator_arithmetic else ()
            reason = joint_rejection([*comparable, *reaudit.judgements], NO_EVIDENCE, thresholds)
            _check_joint_reason(reaudit, reason, place, complete=True)


async def _check_commitment(node: Node, verdict: Verdict, place: str) -> None:
    """Raise ProtocolError if a validator says of the commitment that it judged what the commitment does not say.

    The commitment is in its miner's hands: one that is gone, or another one than was judged, is no evidence.
    """
    try:
        signed = await fetch_record(node, Commitment, paths.commitment(verdict.miner, verdict.window))
    except (StoreError, ProtocolError):
        return
    committed, miner = signed.record, verdict.miner.hex()[:8]
    if signed.digest != verdict.commitment:
        return
    if verdict.miner_arithmetic != committed.arithmetic:
        judged = f"judges miner {miner} as one in {verdict.miner_arithmetic}"
        raise ProtocolError(f"{judged}, which committed to {committed.arithmetic}", place)
    if verdict.version != committed.version:
        judged = f"judges miner {miner} as one of version {verdict.version}"
        raise ProtocolError(f"{judged}, which committed to version {committed.version}", place)
    if verdict.submitted != min(verdict.pledged, len(committed.groups)):
        counted = f"counts {verdict.submitted} groups of miner {miner}"
        raise ProtocolError(f"{counted}, which committed to {len(committed.groups)}", place)
    if any(item.digest != committed.groups[item.index][0] for item in verdict.judgements):
        raise ProtocolError(f"judges groups that miner {miner} did not commit to", place)


async def _read_draws(node: Node, ledger: Sequence[Summary]) -> dict[int, bytes]:
    """Return the randomness of the second rounds of a ledger's windows, as far back as the beacon still has it."""
    draws: dict[int, bytes] = {}

    async def read(window: int) -> None:
        with suppress(BeaconError, StoreError):
            number = node.run.schedule.audit(window)
            draws[window] = await answer_of(partial(node.randomness, number), _BEACON_SECONDS)

    windows = [summary.window for summary in reversed(ledger)]
    for begin in range(0, len(windows), _ROUNDS_AT_ONCE):
        part = windows[begin : begin + _ROUNDS_AT_ONCE]
        await gather(read, part, at_once=len(part))
        if draws.keys().isdisjoint(part):
            break  # older ones have been deleted as well
    return draws


def _check_groups(
    node: Node,
    summary: Summary,
    verdict: Verdict,
    draw: bytes | None,
    clean_windows: Mapping[bytes, int] | None,
    joint_refusal: Callable[[Sequence[Judgement]], Reason | None],
    place: str,
) -> None:
    """Raise ProtocolError if a validator judged a group that was not dealt to it, by the roster of its own summary, or
    says that another number of groups was; or if it judged other ones than R1 picks, by what it knows of the miner:
    those that it does not judge count as those that it does.
    """
    if verdict.lapsed:
        return
    if draw is None and len(summary.roster) > summary.judges:
        return  # which groups were dealt to it is not known, either
    case, groups = (node.run_id, summary.window, draw or b"", verdict.miner), verdict.submitted
    dealt = summary.dealing.dealt_groups(*case, groups=groups, validator=summary.validator)
    judged, miner = {judgement.index: judgement for judgement in verdict.judgements}, verdict.miner.hex()[:8]
    if not judged.keys() <= set(dealt) or verdict.dealt != len(dealt):
        raise ProtocolError(f"judges groups of miner {miner} that were not dealt to it, or counts them falsely", place)
    if draw is None or clean_windows is None:
        return
    clean, is_refused = clean_windows.get(verdict.miner, 0), any(item.rejected for item in verdict.judgements)
    # An earlier release knew no bound, and may have judged more groups, all of which had room in its verdict.
    for share in {node.run.audit_share(clean, groups), node.run.proof.audit_share(clean)}:
        picked = challenge.audit_indices(*case, groups=groups, share_ppm=share, dealt=dealt)
        if not clean and picked and not (picked[0] in judged and judged[picked[0]].accepted):
            picked = picked[:1]  # of a stranger
        if judged.keys() >= set(picked):
            of_picked = [judged[index] for index in picked]  # the others may lower the evidence again
            if is_refused or judged.keys() <= set(picked) or joint_refusal(of_picked):
                return
    raise ProtocolError(f"judges other groups of miner {miner} than the window's second round picks", place)


def _check_version(verdict: Verdict, serving: int, max_lag: int, place: str) -> None:
    """Raise ProtocolError if a version is called lapsed that may be used in the window, or accepted when too old."""
    may_be_used = serving - max_lag <= verdict.version <= serving
    if verdict.lapsed and may_be_used:
        raise ProtocolError(f"calls version {verdict.version} lapsed, which may be used beside {serving}", place)
    if verdict.version < serving - max_lag and any(judgement.accepted for judgement in verdict.judgements):
        raise ProtocolError(f"accepts groups of version {verdict.version}, which is too old beside {serving}", place)


def _check_reasons(verdict: Verdict, proof: ProofSpec, place: str) -> Thresholds:
    """Return the thresholds of a verdict; ProtocolError if its validator accepts a group that its own numbers refuse by
    itself, or refuses one so that they accept.
    """
    miner = verdict.miner.hex()[:8]
    with error_context(place):
        row = proof.row(verdict.miner_arithmetic, verdict.validator_arithmetic)
    tables = [len(row.table(name).beyond) for name in row.statistics]
    for judgement in verdict.judgements:
        group = f"group {judgement.index} of miner {miner}"
        if judgement.accepted and [len(judgement.counts.tally(name).steps) for name in row.statistics] != tables:
            raise ProtocolError(f"accepts {group} without counting the steps of its thresholds", place)
        own = own_rejection(judgement.counts, row) or ""
        if judgement.reason != own and judgement.reason in ("", *OWN_REASONS.values()):
            judgement_text = f"refuses {group} ({judgement.reason})" if judgement.reason else f"accepts {group}"
            raise ProtocolError(f"{judgement_text} against its own numbers ({own or 'accepted'})", place)
    return row


def _check_joint_reason(verdict: Verdict, reason: Reason | None, place: str, *, complete: bool) -> None:
    """Raise ProtocolError if a validator accepts groups of a window that its numbers refuse together; or, if all that
    count are known, refuses some together that these accept.
    """
    miner = verdict.miner.hex()[:8]
    if reason and any(judgement.counts.computed and not judgement.rejected for judgement in verdict.judgements):
        raise ProtocolError(f"accepts miner {miner} against its own numbers ({reason})", place)
    if complete and not reason and any(judgement.reason == Reason.WINDOW for judgement in verdict.judgements):
        raise ProtocolError(f"refuses miner {miner} ({Reason.WINDOW}) against its own numbers (accepted)", place)
