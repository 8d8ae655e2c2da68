"""The published weights, as the forward pass reads them: masters rounded to BF16 or quantized, and gradients straight
through.

The table of the vocabulary is a quarter of a small model. Its rounded copy is there only during a product, and its
gradient adds up in one place: the rows that a lookup used are a sparse gradient, and a product adds to the gradient
some rows at a time where it may (`adding_in_place`). All sums have the order of torch's own operations.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional

from protocol.quantization import Precision, is_matrix, round_matrix
from roles.policy.layer_weights import TableWeights

_ROWS: Final = 4096
"""Rows of a table that are rounded, or whose gradient is computed, at a time."""


class RoundedWeights(TableWeights):
    """Masters, float32, that are rounded to a precision each time they are read, so that there is never a rounded copy
    of all of them. Gradients add up in their `grad`. Tables are BF16 in any precision.
    """

    def __init__(self, masters: Mapping[str, Tensor], precision: Precision = "bf16", *, in_place: bool = False) -> None:
        self._masters = masters
        self._precision = precision
        self._in_place = in_place

    def __getitem__(self, name: str) -> Tensor:
        """Return a weight: float32, with the gradient of the rounding taken as 1."""
        return round_straight_through(name, self._masters[name], self._precision, torch.float32)

    def __iter__(self) -> Iterator[str]:
        return iter(self._masters)

    def __len__(self) -> int:
        return len(self._masters)

    def adding_in_place(self) -> "RoundedWeights":
        """Return the same weights, of which a product adds the table's gradient to `grad` in its own backward step,
        before that of any operation that comes before it.
        """
        return RoundedWeights(self._masters, self._precision, in_place=True)

    def rows(self, name: str, ids: Tensor) -> Tensor:
        rows: Tensor = _Lookup.apply(self._with_gradient(name), ids)  # type: ignore[no-untyped-call]
        return rows

    def product(self, name: str, states: Tensor) -> Tensor:
        table = self._with_gradient(name) if self._in_place else self._masters[name]
        flat = states.reshape(-1, states.shape[-1])
        product: Tensor = _Product.apply(flat, table, self._in_place)  # type: ignore[no-untyped-call]
        return product.view(*states.shape[:-1], len(table))

    def _with_gradient(self, name: str) -> Tensor:
        """Return a master that has a dense gradient to add to, if gradients are computed at all."""
        master = self._masters[name]
        if master.grad is None and master.requires_grad and torch.is_grad_enabled():
            master.grad = torch.zeros_like(master, requires_grad=False)
        return master


def rounded(name: str, tensor: Tensor, precision: Precision, dtype: torch.dtype) -> Tensor:
    """Return a weight as it is published, and then widened."""
    if precision != "bf16" and is_matrix(name, tensor.shape):
        return round_matrix(tensor, precision, dtype)
    return _rounded(tensor, dtype)


def round_straight_through(name: str, tensor: Tensor, precision: Precision, dtype: torch.dtype) -> Tensor:
    """Return a weight as `rounded` does; its gradient is that of the tensor. BF16 weights are published as they are."""
    if tensor.dtype == dtype == torch.bfloat16:
        return tensor
    weight: Tensor = _Rounding.apply(name, tensor, precision, dtype)  # type: ignore[no-untyped-call]
    return weight


class _Rounding(torch.autograd.Function):
    """The rounding, whose derivative is taken as 1."""

    @staticmethod
    def forward(ctx: Any, name: str, tensor: Tensor, precision: Precision, dtype: torch.dtype) -> Tensor:
        ctx.dtype = tensor.dtype
        return rounded(name, tensor, precision, dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor, None, None]:
        return None, gradients[0].to(ctx.dtype), None, None


class _Lookup(torch.autograd.Function):
    """Rounded rows of a table, whose gradient has only these rows."""

    @staticmethod
    def forward(ctx: Any, table: Tensor, ids: Tensor) -> Tensor:
        """Return the rows of ids int64 [...]: float32 [..., D]."""
        ctx.save_for_backward(ids)
        ctx.shape = table.shape
        return functional.embedding(ids, table).to(torch.bfloat16).to(table.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """Return the gradient of the table as a sparse tensor, the gradients of each row added in their order."""
        (ids,) = ctx.saved_tensors
        used_ids, places = torch.unique(ids, return_inverse=True)
        rows = torch.ops.aten.embedding_dense_backward(gradients[0].contiguous(), places, len(used_ids), -1, False)
        return torch.sparse_coo_tensor(used_ids[None], rows, ctx.shape, is_coalesced=True, check_invariants=False), None


class _Product(torch.autograd.Function):
    """`states @ rounded(table).T`: float32 [N, V] from [N, D] and [V, D]."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, table: Tensor, in_place: bool) -> Tensor:
        ctx.save_for_backward(states)
        ctx.table, ctx.in_place = table, in_place  # not saved: `grad` is reached through it
        return functional.linear(states, _rounded(table, torch.float32))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        """Compute the gradient of the states, and compute or add that of the table."""
        (states,) = ctx.saved_tensors
        (gradient,) = gradients
        of_states = gradient @ _rounded(ctx.table, torch.float32) if ctx.needs_input_grad[0] else None
        if not ctx.needs_input_grad[1]:
            return of_states, None, None
        if not ctx.in_place:
            return of_states, gradient.t() @ states, None
        for begin in range(0, len(ctx.table), _ROWS):
            ctx.table.grad[begin : begin + _ROWS] += gradient[:, begin : begin + _ROWS].t() @ states
        return of_states, None, None


def _rounded(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a tensor rounded to BF16 and widened, without a BF16 copy of all of it."""
    if tensor.ndim == 0 or dtype == torch.bfloat16:
        return tensor.to(torch.bfloat16).to(dtype)
    result = torch.empty_like(tensor, dtype=dtype)
    for part, values in zip(result.split(_ROWS), tensor.split(_ROWS), strict=True):  # type: ignore[no-untyped-call]
        part.copy_(values.to(torch.bfloat16))
    return result
