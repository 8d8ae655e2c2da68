"""Opening a run that a command line names by its run.toml or by the URL of its manifest.

A manifest at a URL is fetched over HTTPS, checked, and kept in the node's state.
"""

import random
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import platformdirs
import trio

from grailnode import UserError
from grailnode.config import Config
from grailnode.run import creation
from grailnode.run.files import write_whole
from grailnode.run.run_option import is_url, read_config, run_id_of_url
from grailnode.store.decorators.retrying import RetryingStore, RetryPolicy
from grailnode.store.https.https_store import HttpsStore, open_client
from protocol import limits
from protocol.errors import error_context
from roles.ports import LineReporter, NotFoundError

_MAX_BYTES: Final = limits.MAX_RUN_BYTES + limits.MAX_ENVELOPE_BYTES
_PATIENCE: Final = RetryPolicy(attempts=4, deadline=60.0)


def open_config(run: str, overrides: tuple[str, ...] = (), *, trust: LineReporter | None = None) -> Config:
    """Return the configuration of a run; its manifest is a file. One at a URL is fetched once and kept in the node's
    state. Where no id is given, `trust` accepts the run that the server names, and takes a line about that; UserError
    without.
    """
    config = read_config(run, overrides, trusts=trust is not None)
    url, run_id = config.run.manifest, run_id_of_url(config)
    if not is_url(url):
        return config
    directory = config.at(config.node.state) / "runs"
    file = directory / f"{run_id}.manifest"
    if run_id and file.is_file():
        return _with_manifest(config, file, run_id)
    data = trio.run(_fetch, url)
    with error_context(url):
        manifest = creation.open_run(data, bytes.fromhex(run_id) if run_id else None)
    fetched_id = manifest.digest.hex()
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    file = directory / f"{fetched_id}.manifest"
    write_whole(file, data)
    if not run_id and trust is not None:
        trust(f"run {fetched_id} ({manifest.record.name}): on the word of {urlsplit(url).hostname} alone")
    return _with_manifest(config, file, fetched_id)


def open_config_to_read(run: str, overrides: tuple[str, ...] = (), *, trust: LineReporter | None = None) -> Config:
    """Return the configuration of a run for a program that reads it and is none of its nodes.

    What such a program downloads goes to the user's own cache directory: it leaves nothing where it was called, and no
    file among those of the run's nodes, which may belong to another user.
    """
    directory = platformdirs.user_cache_path("grailnode")
    own = (f"node.state={directory}", f"node.cache={directory / 'objects'}")
    return open_config(run, own + overrides, trust=trust)


def _with_manifest(config: Config, file: Path, run_id: str) -> Config:
    section = config.run.model_copy(update={"manifest": str(file), "id": run_id})
    return config.model_copy(update={"run": section})


async def _fetch(url: str) -> bytes:
    base, _, name = url.rpartition("/")
    plain = urlsplit(url).hostname in {"127.0.0.1", "localhost"}
    try:
        async with open_client() as client:
            rng = random.Random()  # noqa: S311 - jitter, nothing secret
            store = RetryingStore(HttpsStore(base, client, plain_http=plain), rng, _PATIENCE)
            return await store.get(name, _MAX_BYTES)
    except NotFoundError as error:
        raise NotFoundError(f"{url}: no run is there; its trainer publishes it, or the URL is wrong") from error
    except ValueError as error:
        raise UserError(f"{url}: {error}") from None
