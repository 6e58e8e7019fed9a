"""What convolutions lead to is stored as they write it, and is the same: judged in numpy."""

import functools

import hypothesis.strategies as st
import numpy as np
import tvm
import tvm_ffi
from hypothesis import given
from tvm import relax

from relax_disc.analysis.symbolic.from_tirx import from_tirx
from relax_disc.ops.convolution import Geometry, convolution
from relax_disc.transform.simplify.channels_last import ChannelsLast
from relax_disc.transform.simplify.simplify import Simplify

op = relax.op
SIZES = {"n": 2, "h": 3, "w": 4}
CHANNELS = 8
REDUCE = {"sum": np.sum, "mean": np.mean, "max": np.max}


def program(build):
    """Make a module in which `build(emit, x, shape)` computes of a convolution's NCHW result."""
    n, h, w = (tvm.tirx.Var(name, "int64") for name in SIZES)
    x = relax.Var("x", relax.TensorType([n, h, w, 3], "float32"))
    weight = relax.Var("weight", relax.TensorType([CHANNELS, 3, 1, 1], "float32"))
    geometry = Geometry((1, 1), (0, 0), (1, 1), 1)
    builder = relax.BlockBuilder()
    with builder.function("main", [x, weight]):
        with builder.dataflow():
            y = builder.emit(convolution(x, weight, None, [n, h, w, CHANNELS], geometry))
            y = builder.emit(op.permute_dims(y, [0, 3, 1, 2]))
            out = builder.emit_output(build(builder.emit, y))
        builder.emit_func_output(out)
    return builder.finalize()


def stored_last(mod):
    return tvm.transform.Sequential([Simplify(), ChannelsLast(), Simplify()])(mod)


def calls(mod):
    values = [b.value for block in mod["main"].body.blocks for b in block.bindings]
    return [v for v in values if isinstance(v, relax.Call) and isinstance(v.op, tvm.ir.Op)]


def extents(shape):
    return [int(from_tirx(n).evaluate(SIZES)) for n in shape.values]


def evaluated(mod, x, weight):
    """Run a function binding by binding, in float64."""
    function = mod["main"]
    env = dict(zip(function.params, (x, weight), strict=True))

    def value(expr):
        if isinstance(expr, relax.Var):
            return env[expr]
        if isinstance(expr, relax.Tuple):
            return [value(each) for each in expr.fields]
        if not isinstance(expr, relax.Call):
            return expr.value.numpy()
        name = expr.op.name.removeprefix("relax.")
        if name == "strided_slice":
            (axis,), (first,), (last,), _ = ([int(x) for x in a.fields] for a in expr.args[1:])
            return value(expr.args[0]).take(range(first, last), axis)
        args = [a if isinstance(a, relax.ShapeExpr) else value(a) for a in expr.args]
        if name == "relax_disc.convolution":
            return np.einsum("nhwc,ocab->nhwo", *args)
        if name == "permute_dims":
            return args[0].transpose([int(axis) for axis in expr.attrs.axes])
        if name == "reshape":
            return args[0].reshape(extents(args[1]))
        if name == "broadcast_to":
            return np.broadcast_to(args[0], extents(args[1]))
        if name == "concat":
            return np.concatenate(args[0], int(expr.attrs.axis))
        if name in REDUCE:
            axes = expr.attrs.axis
            axes = None if axes is None else tuple(int(axis) for axis in axes)
            return REDUCE[name](args[0], axis=axes, keepdims=bool(expr.attrs.keepdims))
        return getattr(np, name)(*args)

    for block in function.body.blocks:
        for binding in block.bindings:
            env[binding.var] = value(binding.value)
            assert list(env[binding.var].shape) == extents(binding.var.ty.shape)
    return env[function.body.body]


def agrees(before, after):
    generator = np.random.default_rng(0)
    x = generator.standard_normal((*SIZES.values(), 3))
    weight = generator.standard_normal((CHANNELS, 3, 1, 1))
    np.testing.assert_allclose(
        evaluated(after, x, weight), evaluated(before, x, weight), rtol=1e-9, atol=1e-9
    )


def group_norm(emit, x, groups=4):
    n, channels, h, w = x.ty.shape.values
    grouped = emit(op.reshape(x, [n, groups, channels // groups, h * w]))
    mean = emit(op.mean(grouped, [2, 3], True))
    centered = emit(op.subtract(grouped, mean))
    square = emit(op.sum(emit(op.multiply(centered, centered)), [2, 3], True))
    scaled = emit(op.divide(centered, emit(op.sqrt(square))))
    return emit(op.reshape(scaled, [n, channels, h, w]))


def test_group_norm_moves_no_activation():
    """From one convolution to the next the activations stay as the library writes them."""

    def build(emit, x):
        y = emit(op.permute_dims(emit(op.exp(group_norm(emit, x))), [0, 2, 3, 1]))
        total = emit(op.sum(emit(op.multiply(x, group_norm(emit, x))), [0, 2, 3]))
        return emit(op.add(y, total))

    before = program(build)
    after = stored_last(before)
    assert not [call for call in calls(after) if call.op.name == "relax.permute_dims"]
    agrees(before, after)


def test_tokens_of_pictures_are_what_is_stored():
    """Pixels as tokens and back again, next to the picture itself: attention in a U-net."""

    def build(emit, x):
        n, channels, h, w = x.ty.shape.values
        flat = emit(op.reshape(x, [n, channels, h * w]))
        tokens = emit(op.tanh(emit(op.permute_dims(flat, [0, 2, 1]))))
        back = emit(op.reshape(emit(op.permute_dims(tokens, [0, 2, 1])), [n, channels, h, w]))
        return emit(op.permute_dims(emit(op.add(x, back)), [0, 2, 3, 1]))

    before = program(build)
    after = stored_last(before)
    assert not [call for call in calls(after) if call.op.name == "relax.permute_dims"]
    agrees(before, after)


def test_the_parts_of_a_gradient_of_joined_channels_stay_as_they_are_stored():
    """As in DenseNet, whose layers each take slices of the gradients of all that follow."""

    def build(emit, x):
        joined = emit(op.concat([x, emit(op.tanh(x))], 1))
        first, second = (
            emit(op.strided_slice(joined, [1], [k * CHANNELS], [(k + 1) * CHANNELS], [1]))
            for k in range(2)
        )
        return emit(op.permute_dims(emit(op.add(first, second)), [0, 2, 3, 1]))

    before = program(build)
    after = stored_last(before)
    assert not [call for call in calls(after) if call.op.name == "relax.permute_dims"]
    agrees(before, after)


@given(st.data())
def test_random_programs_compute_the_same(data):
    """Splits, joins, permutations and reductions of all axes, of two values that share them."""

    def reshaped(emit, x, draw):
        shape = list(x.ty.shape.values)
        axis = draw(st.integers(0, len(shape) - 1))
        if isinstance(shape[axis], tvm.tirx.IntImm) and int(shape[axis]) % 2 == 0:
            shape[axis : axis + 1] = [shape[axis] // 2, tvm.tirx.IntImm("int64", 2)]
        elif len(shape) > 1:
            axis = min(axis, len(shape) - 2)
            shape[axis : axis + 2] = [shape[axis] * shape[axis + 1]]
        if draw(st.booleans()) and len(shape) < 6:
            shape.insert(draw(st.integers(0, len(shape))), tvm.tirx.IntImm("int64", 1))
        return emit(op.reshape(x, shape))

    def build(emit, x):
        values = [x]
        draw = data.draw
        for _ in range(draw(st.integers(1, 8))):
            x = draw(st.sampled_from(values))
            rank = len(x.ty.shape.values)
            kinds = ["unary", "reshape", "permute", "reduce", "add", "concat", "slice"]
            kind = draw(st.sampled_from(kinds))
            if kind == "unary":
                x = emit(op.tanh(x))
            elif kind == "reshape" and rank:
                x = reshaped(emit, x, draw)
            elif kind == "permute" and rank > 1:
                x = emit(op.permute_dims(x, draw(st.permutations(range(rank)))))
            elif kind == "reduce" and rank:
                axes = sorted(draw(st.sets(st.integers(0, rank - 1), min_size=1)))
                reduce = getattr(op, draw(st.sampled_from(sorted(REDUCE))))
                x = emit(reduce(x, axes, draw(st.booleans())))
            elif kind == "concat" and rank:
                x = emit(op.concat([x, emit(op.negative(x))], draw(st.integers(0, rank - 1))))
            elif kind == "slice" and rank:
                axis = draw(st.integers(0, rank - 1))
                extent = x.ty.shape.values[axis]
                if isinstance(extent, tvm.tirx.IntImm) and int(extent) > 1:
                    x = emit(op.strided_slice(x, [axis - rank], [1], [extent], [1]))
            elif kind == "add":
                same = [y for y in values if tvm_ffi.structural_equal(y.ty, x.ty)]
                x = emit(op.add(x, draw(st.sampled_from(same))))
            values.append(x)
        total = [emit(op.sum(emit(op.tanh(y)))) for y in values[:-1]]
        return functools.reduce(lambda a, b: emit(op.add(a, b)), total, values[-1])

    before = program(build)
    agrees(before, stored_last(before))
