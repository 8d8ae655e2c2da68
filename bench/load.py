"""One validator before a crowd: honest miners and junk, a real store on disk, real windows.

    python -m bench.load --honest 200 --junk 800 --windows 4

Prints, for every window, the validator process's requests, CPU seconds, peak memory beyond the loaded model, and how
many honest miners had a verdict before the next window's, with the same crowd without its junk beside it. Junk miners
pledge like everybody and
deliver, by turns: nothing, noise as a commitment, another's commitment, noise as a batch, frames that grow when
decompressed, a wrong prompt, sketches of nothing, and more groups than allowed. `--extra` adds unasked objects under
their keys.
"""

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import trio

from grailnode.beacon.relays import StoreBeacon, publish_rounds
from grailnode.calibration import proof_file
from grailnode.engine import causal_model as models
from grailnode.engine.compute import Compute, make_engine
from grailnode.engine.policy import PACKAGED_POLICY, Policy, load_weights
from grailnode.node.clock import SystemClock
from grailnode.node.settings import TrainerSettings
from grailnode.node.wiring import make_task, run_publisher, run_training, run_validator
from grailnode.run import creation
from grailnode.store.decorators.metering import MeteredStore
from grailnode.store.local import LocalStore
from protocol import paths
from protocol.beacon import LocalKey
from protocol.compression import compress
from protocol.digest import content_digest
from protocol.identity.participant import Announcement
from protocol.identity.signing import Signed, SigningKey, sign
from protocol.rollout.batch import Commitment, Group, assemble
from protocol.run import RunManifest
from roles.miner.produce import HonestProducer, MiningWindow
from roles.node.identity import Node
from roles.ports import NotFoundError
from roles.trainer.learn.training import TrainingSettings
from roles.validator.validator import ValidatorSettings
from tests.support.measuring.memory import resident
from tests.support.measuring.store_tally import TallyMeter

PERIOD_MS = 1000
GROUPS = 2
KINDS = ("nothing", "noise", "another's", "noise batch", "bomb", "wrong prompt", "empty sketches", "too many")
BEACON = LocalKey.from_seed(b"load bench beacon")


def key(name: str) -> SigningKey:
    """A key that follows from its name."""
    return SigningKey(random.Random(name).randbytes(32))


class Quiet:
    """Telemetry that drops every event."""

    def event(self, name: str, **fields: str | int | float) -> None:
        """Implements Telemetry.event."""


@dataclass
class Site:
    """A run on disk."""

    root: Path
    signed: Signed[RunManifest]

    def node(self, name: str, signing: SigningKey, meter: TallyMeter | None = None) -> Node:
        """A node of the run."""
        store = MeteredStore(LocalStore(self.root / "store"), meter or TallyMeter())
        clock = SystemClock()
        return Node(
            run_id=self.signed.digest,
            run=self.signed.record,
            key=signing,
            name=name,
            store=store,
            state=LocalStore(self.root / name),
            clock=clock,
            beacon=StoreBeacon(store, self.signed.record.beacon, clock),
            telemetry=Quiet(),
            run_sync=trio.to_thread.run_sync,
        )

    @classmethod
    def open(cls, root: Path) -> "Site":
        """The run that was founded there."""
        return cls(root, creation.open_run((root / "run.manifest").read_bytes()))


def found(root: Path, rounds: int) -> Site:
    """A run whose windows have this many seconds."""
    choices = creation.Choices(
        name="load", groups=GROUPS, rounds=rounds, commit_rounds=rounds - 4, audit_rounds=rounds - 3,
        seal_rounds=2 * rounds, verdict_rounds=3 * rounds,
    )  # fmt: skip
    chain = BEACON.chain(PERIOD_MS, int(time.time() * 1000) + 12_000)
    authority = creation.first_authority(
        choices,
        roots=[key("root").public],
        trainers=[key("trainer").public],
        validators=[key("validator").public],
    )
    proof = proof_file.read(PACKAGED_POLICY / proof_file.NAME)
    manifest = creation.draft_manifest(choices, PACKAGED_POLICY, chain, authority, proof)
    (root / "run.manifest").write_bytes(sign(manifest, key("root")))
    return Site.open(root)


def validate(root: Path) -> None:
    """The validator's process: a line of JSON for every window that it has revealed."""
    torch.set_num_threads(1)
    site = Site.open(root)
    meter = TallyMeter()
    node = site.node("validator", key("validator"), meter)
    policy = Policy.load(PACKAGED_POLICY)
    compute = Compute(models.build(policy))
    loaded = resident("VmRSS")

    async def report() -> None:
        window, before = 0, 0.0
        while True:
            await node.clock.sleep_until(
                node.run.beacon.round_time(node.run.schedule.audit(window)) + 0.9 * window_seconds(site)
            )
            cpu = time.process_time()
            line = {
                "window": window,
                "requests": sum(tally.count for tally in meter.tallies.values()),
                "cpu": cpu - before,
                "extra_mib": (resident("VmHWM") - loaded) / 2**20,  # not ru_maxrss, which begins with the parent's
            }
            print(json.dumps(line), flush=True)
            window, before = window + 1, cpu

    async def run() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(report)
            nursery.start_soon(run_validator, node, make_task(node, policy), compute, ValidatorSettings(0, 1.0))

    trio.run(run)


def window_seconds(site: Site) -> float:
    """Length of a window."""
    return site.signed.record.schedule.rounds * PERIOD_MS / 1000


class Crowd:
    """All miners of the run, honest and not, in one process."""

    def __init__(self, site: Site, honest: int, junk: int, extra: int) -> None:
        self.site = site
        self.node = site.node("crowd", key("crowd"))
        self.policy = Policy.load(PACKAGED_POLICY)
        self.compute = Compute(models.build(self.policy))
        self.honest = [key(f"honest {number}") for number in range(honest)]
        self.junk = [key(f"junk {number}") for number in range(junk)]
        self.extra = extra
        engine = make_engine(self.compute, self.node.run_sync)
        self.engine = engine
        self.producer = HonestProducer(make_task(self.node, self.policy), engine)

    async def announce(self) -> None:
        """Everybody pledges."""
        for miner in (*self.honest, *self.junk):
            record = Announcement.model_validate(
                {
                    "run": self.site.signed.digest,
                    "key": miner.public,
                    "role": "miner",
                    "name": "",
                    "space": "",
                    "groups": GROUPS,
                    "proof": b"",
                    "expires_ms": int((time.time() + 7200) * 1000),
                }
            )
            await self.node.store.put(paths.participant(miner.public), sign(record, miner))

    async def deliver(self, window: int) -> None:
        """Everybody's window, before the deadline."""
        node = self.node
        randomness = await node.randomness(node.run.schedule.opening(window))
        template: list[Group] = []
        for begin in range(0, len(self.honest), 20):
            part = self.honest[begin : begin + 20]
            for miner, groups in zip(part, await self._honest(part, window, randomness), strict=True):
                template = template or groups
                await self._put(miner, *assemble(groups))
        for number, miner in enumerate(self.junk):
            await self._junk(KINDS[number % len(KINDS)], miner, window, template)

    async def _honest(self, miners: Sequence[SigningKey], window: int, randomness: bytes) -> list[list[Group]]:
        turns = [MiningWindow(window, randomness, 0, miner.public) for miner in miners]
        assignments = [self.producer.assignments(turn, range(GROUPS)) for turn in turns]
        done = await self.producer.generate([item for mine in assignments for item in mine])
        found = []
        for place, (turn, mine) in enumerate(zip(turns, assignments, strict=True)):
            parts = done[place * GROUPS : (place + 1) * GROUPS]
            groups = [
                self.producer.group(turn, item, await self.producer.rollouts(turn, item, part))
                for item, part in zip(mine, parts, strict=True)
            ]
            found.append(groups)
        return found

    async def _put(self, miner: SigningKey, batch: bytes, commitment: Commitment) -> None:
        await self.node.store.put(paths.batch(miner.public, commitment.window, commitment.batch), batch)
        await self.node.store.put(paths.commitment(miner.public, commitment.window), sign(commitment, miner))

    async def _junk(self, kind: str, miner: SigningKey, window: int, template: Sequence[Group]) -> None:
        noise = random.Random(miner.public + window.to_bytes(4, "big")).randbytes(4096)
        for number in range(self.extra):
            await self.node.store.put(f"{miner.public.hex()}/extra/{window}-{number}", noise)
        path = paths.commitment(miner.public, window)
        mine = [group.model_copy(update={"miner": miner.public}) for group in template]
        batch, commitment = assemble(mine)
        if kind == "noise":
            await self.node.store.put(path, noise)
        elif kind == "another's":
            await self.node.store.put(path, sign(commitment, key("somebody")))
        elif kind == "noise batch":
            frames = [noise[:2000], noise[2000:]]
            entries = tuple((content_digest(frame), len(frame)) for frame in frames)
            await self._put(
                miner, noise, commitment.model_copy(update={"batch": content_digest(noise), "groups": entries})
            )
        elif kind == "bomb":
            bomb = compress(bytes(32 << 20))
            entries = ((content_digest(bomb), len(bomb)),) * GROUPS
            whole = bomb * GROUPS
            await self._put(
                miner, whole, commitment.model_copy(update={"batch": content_digest(whole), "groups": entries})
            )
        elif kind == "wrong prompt":
            await self._put(miner, batch, commitment)
        elif kind == "empty sketches":
            due = self.producer.task
            randomness = await self.node.randomness(self.node.run.schedule.opening(window))
            groups = []
            for group in mine:
                prompt = due.assign(window, randomness, miner.public, group.index).prompt
                empty = tuple(item.model_copy(update={"sketch": bytes(len(item.sketch))}) for item in group.rollouts)
                packed = b"".join(token.to_bytes(4, "little") for token in prompt)
                groups.append(group.model_copy(update={"prompt": packed, "rollouts": empty}))
            await self._put(miner, *assemble(groups))
        elif kind == "too many":
            many = [mine[index % GROUPS].model_copy(update={"index": index}) for index in range(4 * GROUPS)]
            await self._put(miner, *assemble(many))


async def measure(root: Path, honest: int, junk: int, windows: int, extra: int, rounds: int) -> list[dict[str, float]]:
    """A crowd's windows, as its validator told them."""
    site = found(root, rounds)
    crowd = Crowd(site, honest, junk, extra)
    trainer = site.node("trainer", key("trainer"))
    settings = TrainerSettings(TrainingSettings(groups_per_step=1 << 20, steps_per_version=1))
    lines: list[dict[str, float]] = []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(
            lambda: publish_rounds(BEACON, site.signed.record.beacon, trainer.store, trainer.clock, keep=1000)
        )
        weights = load_weights(PACKAGED_POLICY)
        nursery.start_soon(run_training, trainer, lambda: weights, crowd.compute, settings)
        nursery.start_soon(run_publisher, trainer, settings.publisher)
        await crowd.announce()
        await crowd.engine.stage(0, weights)
        await crowd.engine.commit()
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "bench.load", "--validate", str(root)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
            assert process.stdout is not None
            try:
                for window in range(windows):
                    await crowd.node.clock.sleep_until(site.signed.record.opening_time(window))
                    await crowd.deliver(window)
                    late = time.time() - site.signed.record.deadline_time(window)
                    if late > 0:
                        print(f"window {window}: the crowd was {late:.1f} s late; use more --seconds")
                    lines.append(json.loads(await trio.to_thread.run_sync(process.stdout.readline)))
                    lines[-1]["judged"] = await judged(crowd, window)
                    print(f"{honest} honest, {junk} junk: {lines[-1]}", flush=True)
            finally:
                process.terminate()
        nursery.cancel_scope.cancel()
    return lines


async def judged(crowd: Crowd, window: int) -> int:
    """Honest miners that have a verdict now, before the next window's."""
    count = 0
    for miner in crowd.honest:
        try:
            await crowd.node.store.get(paths.verdict(key("validator").public, window, miner.public), 1 << 26)
            count += 1
        except NotFoundError:
            continue
    return count


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--honest", type=int, default=200)
    parser.add_argument("--junk", type=int, default=800)
    parser.add_argument("--extra", type=int, default=20)
    parser.add_argument("--windows", type=int, default=4)
    parser.add_argument("--seconds", type=int, default=45)
    parser.add_argument("--validate", type=Path, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    if chosen.validate:
        validate(chosen.validate)
        return
    place = "/dev/shm" if Path("/dev/shm").is_dir() else None  # the disk's fsync is not what is measured
    results = {}
    for junk in (0, chosen.junk):
        root = Path(tempfile.mkdtemp(prefix="grailnode-load-", dir=place))
        try:
            results[junk] = trio.run(
                measure, root, chosen.honest, junk, chosen.windows, chosen.extra if junk else 0, chosen.seconds
            )
        finally:
            shutil.rmtree(root)
    print("window  requests  CPU s  without junk  junk's share: of the CPU  of the window  extra MiB  honest judged")
    before = 0.0
    for alone, crowded in zip(results[0], results[chosen.junk], strict=True):
        junk = crowded["cpu"] - alone["cpu"]
        print(
            f"{crowded['window']:6.0f}  {crowded['requests'] - before:8.0f}  {crowded['cpu']:5.1f}  "
            f"{alone['cpu']:12.1f}  "
            f"{junk / crowded['cpu']:24.3f}  {junk / chosen.seconds:13.3f}  {crowded['extra_mib']:9.0f}  "
            f"{crowded['judged']:.0f} of {chosen.honest}"
        )
        before = crowded["requests"]


if __name__ == "__main__":
    main()
