"""An 8-bit copy of a policy's weights, with which any model computes.

Weights are rounded once, to the codes of protocol/quantization.py; states are rounded in every product, each by its
largest value. Sums of products of codes are exact, so that a row's result does not depend on its neighbours.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional

from protocol.quantization import encode, row_scales

_LARGEST: Final = 127
_CUDA_ROWS: Final = 17  # fewest rows of a product on a GPU
_MULTIPLE: Final = 8  # of the rows and columns of a matrix on a GPU
_TOO_LARGE: Final = 2.0**64


class Int8Matrix(Tensor):
    """A matrix [out, in] as codes, int8 [out, in], and scales, float32 [out]: torch's linear computes with them, its
    embedding looks rows up, and any other function of torch gets the weights, in their dtype.
    """

    codes: Tensor
    scales: Tensor
    weight_dtype: torch.dtype

    @classmethod
    def of(cls, matrix: Tensor) -> "Int8Matrix":
        """Return the copy of a float32 or BF16 matrix."""
        scales = row_scales(matrix, "int8")
        codes = encode(matrix, scales, "int8")
        copy = codes.as_subclass(cls)
        copy.codes, copy.scales, copy.weight_dtype = codes, scales.to(torch.float32), matrix.dtype
        return copy

    def rows(self, places: Any) -> Tensor:
        """Return the weights of some rows: [..., in] for places [...]."""
        return (self.codes[places] * self.scales[places][..., None]).to(self.weight_dtype)

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, arguments: tuple[Any, ...] = (), options: Any = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if function is functional.linear:
                return _linear(*arguments, **(options or {}))
            if function is functional.embedding:
                ids, table = arguments[:2]
                return table.rows(ids)
            # No other function is to see codes as if they were weights.
            plain = [x.rows(slice(None)) if isinstance(x, Int8Matrix) else x for x in arguments]
            return function(*plain, **(options or {}))


def _linear(x: Tensor, weight: Int8Matrix, bias: Tensor | None = None) -> Tensor:
    """Compute a linear module: [..., out] from [..., in], in the dtype of x."""
    states = x.reshape(-1, x.shape[-1]).to(torch.float32)
    # A scale for each row of states, so that a row's codes do not depend on its neighbours.
    largest = torch.linalg.vector_norm(states, torch.inf, dim=1, keepdim=True).clamp_min_(torch.finfo().tiny)
    codes = (states * (_LARGEST / largest)).round_().to(torch.int8)
    # The kernel of a GPU refuses fewer rows; those that are added are cut off behind the product.
    if codes.is_cuda and len(codes) < _CUDA_ROWS:
        codes = functional.pad(codes, (0, 0, 0, _CUDA_ROWS - len(codes)))
    sums: Tensor = torch._int_mm(codes, weight.codes.t())[: len(states)]
    # Both scales come behind the sums, which are exact as int32.
    result: Tensor = (sums * (largest / _LARGEST)).mul_(weight.scales).to(x.dtype)
    result = result.view(*x.shape[:-1], len(weight.scales))
    return result if bias is None else result + bias


def int8_copy(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return weights whose matrices are copies where kernels and scales fit them; all other tensors are shared."""
    return {name: Int8Matrix.of(tensor) if _fits(tensor) else tensor for name, tensor in weights.items()}


def _fits(tensor: Tensor) -> bool:
    has_kernels = tensor.ndim == 2 and not any(size % _MULTIPLE for size in tensor.shape)
    return has_kernels and bool(tensor.abs().amax() < _TOO_LARGE)  # no number is not less
