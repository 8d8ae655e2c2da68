"""The kernels of the patch codec, compiled before anything is measured."""

import torch

from protocol.patch import PROFILES, apply, encode


def compile_patch_kernels() -> None:
    """Compile the kernels for BF16 by a small patch, which takes seconds the first time on a machine; later they are
    loaded from a cache.
    """
    noise = torch.randn(2, 1 << 14, generator=torch.Generator().manual_seed(0))
    old = {"weight": noise[0].to(torch.bfloat16)}
    new = {"weight": (noise[0] + 1e-3 * noise[1]).to(torch.bfloat16)}
    for profile in PROFILES:
        apply(old, encode(old, new, profile=profile))
