"""Reading policy directories: what loads, and which error a user gets for a broken one."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from grailnode.engine import policy
from grailnode.engine.policy import Policy, PolicyError, load_weights
from tests.support.builders.policies import write_policy


def _change(path: Path, **changes: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_round_trip(tmp_path: Path) -> None:
    loaded = write_policy(tmp_path)
    weights = load_weights(tmp_path)
    policy.save(tmp_path / "copy", loaded.config, (tmp_path / "tokenizer.json").read_text(), weights)
    again = load_weights(tmp_path / "copy")
    assert Policy.load(tmp_path / "copy").config == loaded.config
    assert weights.keys() == again.keys()
    assert all(torch.equal(tensor, again[name]) for name, tensor in weights.items())


def test_sharded_weights_with_a_tied_copy_in_float32(tmp_path: Path) -> None:
    write_policy(tmp_path)
    weights = load_weights(tmp_path)
    names = sorted(weights)
    full = {name: tensor.to(torch.float32) for name, tensor in weights.items()}
    full["lm_head.weight"] = full["model.embed_tokens.weight"].clone()
    first, second = names[:5], [*names[5:], "lm_head.weight"]
    files = {"model-00001-of-00002.safetensors": first, "model-00002-of-00002.safetensors": second}
    for file, part in files.items():
        save_file({name: full[name] for name in part}, tmp_path / file)
    index = {"metadata": {}, "weight_map": {name: file for file, part in files.items() for name in part}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "model.safetensors").unlink()
    sharded = load_weights(tmp_path)
    assert list(sharded) == names
    assert all(tensor.dtype == torch.bfloat16 and tensor.is_contiguous() for tensor in sharded.values())
    assert all(torch.equal(tensor, weights[name]) for name, tensor in sharded.items())


@pytest.mark.parametrize(
    ("changes", "stops"),
    [({}, (1,)), ({"eos_token_id": 7}, (7,)), ({"eos_token_id": [9, 7, 9]}, (7, 9))],
)
def test_the_generation_config_says_which_tokens_end_a_completion(
    tmp_path: Path, changes: dict[str, object], stops: tuple[int, ...]
) -> None:
    write_policy(tmp_path)
    if changes:
        (tmp_path / "generation_config.json").write_text(json.dumps(changes))
    assert Policy.load(tmp_path).stops == stops


@pytest.mark.parametrize("value", [[], "1", [1, "2"], True, -1, list(range(17))])
def test_stop_tokens_that_are_no_list_of_ids_are_refused(tmp_path: Path, value: object) -> None:
    write_policy(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    with pytest.raises(PolicyError, match="eos_token_id is not usable"):
        Policy.load(tmp_path)


def test_tokenizer_round_trips(tmp_path: Path) -> None:
    tokenizer = write_policy(tmp_path).tokenizer
    for text in ("57+68=", "3 7 25>46=", "(1-2)*3/4"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.decode((4, 1, 5)) == "1<eos>2"
    assert tokenizer.decode((31,)) == ""


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("config.json", None, "cannot be read"),
        ("config.json", b"{", "not JSON"),
        ("config.json", b"[]", "not a JSON object"),
        ("config.json", b"\xff", "cannot be read"),
        ("tokenizer.json", None, "cannot be read"),
        ("tokenizer.json", b"{}", "not a tokenizer"),
        ("model.safetensors", None, "cannot be read as safetensors"),
        ("model.safetensors", b"\x00" * 64, "cannot be read as safetensors"),
        ("model.safetensors.index.json", b"{}", "weight_map"),
        ("model.safetensors.index.json", b'{"weight_map": {"a": "../b"}}', "outside the directory"),
    ],
)
def test_errors_name_the_file(tmp_path: Path, file: str, content: bytes | None, message: str) -> None:
    write_policy(tmp_path)
    if content is None:
        (tmp_path / file).unlink()
    else:
        (tmp_path / file).write_bytes(content)
    with pytest.raises(PolicyError, match=message) as raises:
        Policy.load(tmp_path)
        load_weights(tmp_path)
    assert file.removesuffix(".index.json") in str(raises.value)


@pytest.mark.parametrize("key", ["eos_token_id", "vocab_size"])
def test_errors_name_missing_keys(tmp_path: Path, key: str) -> None:
    write_policy(tmp_path)
    _change(tmp_path / "config.json", **{key: None})
    with pytest.raises(PolicyError, match=key):
        print(Policy.load(tmp_path).vocabulary)


def test_quantized_checkpoints_are_refused(tmp_path: Path) -> None:
    write_policy(tmp_path)
    save_file({"model.norm.weight": torch.zeros(4, dtype=torch.int8)}, tmp_path / "model.safetensors")
    with pytest.raises(PolicyError, match="not quantized"):
        load_weights(tmp_path)
