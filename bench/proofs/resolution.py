"""Table (e): how far hidden states of honest nodes and of cheats differ, beside the unit of a sketch.

A difference is that of two states of one position, relative to their length. The difference of one value of a
`projection` sketch is a normal variable whose standard deviation is 512 units times this. A line has the quantiles over
the positions of some groups.
"""

from dataclasses import replace
from itertools import chain
from typing import Final

import numpy as np
import torch

from bench.proofs.power import cheats
from bench.proofs.profiles import Profile, select
from bench.proofs.setting import GROUP_SIZE, Setting
from bench.proofs.sides import Side
from grailnode.engine.torch_engine import TorchEngine
from protocol.rollout import challenge
from roles.ports import Request

_QUANTILES: Final = (0.1, 0.5, 0.9, 0.99, 1.0)
_UNIT: Final = 1.0 / 512.0


async def table(setting: Setting, groups: int, part: str) -> None:
    """Print the table for the profiles whose names contain `part`."""
    print(f"one unit of a sketch: {_UNIT:.1e} of a state's length")
    print(f"{'':42}" + "".join(f"{quantile:>9.0%}" for quantile in _QUANTILES))
    for profile in select(part):
        plain = profile.plain
        honest = {
            "same": plain,
            "small batches": replace(plain, variant=replace(plain.variant, batch_tokens=512)),
            "attention by the formula": replace(plain, variant=replace(plain.variant, attention="eager")),
        }
        for name, side in chain(honest.items(), cheats(setting, plain)):
            differences = await _differences(setting, profile, side, groups)
            quantiles = np.quantile(differences, _QUANTILES)
            print(f"{profile.name:16}{name:26}" + "".join(f"{value:9.1e}" for value in quantiles), flush=True)


async def _differences(setting: Setting, profile: Profile, side: Side, groups: int) -> np.ndarray:
    """Return the relative differences of the states that a side generates and the profile checks: float32 [N]."""
    task, seed = setting.task(setting.test_seed), setting.test_seed.to_bytes(32, "little")
    seeds = [challenge.group_seed(bytes(32), 0, seed, bytes(32), number) for number in range(groups)]
    requests = [
        Request(setting.policy.tokenizer.encode(task.prompt(group)), challenge.rollout_seed(group, index))
        for group in seeds
        for index in range(GROUP_SIZE)
    ]
    generations = await (await side.serve(setting.policy, setting.weights, 2)).generate(requests, task.params)
    checking = await profile.plain.serve(setting.policy, setting.weights, 1)
    assert isinstance(checking, TorchEngine)
    forwards = await checking.forward([request.prompt for request in requests], [item.tokens for item in generations])
    generated, checked = (torch.cat([item.hidden for item in items]).float() for items in (generations, forwards))
    differences: np.ndarray = ((generated - checked).norm(dim=1) / checked.norm(dim=1)).numpy()
    return differences
