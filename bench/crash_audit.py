"""What must always hold, asked of a network of real processes: of its objects, and of what its processes have said."""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, Protocol

import trio

from grailnode.config import Config
from grailnode.node.processes import make_spectator
from grailnode.observe.chain_check import verify_chain
from protocol.chain.manifest import Manifest
from protocol.errors import ProtocolError
from protocol.identity.signing import open_announced
from protocol.judging.verdict import Reason, Verdict
from protocol.rollout.batch import Commitment
from roles.ports import StoreError
from roles.trainer.verified_batch import USED, WindowOutcomes

_KEPT_WINDOWS = 900  # a trainer forgets accounts after 1,000


class Site(Protocol):
    """A network to be judged; its trainer's node is named 'trainer'.

    Attributes:
        config: a bystander's view of the run; processes: all whose logs count; validators: those that judge.
    """

    @property
    def config(self) -> Config: ...
    @property
    def processes(self) -> Collection[str]: ...
    @property
    def validators(self) -> Collection[str]: ...

    def events(self, process: str, name: str = "") -> list[dict[str, Any]]:
        """What a process has said, of one name or in all."""

    def objects(self, kind: str) -> list[Path]:
        """The files of all whole objects of a kind ('manifests', 'verdicts', ...), in anybody's space."""

    def accounts(self) -> list[Path]:
        """The files in which the trainer keeps what became of groups."""


def audit(site: Site) -> list[str]:
    """Everything that should never have happened, one line each."""
    return [
        *_bit_identical(site),
        *_chain_holds(site),
        *_gapless(site),
        *_verified_and_once(site),
        *_accounted_for(site),
        *_no_rejections(site),
    ]


def _bit_identical(site: Site) -> Iterator[str]:
    digests: dict[int, set[str]] = defaultdict(set)
    for process in site.processes:
        for event in site.events(process, "serving"):
            digests[event["version"]].add(event["weights"])
    for version, found in digests.items():
        if len(found) > 1:
            yield f"weights: version {version} was served with {len(found)} contents"


def _chain_holds(site: Site) -> Iterator[str]:
    async def check() -> None:
        await verify_chain(make_spectator(site.config), lambda line: None)

    for attempt in range(3):
        try:
            trio.run(check)
        except (ProtocolError, StoreError) as error:
            if attempt == 2:  # the first times retention may have raced this reader, which is slow to start
                yield f"chain: {error}"
        else:
            return


def _gapless(site: Site) -> Iterator[str]:
    versions = [event["version"] for event in site.events("trainer/upload", "published")]
    if versions != sorted(set(versions)):
        yield "chain: a version was published twice, or out of order"
    manifests: dict[str, set[str]] = defaultdict(set)
    for file in site.objects("manifests"):
        number, _, digest = file.name.partition("-")
        manifests[number].add(digest)
    for number, found in manifests.items():
        if len(found) > 1:
            yield f"chain: version {int(number)} has {len(found)} manifests"
    kept = sorted(int(number) for number in manifests)
    if kept and kept != list(range(kept[0], kept[-1] + 1)):
        yield "chain: a manifest between the oldest and the newest is missing"


def _lineage(site: Site) -> list[str]:
    """The groups of the steps behind the newest weights, in order."""
    steps: list[list[str]] = []
    for event in site.events("trainer/training"):
        if event["event"] == "resumed":
            del steps[event["step"] :]
        elif event["event"] == "step":
            del steps[event["step"] - 1 :]
            steps.append(event["groups"].split(","))
    return [group for step in steps for group in step]


def _verdicts(site: Site) -> list[tuple[float, Verdict]]:
    """When each came into storage, and what it says."""
    return [
        (file.stat().st_ctime, open_announced(file.read_bytes(), Verdict).record) for file in site.objects("verdicts")
    ]


def _verified_and_once(site: Site) -> Iterator[str]:
    trained = Counter(_lineage(site))  # before the verdicts: the network lives on while it is judged
    accepted = {
        judgement.digest.hex()[:16]
        for _, verdict in _verdicts(site)
        for judgement in verdict.judgements
        if judgement.accepted
    }
    for group, times in trained.items():
        if times > 1:
            yield f"training: group {group} was trained on {times} times"
        if group not in accepted:
            yield f"training: group {group} was trained on, and no validator accepts it"


def _accounted_for(site: Site) -> Iterator[str]:
    """Every judged group of a window that is over has an outcome, unless the trainer has said why it heard no
    validator.
    """
    spectator = make_spectator(site.config)
    schedule, now = spectator.run.schedule, spectator.window()
    over = now - 2 - -(-schedule.verdict_rounds // schedule.rounds)
    accounts = {}
    for file in site.accounts():
        account = WindowOutcomes.from_bytes(file.read_bytes())
        accounts[account.window, account.miner] = {outcome.digest for outcome in account.outcomes}
    forgotten = now - _KEPT_WINDOWS  # by the time, as the trainer does: the newest account may be much older
    unheard = {(event["window"], event["validator"]) for event in site.events("trainer/download", "validator-excluded")}
    for moment, verdict in _verdicts(site):
        if moment >= spectator.run.beacon.round_time(schedule.verdict(verdict.window)):
            continue  # nobody waited for it any more
        if not forgotten < verdict.window <= over or (verdict.window, verdict.validator.hex()[:8]) in unheard:
            continue
        missing = {j.digest for j in verdict.judgements} - accounts.get((verdict.window, verdict.miner), set())
        if missing:
            yield f"account: window {verdict.window} of {verdict.miner.hex()[:8]}: no outcome of {len(missing)} groups"


def _behind(site: Site) -> dict[tuple[int, str], int]:
    """By how many versions the work of a window and miner was behind the one that served, as far as storage still
    tells.
    """
    manifests = [open_announced(file.read_bytes(), Manifest).record for file in site.objects("manifests")]
    found = {}
    for file in site.objects("commitments"):
        claimed = open_announced(file.read_bytes(), Commitment).record
        serving = [manifest.version for manifest in manifests if manifest.first_window <= claimed.window]
        if serving:
            found[claimed.window, claimed.miner.hex()[:8]] = max(serving) - claimed.version
    return found


def _no_rejections(site: Site) -> Iterator[str]:
    """Everybody here is honest: whoever was not too far behind is accepted, and what is used was promised."""
    behind = _behind(site)
    lag = make_spectator(site.config).run.schedule.max_lag
    for event in (event for validator in site.validators for event in site.events(validator, "verdict")):
        excused = (
            event["reasons"] == Reason.VERSION and not 0 <= behind.get((event["window"], event["miner"]), -1) <= lag
        )
        if event["rejected"] and not excused:
            yield f"verdict: window {event['window']}: {event['rejected']} honest groups rejected: {event['reasons']}"
    used = {
        outcome.digest
        for file in site.accounts()
        for outcome in WindowOutcomes.from_bytes(file.read_bytes()).outcomes
        if outcome.status == USED
    }
    promised = set()
    for file in site.objects("commitments"):
        commitment = open_announced(file.read_bytes(), Commitment).record
        promised |= {digest for digest, *_ in commitment.groups}
    for digest in used - promised:
        yield f"account: group {digest.hex()[:16]} was used, and nobody promised it"
