"""Check tasks of reasoning-gym by the contract of environments: `python -m bench.reasoning_gym [TASK ...]`.

Without a task it checks all that are not refused. For each it prints the number of seeds, the most that an answer
without merit earned, and what part of the contract failed. It exits with 1 if one did. Tasks that search a second for
each problem have fewer seeds. It needs `pip install '.[code,reasoning-gym]'`; on two idle cores a task takes from 10
seconds to a minute.
"""

import argparse
import importlib
import json
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

from grailnode.environments import contract, registry
from grailnode.environments.extras.reasoning_gym import REFUSED
from grailnode.environments.plugin_environment import PluginEnvironment
from grailnode.environments.wheels import PluginError, unpack
from grailnode.sandbox import BubblewrapSandbox
from protocol.environments.base import SandboxError

NAME = "reasoning-gym"
HASH_SEEDS = (1, 2)
FEWER = {"futoshiki": 20, "knight_swap": 20}
"""The seeds of tasks that search long for each problem: 0.7 and 1.1 seconds of processor time on the machine of
docs/benchmarks, where others take milliseconds.
"""


def main() -> None:
    """Print a line for each task."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tasks", nargs="*", metavar="TASK", help="Default: all that are not refused.")
    parser.add_argument("--problems", type=int, default=contract.PROBLEMS, help="Seeds, and held-out problems.")
    parser.add_argument("--levels", type=int, default=1, help="Most levels of a task's curriculum.")
    parser.add_argument("--threads", type=int, default=2, help="Tasks that are checked at a time.")
    options = parser.parse_args()
    tasks: Sequence[str] = options.tasks or list(usable_tasks())
    passed = 0
    with TemporaryDirectory() as directory, ThreadPoolExecutor(options.threads) as pool:
        plugin = registry.open_plugin(NAME, json.dumps({"task": tasks[0]}), Path(directory))
        plugin.environment.close()
        folders = [unpack(wheel, Path(directory)) for wheel in plugin.wheels]
        print(f"{len(folders)} wheels of {sum(wheel.ref.size for wheel in plugin.wheels) / 1e6:.1f} MB")
        for line in pool.map(lambda task: check(task, folders, options.problems, options.levels), tasks):
            print(line, flush=True)
            passed += line.endswith(" ok")
    print(f"{passed} of {len(tasks)} tasks passed")
    sys.exit(passed < len(tasks))


def usable_tasks() -> Iterator[str]:
    """Yield the registered tasks that are not refused."""
    datasets = importlib.import_module("reasoning_gym.factory").DATASETS
    importlib.import_module("reasoning_gym")
    yield from sorted(datasets.keys() - REFUSED.keys())


def check(task: str, folders: Sequence[Path], problems: int, levels: int) -> str:
    """Return a line about a task, which ends with ' ok' if it keeps the contract."""
    config, problems = json.dumps({"task": task, "levels": levels}).encode(), min(problems, FEWER.get(task, problems))
    try:
        first, second = (_observe(config, folders, problems, hash_seed) for hash_seed in HASH_SEEDS)
    except (PluginError, SandboxError) as error:
        return f"{task:<26} {problems:>3} seeds  {error}"
    failed = [f"{part}: {failure}" for part, failure in contract.failures(first, second) if failure]
    earned = max(reward for answer, _, reward in first.plays if answer == "junk" and isinstance(reward, float))
    return f"{task:<26} {problems:>3} seeds  junk {earned:.2f}  {'; '.join(failed) or 'ok'}"


def _observe(config: bytes, folders: Sequence[Path], problems: int, hash_seed: int) -> contract.Observations:
    base = BubblewrapSandbox.open(registry.OWN_PYTHON)
    environment = PluginEnvironment.open(base, folders, NAME, config, hash_seed, strict=True)
    try:
        return contract.observe(environment, problems)
    finally:
        environment.close()


if __name__ == "__main__":
    main()
