"""The published formats with which the bench compares restore every bit, of one tensor and of several."""

import numpy as np
import pytest
import torch

from bench.published_formats import FORMATS, Format
from bench.xet import deduplicated
from protocol.patch.values import bits_of


def rounded_update(rows: int, columns: int, share: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return BF16 weights before and after an update that changes about `share` percent of them."""
    random = torch.Generator().manual_seed(rows)
    masters = torch.randn((rows, columns), generator=random) * 0.0147
    update = torch.randn((rows, columns), generator=random) * 1.2e-6 * share
    return masters.bfloat16(), (masters + update).bfloat16()


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_published_formats_restore_every_bit(form: Format) -> None:
    pairs = [rounded_update(40, 300, 5.0), rounded_update(7, 50, 50.0)]
    pairs.append((pairs[0][0][:3].clone(), pairs[0][0][:3].clone()))  # unchanged
    old, new = [bits_of(a) for a, _ in pairs], [bits_of(b) for _, b in pairs]
    columns = [a.shape[-1] for a, _ in pairs]
    data = form.encode(old, new, columns)
    assert all(np.array_equal(a, b) for a, b in zip(form.decode(old, data, columns), new, strict=True))
    assert len(form.encode(old, old, columns)) <= len(data)


def test_hf_xet_sends_only_new_chunks() -> None:
    old = torch.randint(0, 256, (1 << 20,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    new = old.clone()
    new[300_000] ^= 1
    first, second = deduplicated([{"w": old}, {"w": new}, {"w": new}])
    assert 8_192 <= first.nbytes < 300_000  # a chunk or two of 8 to 128 KiB
    assert second.nbytes < 1024
