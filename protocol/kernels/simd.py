"""SIMD operations on 64 elements at a time that numba does not offer, written with LLVM's vector types. They run on any
processor.

The operations check nothing: an array must have 64 elements from the given offset on.
"""

from collections.abc import Callable
from typing import Any, Final

import llvmlite.binding
from llvmlite import ir
from numba import core, extending

from protocol.kernels.jit import inlined

cgutils: Any = core.cgutils
types: Any = core.types
_settings: Any = core.config
intrinsic: Callable[[Callable[..., Any]], Callable[..., Any]] = extending.intrinsic

VECTOR_SIZE: Final = 64
"""Elements of a vector."""
PREFETCH_DISTANCE: Final = 1024
"""Elements between the current one and the one to prefetch."""

MAX_CLASSES: Final = 16
"""Classes that `count_classes` counts; each costs a hundredth of a nanosecond for each element, even if it is unused.
numba keeps the machine code of a kernel until the kernel's own file changes: change those that use this, too.
"""

_byte: Final = ir.IntType(8)
_index: Final = ir.IntType(32)
_word: Final = ir.IntType(64)


def vector_pointer(context: Any, builder: Any, array_type: Any, array: Any, offset: Any) -> Any:
    """Return the address of 64 elements of an array, from an offset on."""
    kind = array_type.dtype
    element = ir.FloatType() if kind == types.float32 else ir.IntType(kind.bitwidth)
    data = builder.gep(context.make_array(array_type)(context, builder, array).data, [offset])
    return builder.bitcast(data, ir.VectorType(element, VECTOR_SIZE).as_pointer())


def load_vector(context: Any, builder: Any, array_type: Any, array: Any, offset: Any) -> Any:
    """Return 64 elements of an array, from an offset on, as a vector."""
    place = vector_pointer(context, builder, array_type, array, offset)
    return builder.load(place, align=array_type.dtype.bitwidth // 8)


def broadcast(builder: Any, number: Any, element: Any) -> Any:
    """Return a vector of 64 times a number; an integer is cut to the element's width."""
    number = number if number.type == element else builder.trunc(number, element)
    vector = ir.Constant(ir.VectorType(element, VECTOR_SIZE), ir.Undefined)
    single = builder.insert_element(vector, number, ir.Constant(_index, 0))
    return builder.shuffle_vector(single, single, ir.Constant(ir.VectorType(_index, VECTOR_SIZE), None))


@intrinsic
def popcount(_typing: Any, mask: Any) -> Any:
    """Count the ones of a 64-bit mask."""
    return types.uint64(types.uint64), lambda _context, builder, _signature, args: builder.ctpop(args[0])


@intrinsic
def lowest_bit(_typing: Any, mask: Any) -> Any:
    """Return the index of the lowest one of a 64-bit mask, which must have one."""
    flag = ir.Constant(ir.IntType(1), 1)
    return types.uint64(types.uint64), lambda _context, builder, _signature, args: builder.cttz(args[0], flag)


@intrinsic
def highest_bit(_typing: Any, mask: Any) -> Any:
    """Return the index of the highest one of a 64-bit mask, which must have one."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.sub(ir.Constant(_word, 63), builder.ctlz(args[0], ir.Constant(ir.IntType(1), 1)))

    return types.uint64(types.uint64), generate


@intrinsic
def upper_product(_typing: Any, factor: Any, other: Any) -> Any:
    """Return the upper half of the product of two 64-bit integers."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        double = ir.IntType(128)
        product = builder.mul(builder.zext(args[0], double), builder.zext(args[1], double))
        return builder.trunc(builder.lshr(product, ir.Constant(double, 64)), _word)

    return types.uint64(types.uint64, types.uint64), generate


def _has_deposit() -> bool:
    """Return whether kernels are compiled for a processor with the instruction of `_deposit`, and it is fast there."""
    if _settings.CPU_NAME is not None or _settings.CPU_FEATURES is not None:
        return False
    has_it: bool = llvmlite.binding.get_host_cpu_features().get("bmi2", False)
    return has_it and llvmlite.binding.get_host_cpu_name() not in ("znver1", "znver2")


@intrinsic
def _deposit(_typing: Any, bits: Any, mask: Any) -> Any:
    """Move the lowest bits of a number to the places of the ones of a mask, in their order."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(_word, [_word, _word])
        instruction = cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.bmi.pdep.64")
        return builder.call(instruction, [args[0], args[1]])

    return types.uint64(types.uint64, types.uint64), generate


@inlined
def _nth_one_by_deposit(mask: Any, number: Any) -> Any:
    return lowest_bit(_deposit(types.uint64(1) << number, mask))


@inlined
def _nth_one_by_halves(mask: Any, number: Any) -> Any:
    place = types.uint64(0)
    for halving in range(6):
        half = types.uint64(32) >> types.uint64(halving)
        below = popcount(mask & ((types.uint64(1) << half) - types.uint64(1)))
        upper = types.uint64(0) - types.uint64(number >= below)
        number -= below & upper
        mask >>= half & upper
        place += half & upper
    return place


nth_one = _nth_one_by_deposit if _has_deposit() else _nth_one_by_halves
"""Return the index of the `number`-th one, counted from 0, of a 64-bit mask that has more than `number` ones."""


@intrinsic
def difference_mask(_typing: Any, old: Any, new: Any, offset: Any) -> Any:
    """Return a mask of 64 elements: whether old[offset + i] != new[offset + i]."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        before = load_vector(context, builder, signature.args[0], args[0], args[2])
        after = load_vector(context, builder, signature.args[1], args[1], args[2])
        return builder.bitcast(builder.icmp_unsigned("!=", before, after), _word)

    return types.uint64(old, new, types.uint64), generate


@intrinsic
def true_mask(_typing: Any, flags: Any, offset: Any) -> Any:
    """Return a mask of 64 elements: whether flags[offset + i] != 0."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        vector = load_vector(context, builder, signature.args[0], args[0], args[1])
        return builder.bitcast(builder.icmp_unsigned("!=", vector, ir.Constant(vector.type, None)), _word)

    return types.uint64(flags, types.uint64), generate


@intrinsic
def add_squares(_typing: Any, values: Any, offset: Any, sums: Any) -> Any:
    """Add the squares of 64 float32 values to 8 sums in float64, that of values[offset + i] to sums[i mod 8]."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        eight, wide = ir.VectorType(ir.FloatType(), 8), ir.VectorType(ir.DoubleType(), 8)
        data = builder.gep(context.make_array(signature.args[0])(context, builder, args[0]).data, [args[1]])
        lanes = context.make_array(signature.args[2])(context, builder, args[2]).data
        target = builder.bitcast(lanes, wide.as_pointer())
        total = builder.load(target, align=8)
        for begin in range(0, VECTOR_SIZE, 8):
            place = builder.bitcast(builder.gep(data, [ir.Constant(_word, begin)]), eight.as_pointer())
            vector = builder.load(place, align=4)
            number = builder.fpext(vector, wide)
            total = builder.fadd(total, builder.fmul(number, number))
        builder.store(total, target, align=8)
        return context.get_dummy_value()

    return types.none(values, types.uint64, sums), generate


@intrinsic
def prefetch(_typing: Any, elements: Any, offset: Any) -> Any:
    """Load 64 elements into the cache before they are needed; the offset may lie behind the end of the array."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        width = signature.args[0].dtype.bitwidth // 8
        data = builder.gep(context.make_array(signature.args[0])(context, builder, args[0]).data, [args[1]])
        pointer = builder.bitcast(data, _byte.as_pointer())
        kind = ir.FunctionType(ir.VoidType(), [pointer.type, _index, _index, _index])
        instruction = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")
        for line in range(0, VECTOR_SIZE * width, 64):
            place = builder.gep(pointer, [ir.Constant(_word, line)])
            builder.call(instruction, [place, *(ir.Constant(_index, flag) for flag in (0, 3, 1))])
        return context.get_dummy_value()

    return types.none(elements, types.uint64), generate


@intrinsic
def copy(_typing: Any, source: Any, target: Any, offset: Any) -> Any:
    """Set target[offset : offset + 64] = source[offset : offset + 64]."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = signature.args[1]
        vector = load_vector(context, builder, signature.args[0], args[0], args[2])
        target = vector_pointer(context, builder, kind, args[1], args[2])
        builder.store(vector, target, align=kind.dtype.bitwidth // 8)
        return context.get_dummy_value()

    return types.none(source, target, types.uint64), generate


@intrinsic
def count_classes(
    _typing: Any, elements: Any, offset: Any, shift: Any, mask: Any, first: Any, last: Any, classes: Any, counts: Any
) -> Any:
    """Classify 64 elements, uint8 [64]; subtract the number of each class from its count, int64 [MAX_CLASSES]; and
    return a mask, uint64, of the classes whose count is negative. An element's exponent is `element >> shift & mask`,
    at most 255; its class is the exponent minus `first`, limited to 0..`last`.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        vector = load_vector(context, builder, signature.args[0], args[0], args[1])
        bytes_type = ir.VectorType(_byte, VECTOR_SIZE)
        shifted = builder.lshr(vector, broadcast(builder, args[2], vector.type.element))
        exponents = shifted if shifted.type == bytes_type else builder.trunc(shifted, bytes_type)
        exponents = builder.and_(exponents, broadcast(builder, args[3], _byte))
        least, most = broadcast(builder, args[4], _byte), broadcast(builder, args[5], _byte)
        above = builder.sub(builder.select(builder.icmp_unsigned(">", exponents, least), exponents, least), least)
        own = builder.select(builder.icmp_unsigned("<", above, most), above, most)
        zero = ir.Constant(_word, 0)
        builder.store(own, vector_pointer(context, builder, signature.args[6], args[6], zero), align=1)
        data = context.make_array(signature.args[7])(context, builder, args[7]).data
        negative = zero
        for number in range(MAX_CLASSES):
            members = builder.icmp_unsigned("==", own, ir.Constant(bytes_type, [number] * VECTOR_SIZE))
            place = builder.gep(data, [ir.Constant(_word, number)])
            rest = builder.sub(builder.load(place), builder.ctpop(builder.bitcast(members, _word)))
            builder.store(rest, place)
            sign = builder.lshr(rest, ir.Constant(_word, 63))
            negative = builder.or_(negative, builder.shl(sign, ir.Constant(_word, number)))
        return negative

    return types.uint64(elements, *(types.uint64,) * 5, classes, counts), generate


@intrinsic
def class_mask(_typing: Any, classes: Any, number: Any) -> Any:
    """Return a mask of 64 elements: whether the class of each is `number`, with the classes from `count_classes`."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        own = load_vector(context, builder, signature.args[0], args[0], ir.Constant(_word, 0))
        return builder.bitcast(builder.icmp_unsigned("==", own, broadcast(builder, args[1], _byte)), _word)

    return types.uint64(classes, types.uint64), generate


@intrinsic
def float_of(_typing: Any, bits: Any) -> Any:
    """Return the float32 with a bit pattern (uint32)."""
    kind = ir.FloatType()
    return types.float32(types.uint32), lambda _context, builder, _signature, args: builder.bitcast(args[0], kind)


@intrinsic
def bits_of_float(_typing: Any, number: Any) -> Any:
    """Return the bit pattern (uint32) of a float32."""
    return types.uint32(types.float32), lambda _context, builder, _signature, args: builder.bitcast(args[0], _index)


@intrinsic
def shift_right(_typing: Any, number: Any, places: Any) -> Any:
    """Shift a uint32 by less than 32 places; `>>` would be a shift of a 64-bit integer."""
    kind = types.uint32
    return kind(kind, kind), lambda _context, builder, _signature, args: builder.lshr(args[0], args[1])


@intrinsic
def at_least_mask(_typing: Any, numbers: Any, offset: Any, least: Any) -> Any:
    """Return a mask of 64 elements: whether numbers[offset + i] >= least."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        own = load_vector(context, builder, signature.args[0], args[0], args[1])
        return builder.bitcast(builder.icmp_unsigned(">=", own, broadcast(builder, args[2], own.type.element)), _word)

    return types.uint64(numbers, types.uint64, types.uint32), generate
