"""Sixty-four elements at a time: vector operations that numba has no words for, in LLVM's own, for any processor.

Each takes an offset into arrays that hold 64 elements from there on; nothing is checked.
"""

from collections.abc import Callable
from typing import Any, Final

from llvmlite import ir
from numba import core, extending

cgutils: Any = core.cgutils
types: Any = core.types
intrinsic: Callable[[Callable[..., Any]], Callable[..., Any]] = extending.intrinsic

LANES: Final = 64
AHEAD: Final = 1024
"""Elements between what is worked on and what is asked for from memory."""

MAX_CLASSES: Final = 13
"""Classes that `count_classes` knows; each costs a hundredth of a nanosecond an element, whether it is used or not."""

_byte: Final = ir.IntType(8)
_index: Final = ir.IntType(32)
_word: Final = ir.IntType(64)


def _pointer(context: Any, builder: Any, array_type: Any, array: Any, offset: Any, element: Any) -> Any:
    data = builder.gep(context.make_array(array_type)(context, builder, array).data, [offset])
    return builder.bitcast(data, ir.VectorType(element, LANES).as_pointer())


def _load(context: Any, builder: Any, array_type: Any, array: Any, offset: Any) -> Any:
    element = ir.IntType(array_type.dtype.bitwidth)
    vector = builder.load(_pointer(context, builder, array_type, array, offset, element))
    vector.align = array_type.dtype.bitwidth // 8
    return vector


def _spread(builder: Any, number: Any, element: Any) -> Any:
    vector = ir.Constant(ir.VectorType(element, LANES), ir.Undefined)
    single = builder.insert_element(vector, builder.trunc(number, element), ir.Constant(_index, 0))
    return builder.shuffle_vector(single, single, ir.Constant(ir.VectorType(_index, LANES), None))


@intrinsic
def ones(_typing: Any, mask: Any) -> Any:
    """How many bits of a 64-bit mask are 1."""
    return types.uint64(types.uint64), lambda _context, builder, _signature, args: builder.ctpop(args[0])


@intrinsic
def lowest(_typing: Any, mask: Any) -> Any:
    """The place of the lowest 1 of a 64-bit mask that has one."""
    flag = ir.Constant(ir.IntType(1), 1)
    return types.uint64(types.uint64), lambda _context, builder, _signature, args: builder.cttz(args[0], flag)


@intrinsic
def highest(_typing: Any, mask: Any) -> Any:
    """The place of the highest 1 of a 64-bit mask that has one."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.sub(ir.Constant(_word, 63), builder.ctlz(args[0], ir.Constant(ir.IntType(1), 1)))

    return types.uint64(types.uint64), generate


@intrinsic
def upper_product(_typing: Any, left: Any, right: Any) -> Any:
    """The upper half of the product of two 64-bit integers."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        double = ir.IntType(128)
        product = builder.mul(builder.zext(args[0], double), builder.zext(args[1], double))
        return builder.trunc(builder.lshr(product, ir.Constant(double, 64)), _word)

    return types.uint64(types.uint64, types.uint64), generate


@intrinsic
def differing(_typing: Any, old: Any, new: Any, offset: Any) -> Any:
    """A bit for each of 64 elements: whether old[offset + i] != new[offset + i]."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        before = _load(context, builder, signature.args[0], args[0], args[2])
        after = _load(context, builder, signature.args[1], args[1], args[2])
        return builder.bitcast(builder.icmp_unsigned("!=", before, after), _word)

    return types.uint64(old, new, types.uint64), generate


@intrinsic
def fetch(_typing: Any, elements: Any, offset: Any) -> Any:
    """Ask for 64 elements before they are needed."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        width = signature.args[0].dtype.bitwidth // 8
        data = builder.gep(context.make_array(signature.args[0])(context, builder, args[0]).data, [args[1]])
        pointer = builder.bitcast(data, _byte.as_pointer())
        kind = ir.FunctionType(ir.VoidType(), [pointer.type, _index, _index, _index])
        prefetch = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")
        for line in range(0, LANES * width, 64):
            place = builder.gep(pointer, [ir.Constant(_word, line)])
            builder.call(prefetch, [place, *(ir.Constant(_index, flag) for flag in (0, 3, 1))])
        return context.get_dummy_value()

    return types.none(elements, types.uint64), generate


@intrinsic
def copy(_typing: Any, source: Any, target: Any, offset: Any) -> Any:
    """target[offset : offset + 64] = source[offset : offset + 64]."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = signature.args[1]
        vector = _load(context, builder, signature.args[0], args[0], args[2])
        element = ir.IntType(kind.dtype.bitwidth)
        stored = builder.store(vector, _pointer(context, builder, kind, args[1], args[2], element))
        stored.align = kind.dtype.bitwidth // 8
        return context.get_dummy_value()

    return types.none(source, target, types.uint64), generate


@intrinsic
def count_classes(
    _typing: Any, elements: Any, offset: Any, shift: Any, mask: Any, first: Any, last: Any, classes: Any, left: Any
) -> Any:
    """Take the elements of each class among 64 off its count; the top bit says whether a count is below zero.

    Args:
        shift, mask: an element's exponent is `element >> shift & mask`, at most 255.
        first, last: its class is the exponent less `first`, from 0 to `last`.
        classes: room for the 64 classes: uint8[64].
        left: the counts: int64[MAX_CLASSES].
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        vector = _load(context, builder, signature.args[0], args[0], args[1])
        bytes_type = ir.VectorType(_byte, LANES)
        shifted = builder.lshr(vector, _spread(builder, args[2], vector.type.element))
        exponents = shifted if shifted.type == bytes_type else builder.trunc(shifted, bytes_type)
        exponents = builder.and_(exponents, _spread(builder, args[3], _byte))
        least, most = _spread(builder, args[4], _byte), _spread(builder, args[5], _byte)
        above = builder.sub(builder.select(builder.icmp_unsigned(">", exponents, least), exponents, least), least)
        own = builder.select(builder.icmp_unsigned("<", above, most), above, most)
        zero = ir.Constant(_word, 0)
        stored = builder.store(own, _pointer(context, builder, signature.args[6], args[6], zero, _byte))
        stored.align = 1
        counts = context.make_array(signature.args[7])(context, builder, args[7]).data
        negative = zero
        for number in range(MAX_CLASSES):
            members = builder.icmp_unsigned("==", own, ir.Constant(bytes_type, [number] * LANES))
            place = builder.gep(counts, [ir.Constant(_word, number)])
            rest = builder.sub(builder.load(place), builder.ctpop(builder.bitcast(members, _word)))
            builder.store(rest, place)
            negative = builder.or_(negative, rest)
        return negative

    return types.uint64(elements, *(types.uint64,) * 5, classes, left), generate


@intrinsic
def members(_typing: Any, classes: Any, number: Any) -> Any:
    """A bit for each of 64 elements: whether its class is `number`; classes as `count_classes` leaves them."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        own = _load(context, builder, signature.args[0], args[0], ir.Constant(_word, 0))
        return builder.bitcast(builder.icmp_unsigned("==", own, _spread(builder, args[1], _byte)), _word)

    return types.uint64(classes, types.uint64), generate
