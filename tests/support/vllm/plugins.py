"""Let vLLM's processes import modules of this folder."""

import os
import shutil
from pathlib import Path


def add_module(environment: dict[str, str], directory: Path, name: str) -> Path:
    """Let vLLM's processes import a module of this folder; return the site for them, which is on their path then."""
    site = directory / "site"
    site.mkdir(parents=True, exist_ok=True)
    shutil.copy(Path(__file__).with_name(f"{name}.py"), site)
    if str(site) not in environment["PYTHONPATH"].split(os.pathsep):
        environment["PYTHONPATH"] += f"{os.pathsep}{site}"
    return site


def schedule_ahead(environment: dict[str, str], directory: Path) -> None:
    """Turn async scheduling on in vLLM's processes, which is vLLM's default on a GPU and which a CPU has not."""
    information = add_module(environment, directory, "async_scheduling") / "async_scheduling-0.dist-info"
    information.mkdir(exist_ok=True)
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: async_scheduling\nVersion: 0\n")
    (information / "entry_points.txt").write_text(
        "[vllm.general_plugins]\nasync_scheduling = async_scheduling:register\n"
    )
    environment["VLLM_PLUGINS"] += ",async_scheduling"
