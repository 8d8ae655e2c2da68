"""Checks of the invariants of a network of real processes, from its stored objects and its processes' logs."""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, Protocol

import trio

from grailnode.config import Config
from grailnode.node.node_makers import make_spectator
from grailnode.observe.chain_check import verify_chain
from protocol import paths
from protocol.chain.manifest import Manifest
from protocol.errors import ProtocolError
from protocol.identity.signing import open_announced
from protocol.judging.verdict import Reason, Verdict
from protocol.rollout.batch import Commitment
from roles.ports import StoreError
from roles.trainer.verified_batch import USED, WindowOutcomes
from tests.support.simulation.damaged_states import data_of_file
from tests.support.simulation.trainer_events import Exclusions

_RETAINED_WINDOWS = 900  # a trainer deletes outcomes after 1,000 windows


class AuditedNetwork(Protocol):
    """A network whose history is checked; its trainer's node is named 'trainer'.

    Attributes:
        config: configuration of a spectator of the run.
        processes: names of all processes whose logs count.
        validators: names of the validators' processes.
        repaired_windows: windows whose groups a repair of the trainer's state has given up.
    """

    @property
    def config(self) -> Config: ...
    @property
    def processes(self) -> Collection[str]: ...
    @property
    def validators(self) -> Collection[str]: ...
    @property
    def repaired_windows(self) -> Collection[int]: ...

    def events(self, process: str, name: str = "") -> list[dict[str, Any]]:
        """Return the events that a process has logged, those of one name or all."""

    def objects(self, kind: str) -> list[Path]:
        """Return the files of all complete objects of a kind ('manifests', 'verdicts', ...) in all spaces."""

    def outcome_log_files(self) -> list[Path]:
        """Return the files in which the trainer records the outcomes of groups."""


def find_violations(network: AuditedNetwork) -> list[str]:
    """Return a line for each violation of an invariant."""
    return [
        *_different_weights(network),
        *_broken_chain(network),
        *_missing_versions(network),
        *_unverified_or_repeated_training(network),
        *_missing_outcomes(network),
        *_wrong_rejections(network),
    ]


def _different_weights(network: AuditedNetwork) -> Iterator[str]:
    digests: dict[int, set[str]] = defaultdict(set)
    for process in network.processes:
        for event in network.events(process, "serving"):
            digests[event["version"]].add(event["weights"])
    for version, digests_of_version in digests.items():
        if len(digests_of_version) > 1:
            yield f"weights: version {version} was served with {len(digests_of_version)} contents"


def _broken_chain(network: AuditedNetwork) -> Iterator[str]:
    async def check() -> None:
        await verify_chain(make_spectator(network.config), lambda line: None)

    for attempt in range(3):
        try:
            trio.run(check)
        except (ProtocolError, StoreError) as error:
            if attempt == 2:  # before, retention may have deleted what this reader, which starts slowly, was to read
                yield f"chain: {error}"
        else:
            return


def _missing_versions(network: AuditedNetwork) -> Iterator[str]:
    newest, has_restarted = -1, False
    for event in network.events("trainer/upload"):
        if event["event"] == "published":
            # a process that was killed between a version's line in the log and its own note writes the line again
            if event["version"] < newest or (event["version"] == newest and not has_restarted):
                yield f"chain: version {event['version']} was published behind version {newest}"
            newest, has_restarted = event["version"], False
        has_restarted = has_restarted or event["event"] == "started"
    manifests: dict[str, set[str]] = defaultdict(set)
    for file in network.objects("manifests"):
        number, _, digest = file.name.partition("-")
        manifests[number].add(digest)
    for number, digests_of_manifest in manifests.items():
        if len(digests_of_manifest) > 1:
            yield f"chain: version {int(number)} has {len(digests_of_manifest)} manifests"
    numbers = sorted(int(number) for number in manifests)
    if numbers and numbers != list(range(numbers[0], numbers[-1] + 1)):
        yield "chain: a manifest between the oldest and the newest is missing"


def _trained_groups(network: AuditedNetwork) -> list[str]:
    """Return the digests of the groups of all steps that led to the newest weights, in order.

    A repair of the checkpoint begins a new count of steps at the weights of a version.
    """
    step_of_version = {
        event["version"]: event["optimizer_step"] for event in network.events("trainer/upload", "published")
    }
    counts = [(0, 0)]  # for each count of steps, its first version, and how many steps were taken before
    steps: list[list[str]] = []
    for event in network.events("trainer/training"):
        if event["event"] == "resumed":
            if event["step"] == 0 and event["version"] > 0:
                version = max((version for version in step_of_version if version <= event["version"]), default=0)
                before = max(before for first, before in counts if first <= version)
                counts.append((event["version"] + 1, before + step_of_version.get(version, 0)))
            del steps[counts[-1][1] + event["step"] :]
        elif event["event"] == "step":
            del steps[counts[-1][1] + event["step"] - 1 :]
            steps.append(event["groups"].split(","))
    return [digest for step in steps for digest in step]


def _verdicts(network: AuditedNetwork) -> list[tuple[float, Verdict]]:
    """Return each stored verdict with the time at which it was stored, in seconds since the epoch."""
    return [
        (file.stat().st_ctime, open_announced(file.read_bytes(), Verdict).record)
        for file in network.objects("verdicts")
    ]


def _unverified_or_repeated_training(network: AuditedNetwork) -> Iterator[str]:
    training_counts = Counter(_trained_groups(network))  # read before the verdicts, since the network still runs
    accepted_digests = {
        judgement.digest.hex()[:16]
        for _, verdict in _verdicts(network)
        for judgement in verdict.judgements
        if judgement.accepted
    }
    for digest, count in training_counts.items():
        if count > 1:
            yield f"training: group {digest} was trained on {count} times"
        if digest not in accepted_digests:
            yield f"training: group {digest} was trained on, and no validator accepts it"


def _outcomes(network: AuditedNetwork) -> Iterator[WindowOutcomes]:
    """Yield the trainer's outcome logs, except those of windows that a repair has given up."""
    for file in network.outcome_log_files():
        if paths.window_of(file.name) not in network.repaired_windows:
            yield WindowOutcomes.from_bytes(data_of_file(file.read_bytes()))


def _missing_outcomes(network: AuditedNetwork) -> Iterator[str]:
    """Check that every judged group of a complete window has an outcome.

    A validator that the trainer has excluded in that window, with a logged reason, does not count.
    """
    spectator = make_spectator(network.config)
    schedule, now = spectator.run.schedule, spectator.window()
    last_complete_window = now - 2 - -(-schedule.verdict_rounds // schedule.rounds)
    digests_by_case = {}
    for outcomes in _outcomes(network):
        digests_by_case[outcomes.window, outcomes.miner] = {outcome.digest for outcome in outcomes.outcomes}
    # The trainer deletes outcomes by time as well; its newest log may be much older than this.
    oldest_window = now - _RETAINED_WINDOWS
    exclusions = Exclusions(
        network.events("trainer/download", "validator-excluded"),
        network.events("trainer/download", "validator-sealed-again"),
    )
    for storage_time, verdict in _verdicts(network):
        if storage_time >= spectator.run.beacon.round_time(schedule.verdict(verdict.window)):
            continue  # the verdict came too late to count
        if not oldest_window < verdict.window <= last_complete_window or verdict.window in network.repaired_windows:
            continue
        if exclusions.reason(verdict.window, verdict.validator.hex()[:8]):
            continue
        digests = {judgement.digest for judgement in verdict.judgements}
        count = len(digests - digests_by_case.get((verdict.window, verdict.miner), set()))
        if count:
            yield f"outcomes: window {verdict.window} of {verdict.miner.hex()[:8]}: {count} groups have no outcome"


def _version_lags(network: AuditedNetwork) -> dict[tuple[int, str], int]:
    """Return by how many versions each commitment was behind the serving version, by window and miner.

    A window is missing whose manifests have been deleted.
    """
    manifests = [open_announced(file.read_bytes(), Manifest).record for file in network.objects("manifests")]
    lags = {}
    for file in network.objects("commitments"):
        commitment = open_announced(file.read_bytes(), Commitment).record
        versions = [manifest.version for manifest in manifests if manifest.first_window <= commitment.window]
        if versions:
            lags[commitment.window, commitment.miner.hex()[:8]] = max(versions) - commitment.version
    return lags


def _wrong_rejections(network: AuditedNetwork) -> Iterator[str]:
    """Check that work within the allowed lag is accepted, since every miner is honest, and that used groups were
    committed.

    A batch that is in storage and was not read in the few tenths of a second that a short window leaves for it is no
    violation: a busy machine does that.
    """
    lags = _version_lags(network)
    max_lag = make_spectator(network.config).run.schedule.max_lag
    batches = {(paths.window_of(file.name), file.parent.parent.name[:8]) for file in network.objects("batches")}
    for event in (event for validator in network.validators for event in network.events(validator, "verdict")):
        lag = lags.get((event["window"], event["miner"]), -1)
        was_read_late = event["reasons"] == Reason.MISSING and (event["window"], event["miner"]) in batches
        if (event["rejected"] and not was_read_late) or (event["reasons"] == Reason.LAPSED and 0 <= lag <= max_lag):
            yield f"verdict: window {event['window']}: {event['rejected']} honest groups rejected: {event['reasons']}"
    used_digests = {
        outcome.digest for outcomes in _outcomes(network) for outcome in outcomes.outcomes if outcome.status == USED
    }
    committed_digests = set()
    for file in network.objects("commitments"):
        commitment = open_announced(file.read_bytes(), Commitment).record
        committed_digests |= {digest for digest, *_ in commitment.groups}
    for digest in used_digests - committed_digests:
        yield f"outcomes: group {digest.hex()[:16]} was used, and no commitment has it"
