"""What must always hold, asked of a simulated network after its last window. Each check yields one line for each
violation.

The judges see what no node sees: every byte that was really stored, and what each process was told about it.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterator

from grailnode.observe.chain_check import verify_chain
from protocol import paths
from protocol.chain import safetensors
from protocol.chain.manifest import Head, Manifest
from protocol.chain.verifier import Trust
from protocol.digest import content_digest, digest_weights
from protocol.errors import ProtocolError
from protocol.identity.signing import Signed, open_signed
from protocol.judging.verdict import Reason, Verdict
from protocol.rollout.batch import Commitment
from roles.ports import StoreError
from roles.trainer.spool import INBOX, OUTBOX, OUTCOMES, SnapshotName
from roles.trainer.verified_batch import VerifiedBatch, WindowOutcomes
from tests.support.simulation.network import BEGIN, key
from tests.support.simulation.stormy_network import CHECKER, STORMY_WINDOWS, WINDOWS, StormyNetwork

_TRAINER = key("trainer").public


async def violations(network: StormyNetwork) -> list[str]:
    """Everything that should never have happened."""
    views, found = _views(network)
    found += [*_bit_identical(network, views), *_trust_never_goes_back(network)]
    if not _storage_lost_something(network):
        found += _chain_in_order(network, views)
    found += [*_verified_before_trained(network), *_trained_once(network), *_accounted_for(network)]
    found += [*_honest_work_is_accepted(network), *_recovered(network)]
    try:
        await verify_chain(network.node(CHECKER), lambda line: None)
    except (ProtocolError, StoreError) as error:
        if not _storage_lost_something(network):
            found.append(f"chain: the published chain does not hold: {error}")
    return found


def _views(network: StormyNetwork) -> tuple[dict[int, bytes], list[str]]:
    """The digest of the trainer's BF16 view of each version, as it was handed over; a version has one."""
    seen: dict[int, set[bytes]] = defaultdict(set)
    digests: dict[bytes, bytes] = {}
    for put in network.states["trainer"].under(OUTBOX):
        file = content_digest(put.data)
        if file not in digests:
            digests[file] = digest_weights(safetensors.read(put.data))
        seen[SnapshotName.parse(put.path).version].add(digests[file])
    torn = [
        f"weights: version {version} was handed over with two contents" for version, d in seen.items() if len(d) > 1
    ]
    return {version: min(found) for version, found in seen.items()}, torn


def _bit_identical(network: StormyNetwork, views: dict[int, bytes]) -> Iterator[str]:
    for name, log in network.logs.items():
        for event in log.named("serving"):
            if event["weights"] != views[event["version"]].hex():
                yield f"weights: {name} served version {event['version']} with other bits than the trainer's"


def _manifests(network: StormyNetwork) -> list[Signed[Manifest]]:
    puts = network.store.under(paths.manifests(_TRAINER))
    return [open_signed(put.data, Manifest, network.run.authority.trainers) for put in puts]


def _chain_in_order(network: StormyNetwork, views: dict[int, bytes]) -> Iterator[str]:
    """One manifest a version, linked, none left out; no head that goes back or shows what is not there."""
    by_version: dict[int, Signed[Manifest]] = {}
    for signed in _manifests(network):
        version = signed.record.version
        if by_version.setdefault(version, signed).digest != signed.digest:
            yield f"chain: version {version} has two manifests"
        if signed.record.weights != views.get(version):
            yield f"chain: version {version} is published with other weights than were handed over"
        before = by_version.get(version - 1)
        if version and (before is None or before.digest != signed.record.previous):
            yield f"chain: version {version} was published before the one that it hangs on, or hangs on another"
    newest = (0, -1)
    kept = network.life("trainer/upload").told.kept
    for put in network.store.under(paths.head(_TRAINER)):
        head = open_signed(put.data, Head, network.run.authority.trainers).record
        if (head.epoch, head.version) < newest and not _repeats(network):
            yield f"chain: the head went from (epoch, version) {newest} to {(head.epoch, head.version)}"
        newest = max(newest, (head.epoch, head.version))
        for version in range(head.base, head.version + 1):
            if version not in by_version:
                yield f"chain: a head shows version {version}, which has no manifest"
                continue
            manifest = by_version[version].record
            promised = [paths.manifest(_TRAINER, version, by_version[version].digest)]
            if manifest.patch is not None and version >= head.oldest_patch:
                promised.append(paths.patch(_TRAINER, manifest.patch.object.digest))
            if version in head.anchors:
                promised += [paths.anchor(_TRAINER, ref.digest) for ref in manifest.anchor]
            early = [path for path in promised if kept.get(path, math.inf) > put.moment]
            if early:
                yield f"chain: a head shows version {version} before {early[0]} was stored"


def _repeats(network: StormyNetwork) -> bool:
    """Whether the storage delivers old puts again, which shows an old head to everybody."""
    return any(fault.name == "REPEATED" for fault in network.weather.rates)


def _trust_never_goes_back(network: StormyNetwork) -> Iterator[str]:
    for name, state in network.states.items():
        newest = (0, -1)
        for put in state.under("trust"):
            trust = Trust.from_bytes(put.data)
            if (trust.epoch, trust.version) < newest:
                yield f"trust: {name} went back from {newest} to {(trust.epoch, trust.version)}"
            newest = (trust.epoch, trust.version)


def _verdicts(network: StormyNetwork) -> list[tuple[float, Verdict]]:
    """Every verdict that a validator signed and storage took, and when (seconds since the Unix epoch)."""
    found = []
    for name in network.validators:
        own = key(name).public
        for put in network.store.under(paths.kind_prefix(own, "verdicts")):
            found.append((BEGIN + put.moment, open_signed(put.data, Verdict, [own]).record))
    return found


def _verified_before_trained(network: StormyNetwork) -> Iterator[str]:
    """Every group that reached the inbox was accepted by a quorum, and promised by an honest miner in time."""
    accepting: dict[bytes, set[bytes]] = defaultdict(set)
    for _, verdict in _verdicts(network):
        for judgement in verdict.judgements:
            if judgement.accepted:
                accepting[judgement.digest].add(verdict.validator)
    promised = set()
    for number in range(1, network.weather.miners + 1):
        own = key(f"miner-{number}").public
        for put in network.store.under(paths.kind_prefix(own, "commitments")):
            commitment = open_signed(put.data, Commitment, [own]).record
            promised |= {digest for digest, *_ in commitment.groups}
    for put in network.states["trainer"].under(INBOX):
        for group in VerifiedBatch.from_bytes(put.data).groups:
            if len(accepting[group.digest]) < network.run.authority.quorum:
                yield f"training: group {group.digest.hex()[:16]} was taken without a quorum"
            if group.digest not in promised:
                yield f"training: group {group.digest.hex()[:16]} is of no honest miner"


def _honest_work_is_accepted(network: StormyNetwork) -> Iterator[str]:
    """Nobody here cheats: what is refused was out of date, or storage gave other bytes than the miner's."""
    miners = {key(f"miner-{number}").public: f"miner-{number}" for number in range(1, network.weather.miners + 1)}
    begins = {signed.record.version: signed.record.first_window for signed in _manifests(network)}
    lag = network.run.schedule.max_lag
    for _, verdict in _verdicts(network):
        refused = {j.reason for j in verdict.judgements if not j.accepted} - {Reason.MISSING, Reason.MALFORMED}
        serving = max((version for version, first in begins.items() if first <= verdict.window), default=0)
        if serving - verdict.version > lag:
            refused.discard(Reason.VERSION)
        if refused:
            reasons = ", ".join(sorted(refused))
            yield f"verdict: {miners[verdict.miner]} was refused for {reasons} in window {verdict.window}"


def _lineage(network: StormyNetwork) -> list[str]:
    """The groups of the steps that the newest weights come from: what was lost in a crash counts no more."""
    steps: list[list[str]] = []
    for event, fields in network.logs["trainer/training"].events:
        if event == "started":
            steps = []
        elif event == "resumed":
            del steps[fields["step"] :]
        elif event == "step":
            steps.append(fields["groups"].split(","))
    return [group for step in steps for group in step]


def _trained_once(network: StormyNetwork) -> Iterator[str]:
    harvested = {
        group.digest.hex()[:16]
        for put in network.states["trainer"].under(INBOX)
        for group in VerifiedBatch.from_bytes(put.data).groups
    }
    for group, times in Counter(_lineage(network)).items():
        if times > 1:
            yield f"training: group {group} was trained on {times} times"
        if group not in harvested:
            yield f"training: group {group} came from nowhere"


def _accounted_for(network: StormyNetwork) -> Iterator[str]:
    """Whatever was judged and lies in storage when its window closes has one entry in the account, which never
    changes.
    """
    accounts: dict[tuple[int, bytes], WindowOutcomes] = {}
    for account in (WindowOutcomes.from_bytes(put.data) for put in network.states["trainer"].under(OUTCOMES)):
        name = f"window {account.window} of {account.miner.hex()[:8]}"
        before = accounts.get((account.window, account.miner))
        if before and account.outcomes[: len(before.outcomes)] != before.outcomes:
            yield f"account: {name}: what was entered has changed"
        if len({outcome.group for outcome in account.outcomes}) < len(account.outcomes):
            yield f"account: {name}: a group has two outcomes"
        accounts[account.window, account.miner] = account
    schedule = network.run.schedule
    open_windows = -(-schedule.verdict_rounds // schedule.rounds)
    told = set().union(*(network.life(name).told.kept for name in network.validators))
    unheard = {
        (event["window"], event["validator"]): event["error"]
        for event in network.events("trainer/download", "validator-excluded")
    }
    for moment, verdict in _verdicts(network):
        due = network.run.beacon.round_time(schedule.verdict(verdict.window))
        if moment >= due:
            continue  # nobody waited for it any more
        path = paths.verdict(verdict.validator, verdict.window, verdict.miner)
        if verdict.window > WINDOWS - 1 - open_windows or path not in told:
            continue
        said = unheard.get((verdict.window, verdict.validator.hex()[:8]), "")
        summaries = network.store.under(paths.summary(verdict.validator, verdict.window))
        late = min((BEGIN + put.moment for put in summaries), default=math.inf) >= due
        if said == "not sealed in time" or (said and late):
            continue  # the log has the reason: no seal in time, or no summary, without which a verdict does not count
        settled = accounts.get((verdict.window, verdict.miner))
        named = {outcome.digest for outcome in settled.outcomes} if settled else set()
        lost = [j.digest.hex()[:16] for j in verdict.judgements if j.digest not in named]
        if lost:
            yield f"account: window {verdict.window} of {verdict.miner.hex()[:8]}: nothing said of {', '.join(lost)}"


def _recovered(network: StormyNetwork) -> Iterator[str]:
    """In calm weather everybody works again."""
    calm = STORMY_WINDOWS
    for number in range(1, network.weather.miners + 1):
        if not any(event["window"] >= calm for event in network.events(f"miner-{number}", "delivered")):
            yield f"recovery: miner-{number} delivered nothing after the storm"
    for name in network.validators:
        if network.logs[name].named("announcement-refused"):
            return  # a refused announcement is not fetched again for ten seconds or more, longer than this test
        if not any(event["window"] >= calm for event in network.logs[name].named("verdict")):
            yield f"recovery: {name} judged nothing after the storm"
    if not any(event["window"] >= calm for event in network.events("trainer/download", "collected")):
        yield "recovery: the trainer collected nothing after the storm"


def _storage_lost_something(network: StormyNetwork) -> bool:
    """Whether storage lost what it had acknowledged: then nobody can read it, and the next anchor is the way on."""
    return any(fault.name == "FORGOTTEN" for fault in network.weather.rates)
