"""The inspection of a patch: its statistics, its table for people, and the bound."""

import io
import json
from dataclasses import asdict

import pytest
import torch
from rich.console import Console

from grailnode.convert.inspect_patch import bound_bits, inspect_patch
from grailnode.ui.terminal.verb_tables import patch_table
from protocol import patch
from protocol.errors import MalformedError, PatchError
from tests.patch.weights import rounded_update


def test_inspection_counts_the_changes():
    old, new = rounded_update(256, 512, 1.0, seed=1)
    before, after = {"a": old, "b": old, "c": old[0]}, {"a": new, "b": old, "c": -old[0]}
    data = patch.encode(before, after)
    report = inspect_patch(data, before)
    assert report.changed == patch.summary(data).changed
    assert [row.codec for row in report.tensors] == ["sparse", "unchanged", "xor_planes"]
    assert report.tensors[0].classes > 3
    assert report.tensors[0].bound == pytest.approx(bound_bits(old, new))
    assert report.tensors[0].bits_per_change > bound_bits(old, new)
    alone = inspect_patch(data)
    assert (alone.tensors, alone.elements, alone.bound) == ((), None, None)
    assert (alone.changed, alone.nbytes, alone.base) == (report.changed, report.nbytes, report.base)
    plain = json.loads(json.dumps(asdict(report)))
    assert plain["tensors"][1]["changed"] == 0
    assert plain["profile"] == "compact"
    assert plain["bound"] > 0
    assert sum(plain["tensors"][0]["sections"].values()) < plain["tensors"][0]["nbytes"]


def test_inspection_shows_the_changes_of_each_tensor_of_a_frame():
    old, new = rounded_update(64, 512, 1.0, seed=1)
    before, after = {"a": old, "b": new}, {"a": new, "b": old}
    data = patch.encode(before, after)
    first, second = inspect_patch(data, before).tensors
    assert (first.codec, second.codec, first.changed) == ("joined", "sparse", second.changed)
    assert inspect_patch(data).changed == 2 * first.changed


@pytest.mark.parametrize("with_base", [False, True], ids=["patch alone", "with base weights"])
def test_the_table_fits_a_terminal(with_base: bool):
    old, new = rounded_update(512, 2048, 1.0, seed=2)
    name = "model.layers.10.post_attention_layernorm.weight"
    out = io.StringIO()
    table = patch_table(inspect_patch(patch.encode({name: old}, {name: new}), {name: old} if with_base else None))
    Console(file=out, width=80).print(table)
    for word in (
        "compact patch",
        "density",
        "bits",
        "changed",
        *(["sparse", "512x2048", "the bound is"] if with_base else []),
    ):
        assert word in out.getvalue()
    assert "…" not in out.getvalue()


def test_inspection_refuses_other_base_weights():
    old, new = rounded_update(64, 64, 5.0, seed=2)
    with pytest.raises(PatchError, match=r"base weights: are .{16}, and the patch applies to"):
        inspect_patch(patch.encode({"a": old}, {"a": new}), {"a": new})


def test_inspection_of_other_bytes_is_malformed():
    with pytest.raises(MalformedError):
        inspect_patch(b"no patch")


def test_the_bound_of_a_known_distribution():
    old = torch.full((1024,), 1.5, dtype=torch.bfloat16)
    new = old.clone()
    new.view(torch.int16)[::2] += 1
    assert bound_bits(old, new) == pytest.approx(2.0)  # one bit for each element, and every step is the same
    assert bound_bits(old, old) == 0.0
