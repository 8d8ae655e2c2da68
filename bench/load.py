"""The load of one validator with many miners, honest ones and junk miners, on a store on disk and in real windows.

    python -m bench.load --honest 200 --junk 800 --windows 4

The command runs the honest miners alone, then with the junk miners. For every window it prints the validator process's
requests, its CPU seconds in both runs, its peak memory beyond the loaded model, and how many honest miners had a
verdict before those of the next window. Junk miners pledge like all others. In turn they deliver nothing, noise as a
commitment, another miner's commitment, noise as a batch, a decompression bomb, a wrong prompt, empty sketches, and more
groups than allowed. `--extra` adds useless objects under their keys. The command takes about 2 x (windows + 1) x
seconds, 8 minutes with the defaults, on two idle cores. It needs some 300 MB in /dev/shm, or in a temporary folder
where that does not exist.
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
from functools import partial
from pathlib import Path

import torch
import trio

from grailnode.beacon.relays import StoreBeacon, publish_rounds
from grailnode.calibration import proof_file
from grailnode.config import TrainerSection
from grailnode.engine import models
from grailnode.engine.compute import Compute, make_engine
from grailnode.engine.policy import PACKAGED_POLICY, Policy, load_weights
from grailnode.node.time_check import SystemClock
from grailnode.node.wiring import make_learner, make_task, run_publisher, run_training, run_validator
from grailnode.run import creation
from grailnode.store.decorators.limiting import MeteredStore
from grailnode.store.local import LocalStore
from grailnode.store.state.state_store import StateStore
from protocol import paths
from protocol.beacon import LocalKey
from protocol.compression import compress
from protocol.encoding import content_digest
from protocol.identity.participant import Announcement
from protocol.identity.signing import Signed, SigningKey, sign
from protocol.rollout.batch import Commitment, Group, assemble
from protocol.run import RunManifest
from roles.miner.produce import HonestProducer, MiningWindow
from roles.node.identity import Node
from roles.ports import NotFoundError
from roles.trainer.learn.learner import LearnerSettings
from roles.trainer.publish.publisher import PublisherSettings
from roles.validator.validator_settings import ValidatorSettings
from tests.support.builders.recipes import demo_rules
from tests.support.measuring.memory import resident
from tests.support.measuring.store_tally import TallyMeter

PERIOD_MS = 1000
GROUPS = 2
JUNK_KINDS = ("nothing", "noise", "another's", "noise batch", "bomb", "wrong prompt", "empty sketches", "too many")
BEACON = LocalKey.from_seed(b"load bench beacon")


def key(name: str) -> SigningKey:
    """Return a key that is derived from a name."""
    return SigningKey(random.Random(name).randbytes(32))


class NullTelemetry:
    """Telemetry that drops every event."""

    def event(self, name: str, **attributes: str | int | float) -> None:
        """Drop an event."""


@dataclass
class LocalRun:
    """A run in a directory.

    Attributes:
        root: directory of the store, of the nodes' states and of the run manifest.
        signed: the signed run manifest.
    """

    root: Path
    signed: Signed[RunManifest]

    def node(self, name: str, signing: SigningKey, meter: TallyMeter | None = None) -> Node:
        """Return a node of the run."""
        store = MeteredStore(LocalStore(self.root / "store"), meter or TallyMeter())
        clock = SystemClock()
        return Node(
            run_id=self.signed.digest,
            run=self.signed.record,
            key=signing,
            name=name,
            store=store,
            state=StateStore(self.root / name, self.signed.digest),
            clock=clock,
            beacon=StoreBeacon(store, self.signed.record.beacon, clock),
            telemetry=NullTelemetry(),
            run_sync=trio.to_thread.run_sync,
        )

    @classmethod
    def open(cls, root: Path) -> "LocalRun":
        """Return the run of a directory."""
        return cls(root, creation.open_run((root / "run.manifest").read_bytes()))


def create_run(root: Path, rounds: int) -> LocalRun:
    """Create a run whose windows have `rounds` seconds."""
    rules = demo_rules(
        groups=GROUPS, rounds=rounds, commit_rounds=rounds - 4, audit_rounds=rounds - 3,
        seal_rounds=2 * rounds, verdict_rounds=3 * rounds, deposit=0.0,
    )  # fmt: skip
    rules = creation.completed(rules, "load")
    chain = BEACON.chain(PERIOD_MS, int(time.time() * 1000) + 12_000)
    authority = creation.first_authority(
        rules, roots=[key("root").public], trainers=[key("trainer").public], validators=[key("validator").public]
    )
    proof = proof_file.read(PACKAGED_POLICY / proof_file.NAME)
    manifest = creation.draft_manifest(rules, PACKAGED_POLICY, chain, authority, proof)
    (root / "run.manifest").write_bytes(sign(manifest, key("root")))
    return LocalRun.open(root)


def run_validator_process(root: Path) -> None:
    """Run a validator in this process and print a line of JSON for every window that it has revealed."""
    torch.set_num_threads(1)
    local_run = LocalRun.open(root)
    meter = TallyMeter()
    node = local_run.node("validator", key("validator"), meter)
    policy = Policy.load(PACKAGED_POLICY)
    compute = Compute(models.build(policy))
    initial_memory = resident("VmRSS")

    async def report() -> None:
        window, cpu_before = 0, 0.0
        while True:
            await node.clock.sleep_until(
                node.run.beacon.round_time(node.run.schedule.audit(window)) + 0.9 * window_seconds(local_run)
            )
            cpu = time.process_time()
            line = {
                "window": window,
                "requests": sum(tally.count for tally in meter.tallies.values()),
                "cpu": cpu - cpu_before,
                # ru_maxrss would begin with the parent's peak
                "extra_mib": (resident("VmHWM") - initial_memory) / 2**20,
            }
            print(json.dumps(line), flush=True)
            window, cpu_before = window + 1, cpu

    async def run() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(report)
            nursery.start_soon(
                run_validator,
                node,
                make_task(node, policy),
                compute,
                ValidatorSettings(evaluate=False, poll_seconds=1.0),
            )

    trio.run(run)


def window_seconds(local_run: LocalRun) -> float:
    """Return the length of a window in seconds."""
    return local_run.signed.record.schedule.rounds * PERIOD_MS / 1000


class Miners:
    """All miners of the run, honest and junk miners, in one process."""

    def __init__(self, local_run: LocalRun, honest: int, junk: int, extra: int) -> None:
        self.local_run = local_run
        self.node = local_run.node("miners", key("miners"))
        self.policy = Policy.load(PACKAGED_POLICY)
        self.compute = Compute(models.build(self.policy))
        self.honest = [key(f"honest {number}") for number in range(honest)]
        self.junk = [key(f"junk {number}") for number in range(junk)]
        self.extra = extra
        engine = make_engine(self.compute, self.node.run_sync)
        self.engine = engine
        self.producer = HonestProducer(make_task(self.node, self.policy), engine)

    async def announce(self) -> None:
        """Publish the announcements of all miners."""
        for miner in (*self.honest, *self.junk):
            record = Announcement.model_validate(
                {
                    "run": self.local_run.signed.digest,
                    "key": miner.public,
                    "role": "miner",
                    "name": "",
                    "space": "",
                    "groups": GROUPS,
                    "credential": b"",
                    "expires_ms": int((time.time() + 7200) * 1000),
                }
            )
            await self.node.store.put(paths.participant(miner.public), sign(record, miner))

    async def deliver(self, window: int) -> None:
        """Deliver the work of all miners in one window."""
        node = self.node
        randomness = await node.randomness(node.run.schedule.opening(window))
        template: list[Group] = []
        for begin in range(0, len(self.honest), 20):
            miners = self.honest[begin : begin + 20]
            for miner, groups in zip(miners, await self._honest_groups(miners, window, randomness), strict=True):
                template = template or groups
                await self._put(miner, *assemble(groups, "torch-float32"))
        for number, miner in enumerate(self.junk):
            await self._deliver_junk(JUNK_KINDS[number % len(JUNK_KINDS)], miner, window, template)

    async def _honest_groups(self, miners: Sequence[SigningKey], window: int, randomness: bytes) -> list[list[Group]]:
        windows = [MiningWindow(window, randomness, 0, miner.public) for miner in miners]
        assignments = [self.producer.assignments(mining_window, range(GROUPS)) for mining_window in windows]
        generations = await self.producer.generate(
            windows[0], [item for own_assignments in assignments for item in own_assignments]
        )
        groups_by_miner = []
        for position, (mining_window, own_assignments) in enumerate(zip(windows, assignments, strict=True)):
            own_generations = generations[position * GROUPS : (position + 1) * GROUPS]
            groups = [
                self.producer.group(
                    mining_window, item, await self.producer.rollouts(mining_window, item, rollouts_of_group)
                )
                for item, rollouts_of_group in zip(own_assignments, own_generations, strict=True)
            ]
            groups_by_miner.append(groups)
        return groups_by_miner

    async def _put(self, miner: SigningKey, batch: bytes, commitment: Commitment) -> None:
        await self.node.store.put(paths.batch(miner.public, commitment.window, commitment.batch), batch)
        await self.node.store.put(paths.commitment(miner.public, commitment.window), sign(commitment, miner))

    async def _deliver_junk(self, kind: str, miner: SigningKey, window: int, template: Sequence[Group]) -> None:
        noise = random.Random(miner.public + window.to_bytes(4, "big")).randbytes(4096)
        for number in range(self.extra):
            await self.node.store.put(f"{miner.public.hex()}/extra/{window}-{number}", noise)
        path = paths.commitment(miner.public, window)
        template_copies = [group.model_copy(update={"miner": miner.public}) for group in template]
        batch, commitment = assemble(template_copies, "torch-float32")
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
            batch_bytes = bomb * GROUPS
            await self._put(
                miner,
                batch_bytes,
                commitment.model_copy(update={"batch": content_digest(batch_bytes), "groups": entries}),
            )
        elif kind == "wrong prompt":
            await self._put(miner, batch, commitment)
        elif kind == "empty sketches":
            task = self.producer.task
            randomness = await self.node.randomness(self.node.run.schedule.opening(window))
            groups = []
            for group in template_copies:
                prompt = task.assign(window, randomness, miner.public, group.index).prompt
                rollouts = tuple(item.model_copy(update={"sketch": bytes(len(item.sketch))}) for item in group.rollouts)
                prompt_bytes = b"".join(token.to_bytes(4, "little") for token in prompt)
                groups.append(group.model_copy(update={"prompt": prompt_bytes, "rollouts": rollouts}))
            await self._put(miner, *assemble(groups, "torch-float32"))
        elif kind == "too many":
            too_many_groups = [
                template_copies[index % GROUPS].model_copy(update={"index": index}) for index in range(4 * GROUPS)
            ]
            await self._put(miner, *assemble(too_many_groups, "torch-float32"))


async def measure(root: Path, honest: int, junk: int, windows: int, extra: int, rounds: int) -> list[dict[str, float]]:
    """Run some windows and return the validator's figures of each.

    Args:
        root: directory of the run.
        honest, junk: number of honest miners and of junk miners.
        windows: number of windows.
        extra: useless objects of each junk miner in each window.
        rounds: seconds of a window.
    """
    local_run = create_run(root, rounds)
    miners = Miners(local_run, honest, junk, extra)
    trainer = local_run.node("trainer", key("trainer"))
    section = TrainerSection(groups_per_step=1 << 20)
    lines: list[dict[str, float]] = []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(
            lambda: publish_rounds(BEACON, local_run.signed.record.beacon, trainer.store, trainer.clock, keep=1000)
        )
        weights = load_weights(PACKAGED_POLICY)
        settings = LearnerSettings(loss=section, optimizer=section)
        learner = partial(make_learner, miners.compute, settings, "bf16", weights)
        nursery.start_soon(run_training, trainer, learner, lambda: weights, section)
        nursery.start_soon(run_publisher, trainer, PublisherSettings())
        await miners.announce()
        await miners.engine.stage(0, weights)
        await miners.engine.commit()
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "bench.load", "--validate", str(root)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
            assert process.stdout is not None
            try:
                for window in range(windows):
                    await miners.node.clock.sleep_until(local_run.signed.record.opening_time(window))
                    await miners.deliver(window)
                    delay = time.time() - local_run.signed.record.deadline_time(window)
                    if delay > 0:
                        print(f"window {window}: the miners were {delay:.1f} s late; increase --seconds")
                    lines.append(json.loads(await trio.to_thread.run_sync(process.stdout.readline)))
                    lines[-1]["judged"] = await judged_miners(miners, window)
                    print(f"{honest} honest, {junk} junk: {lines[-1]}", flush=True)
            finally:
                process.terminate()
        nursery.cancel_scope.cancel()
    return lines


async def judged_miners(miners: Miners, window: int) -> int:
    """Return how many honest miners have a verdict of a window now."""
    count = 0
    for miner in miners.honest:
        try:
            await miners.node.store.get(paths.verdict(key("validator").public, window, miner.public), 1 << 26)
            count += 1
        except NotFoundError:
            continue
    return count


def main() -> None:
    """Run both cases and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--honest", type=int, default=200, help="honest miners")
    parser.add_argument("--junk", type=int, default=800, help="junk miners")
    parser.add_argument("--extra", type=int, default=20, help="useless objects of a junk miner in each window")
    parser.add_argument("--windows", type=int, default=4, help="windows of each run")
    parser.add_argument("--seconds", type=int, default=45, help="length of a window")
    parser.add_argument("--validate", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.validate:
        run_validator_process(arguments.validate)
        return
    directory = "/dev/shm" if Path("/dev/shm").is_dir() else None  # the disk's fsync is not what is measured
    results = {}
    for junk in (0, arguments.junk):
        root = Path(tempfile.mkdtemp(prefix="grailnode-load-", dir=directory))
        try:
            results[junk] = trio.run(
                measure,
                root,
                arguments.honest,
                junk,
                arguments.windows,
                arguments.extra if junk else 0,
                arguments.seconds,
            )
        finally:
            shutil.rmtree(root)
    print("window  requests  CPU s  without junk  junk's share: of the CPU  of the window  extra MiB  honest judged")
    requests_before = 0.0
    for honest_only, with_junk in zip(results[0], results[arguments.junk], strict=True):
        junk_seconds = with_junk["cpu"] - honest_only["cpu"]
        requests = with_junk["requests"] - requests_before
        print(
            f"{with_junk['window']:6.0f}  {requests:8.0f}  {with_junk['cpu']:5.1f}  {honest_only['cpu']:12.1f}  "
            f"{junk_seconds / with_junk['cpu']:24.3f}  {junk_seconds / arguments.seconds:13.3f}  "
            f"{with_junk['extra_mib']:9.0f}  {with_junk['judged']:.0f} of {arguments.honest}"
        )
        requests_before = with_junk["requests"]


if __name__ == "__main__":
    main()
