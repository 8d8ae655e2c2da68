"""Seconds of each part of an update in place, by size and number of changed elements."""

import argparse
import time
from functools import partial
from pathlib import Path

import torch

from bench.engines.setting import SIZES, directory, report, timed, with_changes
from grailnode.engine.causal_model import build
from grailnode.engine.policy import PACKAGED_POLICY, Policy, load_weights
from grailnode.engine.vllm.vllm_engine import VllmEngine
from grailnode.engine.vllm.vllm_server import ChildServer, ServerSettings
from protocol.chain.manifest import Manifest
from protocol.digest import digest_weights
from protocol.patch import encode
from tests.support.builders.policies import random_weights, write_policy


async def patches(python: Path, arguments: argparse.Namespace) -> None:
    """Measure each part of an update, while requests are under way."""
    for size in arguments.sizes:
        with directory() as place:
            policy = (
                Policy.load(PACKAGED_POLICY)
                if size == "genesis"
                else write_policy(place / "policy", max_position_embeddings=512, **SIZES[size])
            )
            model = build(policy)
            weights = load_weights(PACKAGED_POLICY) if size == "genesis" else random_weights(model)
            engine = VllmEngine(
                model, ChildServer(ServerSettings(python, policy.directory, place / "server")), place / "engine"
            )
            await engine.stage(0, weights)
            await engine.commit()
            client = await engine._connected()
            for version, share in enumerate(arguments.shares, 1):
                target = with_changes(weights, share, version)
                patch = encode(weights, target)
                manifest = Manifest.model_construct(version=version, weights=digest_weights(target))
                stage = await timed(partial(engine.stage_patch, version, patch, manifest))
                start = time.perf_counter()
                await client.post("/pause", mode="wait")
                (result,) = await client.call("commit", version=version)
                await client.post("/reset_prefix_cache")
                await client.post("/resume")
                pause = time.perf_counter() - start
                engine._checkpoints.commit()
                engine._version, engine._staged = version, None
                verify = await timed(engine.verify)
                changed = sum(int((weights[n].view(torch.int16) != target[n].view(torch.int16)).sum()) for n in weights)
                report(
                    kind="patches",
                    size=size,
                    elements=sum(tensor.numel() for tensor in weights.values()),
                    changed=changed,
                    patch_bytes=len(patch),
                    stage_seconds=round(stage, 4),
                    commit_seconds=round(result["seconds"], 4),
                    pause_seconds=round(pause, 4),
                    verify_seconds=round(verify, 4),
                )
                weights = target
            await engine.close()
