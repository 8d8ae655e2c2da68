"""The run that a command line names, by its run.toml or by the URL of its manifest, before anything of it is opened.

Nothing here imports torch, for which a wrong path or a wrong key should not wait.
"""

import re
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from grailnode import UserError
from grailnode.config import Config, load, without_file
from grailnode.store.place import URL_RULE, is_space_url

_manifest_url: Final = re.compile(r"(.+)/runs/([0-9a-f]{64})")


def read_config(run: str, overrides: tuple[str, ...] = (), *, trusts: bool = False) -> Config:
    """Return the configuration of a run, whose manifest may be at a URL; UserError if it cannot be used, or gives no
    id where no server is trusted to say which run it has.
    """
    if not is_url(run):
        config = load(Path(run), overrides)
    else:
        base, run_id = split_manifest_url(run)
        check_base(base, f"--run {run}")
        values: dict[str, Any] = {"run": {"manifest": run, "id": run_id}, "beacon": {"key": ""}}
        if base:
            place = {"kind": "https", "url": base}
            values["store"] = {**place, "meeting": place}
        config = without_file(values, overrides, Path.cwd())
    url = config.run.manifest
    if is_url(url) and not urlsplit(url).path.strip("/"):
        raise UserError(f"{url}: names a server and no run; a manifest's URL is like {url.rstrip('/')}/runs/ID")
    if is_url(url) and not trusts and not run_id_of_url(config):
        raise UserError(
            f"{url}: which run? give its id with --set run.id=ID, or take this server's word for it with --trust-run"
        )
    return config


def is_url(text: str) -> bool:
    """Return whether a command line's FILE-or-URL is a URL."""
    return text.startswith(("https://", "http://"))


def split_manifest_url(url: str) -> tuple[str, str]:
    """Return the base URL and the run's id of a manifest's URL `BASE/runs/ID`; two empty texts for any other URL."""
    match = _manifest_url.fullmatch(url)
    return (match[1], match[2]) if match else ("", "")


def run_id_of_url(config: Config) -> str:
    """Return the id of a run whose manifest is at a URL; empty where nobody gives it."""
    return config.run.id or split_manifest_url(config.run.manifest)[1]


def check_base(base: str, source: str) -> None:
    """Check that objects can be read below the base of a manifest's URL, which the option `source` gave."""
    if not is_space_url(base):
        raise UserError(f"{source}: {URL_RULE}")
