"""Operations on bit patterns that numba does not offer. They check nothing, like those of kernels/simd.py."""

from typing import Any, Final

from llvmlite import ir

from protocol.kernels.simd import VECTOR_SIZE, intrinsic, types

_types: Final = {types.uint32: ir.IntType(32), types.float32: ir.FloatType()}


def _cast(source: Any, target: Any) -> Any:
    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], _types[target])

    return target(source), generate


@intrinsic
def float_of(_typing: Any, bits: Any) -> Any:
    """Return the float32 with a bit pattern (uint32)."""
    return _cast(types.uint32, types.float32)


@intrinsic
def bits_of_float(_typing: Any, number: Any) -> Any:
    """Return the bit pattern (uint32) of a float32."""
    return _cast(types.float32, types.uint32)


@intrinsic
def at_least_mask(_typing: Any, numbers: Any, offset: Any, least: Any) -> Any:
    """Return a mask of 64 elements of a uint32 array: whether numbers[offset + i] >= least."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word, index = ir.IntType(32), ir.IntType(32)
        vector_type = ir.VectorType(word, VECTOR_SIZE)
        data = builder.gep(context.make_array(signature.args[0])(context, builder, args[0]).data, [args[1]])
        vector = builder.load(builder.bitcast(data, vector_type.as_pointer()))
        vector.align = 4
        single = builder.insert_element(ir.Constant(vector_type, ir.Undefined), args[2], ir.Constant(index, 0))
        threshold = builder.shuffle_vector(single, single, ir.Constant(ir.VectorType(index, VECTOR_SIZE), None))
        return builder.bitcast(builder.icmp_unsigned(">=", vector, threshold), ir.IntType(64))

    return types.uint64(numbers, types.uint64, types.uint32), generate
