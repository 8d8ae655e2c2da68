"""A trainer's processes and two followers with a large model, all at the same time.

    python -m bench.size_network 0.5B --versions 5 --directory DIR --seconds 280

Training takes steps from one batch and makes a version of each; upload publishes them and renews the head; followers
with bfloat16 engines look for the head twice a second, and serve each version. The command ends when both serve the
last version, or after some seconds; called again, it goes on where it stopped. It says which versions each follower
served, whether their bytes are those of the signed manifest (the engine's tensors are digested once more), how often it
found the head expired, and how long heads were still valid at least. Weights are random (bench/sizes.py); nobody
samples. 0.5B needs 15 GB of memory, and 20 GB of disk.
"""

import argparse
import json
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

import torch
import trio

from bench.sizes import SHAPES, Site
from grailnode.node.processes import FOLLOWER_BLOCK, TRAINER_BLOCK, return_large_blocks
from protocol.digest import digest_weights
from protocol.errors import ExpiredError, ProtocolError
from roles.authority_updates import refresh_authority
from roles.policy.serving import serve
from roles.ports import StoreError
from roles.trainer.publish.history import History
from roles.trainer.publish.publisher import Publisher, PublisherSettings

_FOLLOWERS: Final = ("follower-1", "follower-2")
_COMPLETIONS: Final = 2
_HEAD_SECONDS: Final = 30  # for which a head is valid
_POLL_SECONDS: Final = 0.5


@dataclass
class Progress:
    """What a follower has seen, over all calls.

    Attributes:
        versions: those that it served, with the digest of the engine's tensors.
        looks: how often it looked for the head; expired: how often that had expired.
        shortest: seconds for which a head was still valid, at least.
    """

    versions: dict[str, str] = field(default_factory=dict)
    looks: int = 0
    expired: int = 0
    shortest: float = 1e9
    peak_mb: int = 0


async def _train(site: Site) -> None:
    await site.training()


async def _upload(site: Site) -> None:
    node = site.node("trainer")
    await refresh_authority(node)
    history = await History.open(node.state)
    await Publisher(node, history, PublisherSettings(anchor_interval=1000, takeover_seconds=0.1, threads=1)).run()


async def _follow(site: Site, name: str) -> None:
    """Serve each version until the last one."""
    node, follower, engine = await site.follower_with_engine(name)
    file = site.directory / f"{name}.json"
    progress = Progress(**json.loads(file.read_text())) if file.exists() else Progress()
    last_error = ""
    while str(site.versions) not in progress.versions:
        await trio.sleep(_POLL_SECONDS)
        try:
            await follower.refresh()
        except ExpiredError:
            progress.looks += 1
            progress.expired += 1
            continue
        except (StoreError, ProtocolError) as error:
            if str(error) != last_error:  # until something is published, storage has no head
                last_error = str(error)
                print(f"{name}: {error}", file=sys.stderr, flush=True)
            continue
        head = follower.chain.head
        assert head is not None
        progress.looks += 1
        progress.shortest = min(progress.shortest, head.expires_ms / 1000 - node.clock.now())
        if engine.version != head.version:
            weights = await follower.rebuild(head.version)
            await serve(node, engine, weights)
            digest = await trio.to_thread.run_sync(digest_weights, weights.weights)
            assert digest == weights.digest == follower.chain.manifest(head.version).weights
            progress.versions[str(head.version)] = digest.hex()[:16]
            status = Path("/proc/self/status").read_text().splitlines()
            progress.peak_mb = int(next(line.split()[1] for line in status if line.startswith("VmHWM"))) // 1000
        file.write_text(json.dumps(asdict(progress)))


def _work(role: str, site: Site) -> None:
    torch.set_num_threads(1)
    return_large_blocks(FOLLOWER_BLOCK if role in _FOLLOWERS else TRAINER_BLOCK)
    if role in _FOLLOWERS:
        trio.run(_follow, site, role)
    else:
        trio.run({"training": _train, "upload": _upload}[role], site)


def main() -> None:
    """Run the processes, and print what the followers saw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("size", choices=list(SHAPES))
    parser.add_argument("--versions", type=int, default=5)
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=280.0)
    parser.add_argument("--role", choices=["training", "upload", *_FOLLOWERS], help="run this one in this process")
    arguments = parser.parse_args()
    directory: Path = arguments.directory
    directory.mkdir(parents=True, exist_ok=True)
    began = directory / "began"
    if not began.exists():
        began.write_text(str(time.time()))
    begin = 1_750_000_000.0 + time.time() - float(began.read_text())
    if arguments.role is not None:
        site = Site(directory, arguments.size, arguments.versions, _COMPLETIONS, begin)
        site.run = site.run.model_copy(update={"head_ttl": _HEAD_SECONDS})
        _work(arguments.role, site)
        return
    Site(directory, arguments.size, arguments.versions, _COMPLETIONS)  # digests genesis once
    command = [sys.executable, "-m", "bench.size_network", arguments.size, "--versions", str(arguments.versions)]
    command += ["--directory", str(directory), "--role"]
    processes = [subprocess.Popen([*command, role]) for role in ("training", "upload", *_FOLLOWERS)]
    deadline = time.monotonic() + arguments.seconds
    try:
        for process in processes[2:]:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.1, deadline - time.monotonic()))
    finally:
        for process in processes:
            process.kill()
            process.wait()
    for name in _FOLLOWERS:
        file = directory / f"{name}.json"
        print(f"{name}: {file.read_text() if file.exists() else 'nothing yet'}", flush=True)


if __name__ == "__main__":
    main()
