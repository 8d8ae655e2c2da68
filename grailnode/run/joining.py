"""The run manifest of a run that is elsewhere: fetched over HTTPS, checked, kept beside the node's state."""

import random
import re
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import trio

from grailnode.config import Config, ConfigError
from grailnode.run import creation
from grailnode.run.files import write_whole
from grailnode.store.decorators.retrying import RetryingStore, RetryPolicy
from grailnode.store.https.https_store import HttpsStore, open_client
from protocol import limits

_MAX_BYTES: Final = limits.MAX_RUN_BYTES + limits.MAX_ENVELOPE_BYTES
_PATIENCE: Final = RetryPolicy(attempts=4, deadline=60.0)
_named: Final = re.compile(r"(.+)/runs/([0-9a-f]{64})")


def is_url(text: str) -> bool:
    """Whether a command line's FILE-or-URL is a URL."""
    return text.startswith(("https://", "http://"))


def named_run(url: str) -> tuple[str, str]:
    """The base URL and the run's id that a manifest's URL ends with, as in `BASE/runs/ID`; empty where it does not."""
    match = _named.fullmatch(url)
    return (match[1], match[2]) if match else ("", "")


def localize(config: Config, *, trust: bool) -> tuple[Config, str]:
    """A configuration whose run manifest is a file: one at a URL is fetched once and kept below the node's state.

    Args:
        trust: take the server's word for which run it is, where no id is given.

    Returns:
        The configuration, and the line to print where the server's word was taken; empty otherwise.

    Raises:
        ConfigError: no id is given, and the server is not to be trusted with it.
        StoreError, ProtocolError: the manifest is not to be had, or not that run's.
    """
    url = config.run.manifest
    if not is_url(url):
        return config, ""
    if not urlsplit(url).path.strip("/"):
        raise ConfigError(f"{url}: names a server and no run; a manifest's URL is like {url.rstrip('/')}/runs/ID")
    run_id = config.run.id or named_run(url)[1]
    if not run_id and not trust:
        raise ConfigError(
            f"{url}: which run? give its id with --set run.id=ID, or take this server's word for it with --trust-run"
        )
    kept = config.at(config.node.state) / "runs" / f"{run_id}.manifest"
    if run_id and kept.is_file():
        return _with_manifest(config, kept, run_id), ""
    data = trio.run(_fetch, url)
    signed = creation.open_run(data, bytes.fromhex(run_id) if run_id else None)
    found = signed.digest.hex()
    kept = kept.with_name(f"{found}.manifest")
    kept.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_whole(kept, data)
    told = "" if run_id else f"run {found} ({signed.record.name}): on the word of {urlsplit(url).hostname} alone"
    return _with_manifest(config, kept, found), told


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
    except ValueError as error:
        raise ConfigError(f"{url}: {error}") from None
