"""The versions of a run for other programs: every one is verified before it is given out."""

import queue
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import trio
from torch import Tensor

from grailnode.node.node_makers import make_spectator
from grailnode.run.joining import open_config_to_read
from protocol.errors import ExpiredError
from roles.authority_updates import refresh_authority
from roles.node.identity import Node
from roles.policy.follower import Follower
from roles.ports import StoreError

_HAND_OVER_SECONDS: Final = 0.1


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
    run: str,
    *,
    poll_seconds: float = 1.0,
    report: Callable[[str], None] = lambda line: print(line, file=sys.stderr),
) -> Iterator[FollowedVersion]:
    """Yield the newest version of a run, and each newer one that is there when the caller asks again.

    The versions between are left out. Storage that does not answer is asked again, and reported once.

    Args:
        run: the path of a run.toml, or the URL of the run's manifest.
        report: takes lines for people.

    Raises:
        UserError: the run cannot be opened.
        ProtocolError: storage shows two histories, or what the trainer did not sign.
    """
    node = make_spectator(open_config_to_read(run))
    results = queue.Queue[FollowedVersion | BaseException](maxsize=1)
    stopped = threading.Event()

    def work() -> None:
        try:
            trio.run(_follow, node, results, stopped, poll_seconds, report)
        except BaseException as error:  # noqa: BLE001 - the caller's thread raises it
            results.put(error)

    thread = threading.Thread(target=work, name="grailnode-follow", daemon=True)
    thread.start()
    try:
        while True:
            result = results.get()
            if isinstance(result, BaseException):
                raise result
            yield result
    finally:
        stopped.set()
        while thread.is_alive():
            try:
                results.get(timeout=_HAND_OVER_SECONDS)
            except queue.Empty:
                continue
        thread.join()


async def _follow(
    node: Node,
    results: "queue.Queue[FollowedVersion | BaseException]",
    stopped: threading.Event,
    poll_seconds: float,
    report: Callable[[str], None],
) -> None:
    follower, newest, problem = await Follower.open(node), -1, ""
    while not stopped.is_set():
        try:
            await refresh_authority(node)
            await follower.refresh()
            head = follower.chain.head
            if head is not None and head.version > newest:
                weights = await follower.rebuild(head.version)
                newest, problem = weights.version, ""
                step = follower.chain.manifest(newest).optimizer_step
                version = FollowedVersion(newest, step, weights.digest, weights.weights)
                await trio.to_thread.run_sync(results.put, version)
        except (StoreError, ExpiredError) as error:
            if str(error) != problem:
                problem = str(error)
                report(f"cannot follow now: {problem}")
        await trio.sleep(poll_seconds)
