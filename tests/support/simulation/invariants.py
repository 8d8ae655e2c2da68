"""The invariants of a simulated network, checked after its last window. Each check yields a line for each violation.

The checks know more than any node: all puts that took effect, and the acknowledgements to each process.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator

from grailnode.observe.chain_check import verify_chain
from protocol import paths
from protocol.chain.manifest import Head, Manifest
from protocol.chain.verifier import Trust
from protocol.errors import ProtocolError
from protocol.identity.signing import Signed, open_signed
from protocol.judging.ledger import Summary
from protocol.judging.verdict import Reason, Verdict
from protocol.rollout.batch import Commitment
from roles.ports import StoreError
from roles.trainer.spool import INBOX, OUTCOMES
from roles.trainer.verified_batch import VerifiedBatch, WindowOutcomes
from tests.support.builders.snapshots import snapshot_views
from tests.support.faults.faulty_store import Fault
from tests.support.simulation.faulty_network import CHECKER, FAULTY_WINDOWS, WINDOWS, FaultyNetwork
from tests.support.simulation.network import BEGIN, key, randomness
from tests.support.simulation.trainer_events import NOT_SEALED, Exclusions, trained_groups

_TRAINER = key("trainer").public


async def violations(network: FaultyNetwork) -> list[str]:
    """Return a line for each violation of an invariant."""
    views, lines = _views(network)
    may_lose_puts = Fault.LOST_WRITE in network.fault_schedule.rates  # then followers wait for the next anchor
    lines += [*_bit_identical(network, views), *_trust_never_goes_back(network)]
    if not may_lose_puts:
        lines += _chain_in_order(network, views)
    lines += [*_verified_before_trained(network), *_trained_once(network), *_accounted_for(network)]
    lines += [*_honest_work_is_accepted(network), *_recovered(network)]
    try:
        await verify_chain(network.node(CHECKER), lambda line: None)
    except (ProtocolError, StoreError) as error:
        if not may_lose_puts:
            lines.append(f"chain: the published chain does not hold: {error}")
    return lines


def _views(network: FaultyNetwork) -> tuple[dict[int, bytes], list[str]]:
    """Return the digest of the trainer's BF16 view of each version, and a line for each version with two views."""
    digests_by_version = snapshot_views(network.states["trainer"].puts)
    violations = [
        f"weights: version {version} was handed over with two contents"
        for version, digests in digests_by_version.items()
        if len(digests) > 1
    ]
    return {version: min(digests) for version, digests in digests_by_version.items()}, violations


def _bit_identical(network: FaultyNetwork, views: dict[int, bytes]) -> Iterator[str]:
    for name, log in network.logs.items():
        for event in log.named("serving"):
            if event["weights"] != views[event["version"]].hex():
                yield f"weights: {name} served version {event['version']} with other bits than the trainer's"


def _manifests(network: FaultyNetwork) -> list[Signed[Manifest]]:
    puts = network.store.under(paths.kind_prefix(_TRAINER, "manifests"))
    return [open_signed(put.data, Manifest, network.run.authority.trainers) for put in puts]


def _chain_in_order(network: FaultyNetwork, views: dict[int, bytes]) -> Iterator[str]:
    """Check that the manifests form a chain without gaps, and that heads advance and list stored objects only."""
    by_version: dict[int, Signed[Manifest]] = {}
    for signed in _manifests(network):
        version = signed.record.version
        if by_version.setdefault(version, signed).digest != signed.digest:
            yield f"chain: version {version} has two manifests"
        if signed.record.weights != views.get(version):
            yield f"chain: version {version} is published with other weights than were handed over"
        previous = by_version.get(version - 1)
        if version and (previous is None or previous.digest != signed.record.previous):
            yield f"chain: version {version} was published before its predecessor, or has another one"
    newest = (0, -1)
    repeats_puts = Fault.DUPLICATE_WRITE in network.fault_schedule.rates  # which shows an old head to all nodes
    acknowledgement_times = network.context("trainer/upload").acknowledgements
    for put in network.store.under(paths.head(_TRAINER)):
        head = open_signed(put.data, Head, network.run.authority.trainers).record
        if (head.epoch, head.version) < newest and not repeats_puts:
            yield f"chain: the head went from (epoch, version) {newest} to {(head.epoch, head.version)}"
        newest = max(newest, (head.epoch, head.version))
        for version in range(head.base, head.version + 1):
            if version not in by_version:
                yield f"chain: a head shows version {version}, which has no manifest"
                continue
            manifest = by_version[version].record
            object_paths = [paths.manifest(_TRAINER, version, by_version[version].digest)]
            if manifest.patch is not None and version >= head.oldest_patch:
                object_paths += [paths.patch(_TRAINER, ref.digest) for ref in manifest.patch.parts]
            if version in head.anchors:
                object_paths += [paths.anchor(_TRAINER, ref.digest) for ref in manifest.anchor]
            early = [path for path in object_paths if acknowledgement_times.get(path, math.inf) > put.moment]
            if early:
                yield f"chain: a head shows version {version} before {early[0]} was stored"


def _trust_never_goes_back(network: FaultyNetwork) -> Iterator[str]:
    for name, state in network.states.items():
        newest = (0, -1)
        for put in state.under("trust"):
            trust = Trust.from_bytes(put.data)
            if (trust.epoch, trust.version) < newest:
                yield f"trust: {name} went back from {newest} to {(trust.epoch, trust.version)}"
            newest = (trust.epoch, trust.version)


def _verdicts(network: FaultyNetwork) -> list[tuple[float, Verdict]]:
    """Return all stored verdicts, each with its time in seconds since the Unix epoch."""
    lines = []
    for name in network.validators:
        public = key(name).public
        for put in network.store.under(paths.kind_prefix(public, "verdicts")):
            lines.append((BEGIN + put.moment, open_signed(put.data, Verdict, [public]).record))
    return lines


def _verified_before_trained(network: FaultyNetwork) -> Iterator[str]:
    """Check that a quorum has accepted every group in the inbox, each validator after the group was dealt to it, and
    that a miner has committed to it.
    """
    accepting_validators: dict[bytes, set[bytes]] = defaultdict(set)
    for _, verdict in _verdicts(network):
        dealt = _dealt_groups(network, verdict)
        for judgement in verdict.judgements:
            if judgement.index not in dealt:
                yield f"dealing: group {judgement.digest.hex()[:16]} was judged by others than those it was dealt to"
            elif judgement.accepted:
                accepting_validators[judgement.digest].add(verdict.validator)
    committed_digests = set()
    for name in network.miners:
        public = key(name).public
        for put in network.store.under(paths.kind_prefix(public, "commitments")):
            commitment = open_signed(put.data, Commitment, [public]).record
            committed_digests |= {digest for digest, *_ in commitment.groups}
    for digest in _inbox_groups(network):
        if len(accepting_validators[digest]) < network.run.authority.quorum:
            yield f"training: group {digest.hex()[:16]} was taken without a quorum"
        if digest not in committed_digests:
            yield f"training: group {digest.hex()[:16]} is of no honest miner"


def _inbox_groups(network: FaultyNetwork) -> list[bytes]:
    batches = [VerifiedBatch.from_bytes(put.data) for put in network.states["trainer"].under(INBOX)]
    return [group.digest for batch in batches for group in batch.groups]


def _dealt_groups(network: FaultyNetwork, verdict: Verdict) -> Collection[int]:
    """Return the groups of a miner's window that were dealt to the validator, by the roster of its own summary; all if
    it has not revealed that, or if the miner's version has lapsed, of which each validator says so of all groups.
    """
    if verdict.lapsed:
        return range(verdict.submitted)
    for put in network.store.under(paths.summary(verdict.validator, verdict.window)):
        summary = open_signed(put.data, Summary, [verdict.validator]).record
        return summary.dealing.dealt_groups(
            network.signed.digest,
            verdict.window,
            randomness(network.run.schedule.audit(verdict.window)),
            verdict.miner,
            groups=verdict.submitted,
            validator=verdict.validator,
        )
    return range(verdict.submitted)


def _honest_work_is_accepted(network: FaultyNetwork) -> Iterator[str]:
    """Check that honest groups are refused only for an old version or for false answers of storage."""
    miners = {key(name).public: name for name in network.miners}
    begins = {signed.record.version: signed.record.first_window for signed in _manifests(network)}
    lag = network.run.schedule.max_lag
    for _, verdict in _verdicts(network):
        reasons = {j.reason for j in verdict.judgements if not j.accepted} - {Reason.MISSING, Reason.MALFORMED}
        serving = max((version for version, first in begins.items() if first <= verdict.window), default=0)
        if serving - verdict.version > lag:
            reasons.discard(Reason.LAPSED)
        if reasons:
            names = ", ".join(sorted(reasons))
            yield f"verdict: {miners[verdict.miner]} was refused for {names} in window {verdict.window}"


def _trained_once(network: FaultyNetwork) -> Iterator[str]:
    inbox_groups = {digest.hex()[:16] for digest in _inbox_groups(network)}
    for group, times in Counter(trained_groups(network.logs["trainer/training"].events)).items():
        if times > 1:
            yield f"training: group {group} was trained on {times} times"
        if group not in inbox_groups:
            yield f"training: group {group} came from nowhere"


def _accounted_for(network: FaultyNetwork) -> Iterator[str]:
    """Check that the verdicts in time of a quorum have one entry in the outcome log, which never changes."""
    outcome_logs: dict[tuple[int, bytes], WindowOutcomes] = {}
    for outcome_log in (WindowOutcomes.from_bytes(put.data) for put in network.states["trainer"].under(OUTCOMES)):
        name = f"window {outcome_log.window} of {outcome_log.miner.hex()[:8]}"
        previous = outcome_logs.get((outcome_log.window, outcome_log.miner))
        if previous and outcome_log.outcomes[: len(previous.outcomes)] != previous.outcomes:
            yield f"outcome log: {name}: an entry has changed"
        if len({outcome.group for outcome in outcome_log.outcomes}) < len(outcome_log.outcomes):
            yield f"outcome log: {name}: a group has two outcomes"
        outcome_logs[outcome_log.window, outcome_log.miner] = outcome_log
    schedule = network.run.schedule
    open_windows = -(-schedule.verdict_rounds // schedule.rounds)
    acknowledged_paths = set().union(*(network.context(name).acknowledgements for name in network.validators))
    exclusions = Exclusions(
        network.events("trainer/download", "validator-excluded"),
        network.events("trainer/download", "validator-sealed-again"),
    )
    counting_verdicts: defaultdict[tuple[int, bytes], list[Verdict]] = defaultdict(list)
    for moment, verdict in _verdicts(network):
        due = network.run.beacon.round_time(schedule.verdict(verdict.window))
        if moment >= due:
            continue  # nobody waited for it any more
        path = paths.verdict(verdict.validator, verdict.window, verdict.miner)
        if verdict.window > WINDOWS - 1 - open_windows or path not in acknowledged_paths:
            continue
        exclusion = exclusions.reason(verdict.window, verdict.validator.hex()[:8])
        summaries = network.store.under(paths.summary(verdict.validator, verdict.window))
        late = min((BEGIN + put.moment for put in summaries), default=math.inf) >= due
        if exclusion.startswith(NOT_SEALED) or (exclusion and late):
            continue  # the log has the reason: no seal in time, or no summary, without which a verdict does not count
        counting_verdicts[verdict.window, verdict.miner].append(verdict)
    for (window, miner), verdicts in counting_verdicts.items():
        if len({verdict.validator for verdict in verdicts}) < network.run.authority.quorum:
            continue  # nobody reads them, and the event verdicts-unread says so
        entries = outcome_logs.get((window, miner))
        recorded_digests = {outcome.digest for outcome in entries.outcomes} if entries else set()
        judged_digests = {judgement.digest for verdict in verdicts for judgement in verdict.judgements}
        missing_digests = sorted(digest.hex()[:16] for digest in judged_digests - recorded_digests)
        if missing_digests:
            yield f"outcome log: window {window} of {miner.hex()[:8]}: no outcome of {', '.join(missing_digests)}"


def _recovered(network: FaultyNetwork) -> Iterator[str]:
    """Check that all nodes work again after the end of the faults."""
    for name in network.miners:
        if not any(event["window"] >= FAULTY_WINDOWS for event in network.events(name, "delivered")):
            yield f"recovery: {name} delivered nothing after the faults"
    for name in network.validators:
        if network.logs[name].named("announcement-refused"):
            return  # a refused announcement is not fetched again for ten seconds or more, longer than this test
        if not any(event["window"] >= FAULTY_WINDOWS for event in network.logs[name].named("verdict")):
            yield f"recovery: {name} judged nothing after the faults"
    if not any(event["window"] >= FAULTY_WINDOWS for event in network.events("trainer/download", "collected")):
        yield "recovery: the trainer collected nothing after the faults"
