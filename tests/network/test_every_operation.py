"""A trainer whose process is killed before or after any one operation on its stores makes the same weights."""

from collections.abc import Awaitable, Callable
from functools import cache, partial

import pytest
import trio

from grailnode.node.wiring import run_publisher, run_training
from grailnode.observe.chain_check import verify_chain
from protocol import paths
from roles.ports import ObjectStore
from roles.trainer.publish.publisher import PublisherSettings
from roles.trainer.spool import INBOX
from tests.support.builders.snapshots import snapshot_views
from tests.support.builders.verified_batches import GROUPS, verified_batch
from tests.support.faults.crash_trigger import CrashingStore, CrashTrigger
from tests.support.simulation import small_policy
from tests.support.simulation.faulty_network import CHOICES
from tests.support.simulation.network import Network, key
from tests.support.simulation.recording_store import RecordingStore
from tests.support.simulation.seeded_scheduling import run_seeded

BATCHES = 2
SETTINGS = PublisherSettings(anchor_interval=2, keep_patches=2, keep_anchors=1, part_bytes=4096)


class Trainer(Network):
    """One trainer of which one process crashes at its n-th put, get or delete, counted over all its restarts."""

    store: RecordingStore

    def __init__(self, process: str, operation: int | None, after: bool) -> None:
        super().__init__(CHOICES, policy=small_policy.DIRECTORY)
        self.process = process
        self.store = RecordingStore()
        self.disk = RecordingStore()
        self.has_crashed = False
        self._scope = trio.CancelScope()
        self.trigger = CrashTrigger(
            lambda operation, path: operation != "list",
            operation if operation is not None else 1 << 60,
            after,
            self._crash,
        )

    async def _crash(self) -> None:
        self.has_crashed = True
        self._scope.cancel()
        await trio.sleep_forever()

    def medium(self, name: str, process: str) -> ObjectStore:
        return CrashingStore(self.store, self.trigger) if process == self.process else self.store

    def durable(self, name: str, process: str) -> ObjectStore:
        return CrashingStore(self.disk, self.trigger) if process == self.process else self.disk

    async def supervise(self, main: Callable[[], Awaitable[None]], may_crash: bool) -> None:
        """Run a process, and start it again whenever it has died."""
        while True:
            if not may_crash:
                await main()
            with trio.CancelScope() as scope:
                self._scope = scope
                await main()
            await trio.sleep(0.05)

    async def publish_batches(self) -> dict[int, str]:
        """Run until all batches were trained on and published; return the digest of each version's weights."""
        settings = self.trainer_settings(groups_per_step=GROUPS)
        training = partial(self._training, settings)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.run_beacon)
            nursery.start_soon(self.supervise, training, self.process == "/training")
            nursery.start_soon(self.supervise, self._upload, self.process == "/upload")
            for number in range(BATCHES):
                await self._wait_until_published(number)
                await self.disk.put(f"{INBOX}{number:010d}-x", verified_batch(number, version=0).to_bytes())
            await self._wait_until_published(BATCHES)
            await trio.sleep(1)
            nursery.cancel_scope.cancel()
        weights = await verify_chain(Network.node(self, "checker"), lambda line: None)
        assert weights.version == BATCHES
        names = [
            put.path.rsplit("/", 1)[-1].split("-") for put in self.store.under(paths.manifests(key("trainer").public))
        ]
        assert len({number for number, _ in names}) == len({digest for _, digest in names}) == BATCHES + 1
        views = snapshot_views(self.disk.puts)
        assert all(len(digests) == 1 for digests in views.values())
        assert views[BATCHES] == {weights.digest}
        return {version: min(digests).hex() for version, digests in views.items()}

    async def _training(self, settings: object) -> None:
        await run_training(self.node("trainer", "/training"), lambda: self.weights, self.compute, settings)  # type: ignore[arg-type]

    async def _upload(self) -> None:
        await run_publisher(self.node("trainer", "/upload"), SETTINGS)

    async def _wait_until_published(self, version: int) -> None:
        while not any(put.path.endswith(f"chain/weights/{version:010d}") for put in self.disk.puts):
            await trio.sleep(0.02)


def run_trainer(process: str, operation: int | None, after: bool) -> tuple[dict[int, str], bool]:
    """Return the digests of a trainer's weights by version, and whether it died."""

    async def scenario() -> tuple[dict[int, str], bool]:
        with trio.fail_after(600):
            trainer = Trainer(process, operation, after)
            return await trainer.publish_batches(), trainer.has_crashed

    weights, has_crashed = run_seeded(0, scenario)
    return weights, has_crashed


@cache
def weights_without_crash() -> dict[int, str]:
    """Return the digests of a trainer's weights by version if no process dies."""
    return run_trainer("/training", None, after=False)[0]


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("process", ["/training", "/upload"])
def test_a_trainer_killed_at_any_operation_makes_the_same_weights(process: str, after: bool):
    assert len(set(weights_without_crash().values())) == BATCHES + 1
    crashes = 0
    for operation in range(1000):
        weights, has_crashed = run_trainer(process, operation, after)
        assert weights == weights_without_crash(), f"killed {'after' if after else 'before'} operation {operation}"
        if not has_crashed:
            break
        crashes += 1
    assert crashes > 5
