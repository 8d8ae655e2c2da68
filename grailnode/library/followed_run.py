"""The versions of a run for other programs: every one is verified before it is given out."""

import os
import queue
import threading
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import trio
from torch import Tensor

from grailnode import UserError
from grailnode.library.progress import Report, progress, report_to_stderr
from grailnode.node.node_makers import make_spectator
from grailnode.run.joining import open_config_to_read
from roles.authority_updates import poll_authority, refresh_authority
from roles.gather import STORAGE_ERRORS, first_failure
from roles.node.identity import Node
from roles.policy.follower import Follower
from roles.policy.serving import run_unless_revised


@dataclass(frozen=True)
class FollowedVersion:
    """One version of a policy.

    Attributes:
        number: of the version; step: the optimizer steps up to it.
        digest: of the weights, as the trainer signed it.
        weights: BF16 tensors by the names in the run's checkpoint. The next version may share their memory: load them,
            or copy them, before you go on.
    """

    number: int
    step: int
    digest: bytes
    weights: Mapping[str, Tensor]


def follow(
    run: str | Path, *, poll_seconds: float = 1.0, report: Report = report_to_stderr
) -> Iterator[FollowedVersion]:
    """Yield the newest version of a run, and then, whenever the caller asks again, the newest one that is another.

    The versions between are left out. After the roots took versions back, numbers come again, with other weights.
    Storage that does not answer, or shows what must not be followed, is asked again and reported once. Before the first
    version, places where the roots may have revoked a key get half a minute to answer; later, nothing waits for those
    that hang (roles/authority_updates.py).

    Args:
        run: the path of a run.toml, or the URL of the run's manifest.
        report: takes lines for people, at the latest every 30 s while a version is fetched.

    Raises:
        UserError: the run cannot be opened, or a forked process asks for more of what its parent follows.
    """
    versions, process = follow_async(run, poll_seconds=poll_seconds, report=report), os.getpid()
    with _event_loop() as token:
        while True:
            if os.getpid() != process:  # which has no event loop's thread
                raise UserError("another process began to follow the run; call follow() in this one")
            yield trio.from_thread.run(versions.__anext__, trio_token=token)


async def follow_async(
    run: str | Path, *, poll_seconds: float = 1.0, report: Report = report_to_stderr
) -> AsyncIterator[FollowedVersion]:
    """Yield the versions of a run to a program in trio, as `follow` does."""
    # abandoned where the caller ends: a server that hangs takes a minute
    node = make_spectator(await trio.to_thread.run_sync(open_config_to_read, str(run), abandon_on_cancel=True))
    follower = await Follower(node).open()
    last: tuple[int, bytes] | None = None
    while True:
        version = await _next(node, follower, last, poll_seconds, report)
        last = version.number, version.digest
        yield version


@contextmanager
def _event_loop() -> Iterator[trio.lowlevel.TrioToken]:
    """Run an event loop in a thread while the block runs; what still runs in it then is cancelled."""
    started = queue.SimpleQueue[tuple[trio.lowlevel.TrioToken, trio.CancelScope]]()

    async def main() -> None:
        with trio.CancelScope() as scope:
            started.put((trio.lowlevel.current_trio_token(), scope))
            await trio.sleep_forever()

    thread = threading.Thread(target=trio.run, args=(main,), name="grailnode-follow", daemon=True)
    thread.start()
    token, scope = started.get()
    try:
        yield token
    finally:
        token.run_sync_soon(scope.cancel)
        thread.join()


async def _next(
    node: Node, follower: Follower, last: tuple[int, bytes] | None, poll_seconds: float, report: Report
) -> FollowedVersion:
    """Return the newest version as soon as it is another one than the last."""
    problem, newest = "", list[FollowedVersion]()

    async def look() -> None:
        await follower.refresh()
        head = follower.chain.head
        if head is None:
            return
        manifest = follower.chain.manifest(head.version)
        if (manifest.version, manifest.weights) != last:
            with progress(report, f"version {manifest.version}: fetching and verifying"):
                weights = await follower.rebuild(manifest.version)
            newest.append(FollowedVersion(weights.version, manifest.optimizer_step, weights.digest, weights.weights))

    while True:
        try:
            await refresh_authority(node)
            async with first_failure(Exception) as tasks:
                tasks.start_soon(poll_authority, node)  # a version takes long, and its trainer may be revoked meanwhile
                await run_unless_revised(node, look)
                tasks.cancel_scope.cancel()
            if newest:
                return newest[0]
        except STORAGE_ERRORS as error:
            if str(error) != problem:
                problem = str(error)
                report(f"cannot follow now: {problem}")
        await trio.sleep(poll_seconds)
