"""Other projects' own receivers take our updates, and a serving vLLM has the weights afterwards, bit for bit.

TRL's deltas go through vLLM's receiver of sparse updates, `load_checkpoint_weight_patches`, which TRL's authors brought
into vLLM. TRL's own receiver was never released. slime's receiver is a patch of SGLang in slime's repository:
GRAILNODE_SLIME names a checkout (https://github.com/THUDM/slime, as of commit c1242116d714). It needs `xxhash`.
"""

import json
import os
import sys
import types
from contextlib import aclosing
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import safetensors.torch
import torch

from grailnode.convert.slime import INDEX, SHARD, read_slime, write_slime
from grailnode.convert.trl import write_trl
from grailnode.engine.policy import Policy
from grailnode.engine.vllm.vllm_client import VllmClient
from grailnode.engine.vllm.vllm_engine import VllmEngine
from grailnode.engine.vllm.vllm_server import ChildServer
from grailnode.engine.vllm.vllm_settings import VllmSettings
from protocol.compression import compress
from protocol.digest import Weights, digest_weights, raw_bytes
from protocol.patch import apply, encode
from roles.policy.causal_model import CausalModel
from tests.engine.engine_contract import changed, serve
from tests.engine.vllm_site import vllm_python
from tests.support.builders.policies import random_weights

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

PATCH = "docker/patch/latest/sglang-pull_weights.patch"
RECEIVER = "python/sglang/srt/weight_sync/local_checkpoint.py"
EXTENSION = """
import json
from safetensors import safe_open
from vllm.model_executor.model_loader import checkpoint_weight_patch as receiver
from grailnode.engine.vllm.inside.weight_session import WorkerExtension

class ReceivingExtension(WorkerExtension):
    def receive(self, path, shapes):
        with safe_open(path, framework="pt") as file:
            changed = {name: (file.get_tensor(f"{name}.indices"), file.get_tensor(f"{name}.values"))
                       for name in json.loads(file.metadata()["changed_params"])}
        patches = [receiver.CheckpointWeightPatch(name, tuple(shapes[name]), values.dtype, values, indices)
                   for name, (indices, values) in changed.items()]
        return sorted(receiver.load_checkpoint_weight_patches(self.model_runner.get_model(), patches))
"""


class ReceivingServer(ChildServer):
    """A server whose worker also has vLLM's receiver of sparse updates as a command."""

    def flags(self, socket: str) -> list[str]:
        words = super().flags(socket)
        words[words.index("--worker-extension-cls") + 1] = "receiving_extension.ReceivingExtension"
        return words

    def environment(self) -> dict[str, str]:
        own = super().environment()
        site = self.log.parent / "site"
        site.mkdir(parents=True, exist_ok=True)
        (site / "receiving_extension.py").write_text(EXTENSION)
        return own | {"PYTHONPATH": os.pathsep.join((own["PYTHONPATH"], str(site)))}


@pytest.fixture
def slime() -> Path:
    path = Path(os.environ.get("GRAILNODE_SLIME", ""))
    if not (path / PATCH).is_file():
        pytest.skip(f"GRAILNODE_SLIME names no checkout of slime with {PATCH}")
    return path


def new_file_of(patch: str, name: str) -> str:
    """Return the text of a file that a git patch adds."""
    part = next(part for part in patch.split("\ndiff --git ") if part.startswith(f"a/{name} "))
    lines = part.split("\n@@ ", 1)[1].splitlines()[1:]
    return "\n".join(line[1:] for line in lines if line.startswith("+")) + "\n"


def module_of(name: str, text: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    module = types.ModuleType(name)
    monkeypatch.setitem(sys.modules, name, module)
    exec(compile(text, name, "exec"), module.__dict__)
    return module


async def test_vllms_receiver_of_sparse_updates_takes_a_delta_of_trls_form(
    policy: Policy, model: CausalModel, tmp_path: Path
) -> None:
    server = ReceivingServer(VllmSettings(python=vllm_python(), sequences=8), policy.directory, tmp_path / "server")
    engine = VllmEngine(model, server, tmp_path / "engine")
    weights = random_weights(model)
    target = apply(weights, encode(weights, changed(weights, 1)))
    path = tmp_path / "delta.safetensors"
    path.write_bytes(write_trl(target, 1, weights)[1])
    shapes = {name: list(shape) for name, shape in model.shapes.items()}
    try:
        await serve(engine, weights)
        async with server.client(60.0, 1) as client:
            body = {"method": "receive", "args": [str(path), shapes]}
            answer = await client.post("/collective_rpc", json=body)
            assert answer.status_code == httpx.codes.OK, answer.text
            assert answer.json()["results"][0]
        async with aclosing(VllmClient(server)) as control:
            (state,) = await control.finish("verify", version=1, digest=digest_weights(target).hex())
        assert state["tensors"] == len(target)
    finally:
        await engine.close()


async def test_slimes_receiver_takes_our_versions_and_vllm_serves_them(
    policy: Policy, model: CausalModel, tmp_path: Path, slime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    receiver = module_of("local_checkpoint", new_file_of((slime / PATCH).read_text(), RECEIVER), monkeypatch)
    versions = [random_weights(model)]
    for seed in (1, 2):
        versions.append(apply(versions[-1], encode(versions[-1], changed(versions[-1], seed))))
    (tmp_path / "base").mkdir()
    safetensors.torch.save_file(versions[0], tmp_path / "base" / "model.safetensors")
    for number in (1, 2):
        name, files = write_slime(versions[number], number, versions[number - 1], number - 1)
        (tmp_path / "source" / name).mkdir(parents=True)
        for file, data in files.items():
            (tmp_path / "source" / name / file).write_bytes(data)
    received = []
    for number in (1, 2):
        receiver.pull(str(tmp_path / "local"), str(tmp_path / "base"), str(tmp_path / "source"), number)
        received.append(safetensors.torch.load_file(tmp_path / "local" / "model.safetensors"))
        assert digest_weights(received[-1]) == digest_weights(versions[number])
    server = ChildServer(VllmSettings(python=vllm_python(), sequences=8), policy.directory, tmp_path / "server")
    engine = VllmEngine(model, server, tmp_path / "engine")
    try:
        for number, weights in enumerate(received, 1):
            await engine.stage(number, weights)
            await engine.commit()
            await engine.verify()
    finally:
        await engine.close()


@pytest.mark.parametrize("encoding", ["xor", "overwrite"])
@pytest.mark.parametrize("checksum", ["adler32", "blake3", "xxh3-128"])
async def test_deltas_by_slimes_own_encoder_are_read(
    model: CausalModel, slime: Path, monkeypatch: pytest.MonkeyPatch, encoding: str, checksum: str
) -> None:
    encoder = module_of("disk_delta", (slime / "slime/utils/disk_delta.py").read_text(), monkeypatch)
    old = random_weights(model)
    new = changed(old, 1)
    read = read_slime(slimes_files(encoder, old, new, encoding, checksum), old)
    assert digest_weights(read) == digest_weights(new)


def slimes_files(encoder: Any, old: Weights, new: Weights, encoding: str, checksum: str) -> dict[str, bytes]:
    """Return the files of a version, as slime's publisher writes them, with its functions."""
    deltas, sums = {}, {}
    for name in new:
        before, after = (np.frombuffer(raw_bytes(weights[name]), np.uint8) for weights in (old, new))
        delta = before ^ after if encoding == "xor" else encoder.overwrite_encode(after, before != after)
        deltas[name] = torch.frombuffer(bytearray(compress(delta.tobytes(), 1)), dtype=torch.uint8)
        sums[name] = encoder.checksum(checksum, after)
    forms = {"delta_encoding": encoding, "compression_format": "zstd", "checksum_format": checksum}
    index = {
        "metadata": {"version": "000001", "base_version": "000000", **forms},
        "weight_map": dict.fromkeys(deltas, SHARD),
    }
    return {INDEX: json.dumps(index).encode(), SHARD: safetensors.torch.save(deltas, sums)}
