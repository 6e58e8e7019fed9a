"""Random Relax functions whose kernels are Python functions, and what they compute in torch.

Building one takes milliseconds, since nothing is compiled to machine code.
"""

from dataclasses import dataclass, field

import numpy as np
import torch
import tvm
import tvm_ffi
from tvm import relax, tirx

WIDTH = 8


def _kernel(name):
    """Register a function that gets torch views of its arguments, outputs last."""

    def register(function):
        def call(*args):
            tensors = [
                torch.from_dlpack(arg) if hasattr(arg, "__dlpack__") else arg for arg in args
            ]
            function(*tensors)

        tvm_ffi.register_global_func(f"test.{name}", call, override=True)
        return function

    return register


@_kernel("scale")
def _scale(x, factor, out):
    out.copy_(x * factor)


@_kernel("add")
def _add(x, y, out):
    out.copy_(x + y)


@_kernel("matmul")
def _matmul(x, w, out):
    out.copy_(x @ w)


@_kernel("split")
def _split(x, low, high):
    high.copy_(x + 1.0)
    low.copy_(x - 1.0)


@_kernel("total")
def _total(x, out):
    out.copy_(x.sum())


@_kernel("rows")
def _rows(count, out):
    out.copy_(torch.arange(count, dtype=torch.float32)[:, None] + torch.zeros(1, WIDTH))


@_kernel("fail")
def _fail(x, out):
    raise RuntimeError("this kernel always fails")


@dataclass
class Program:
    """A Relax function, and the same steps for torch.

    Values are named by number; `steps` are (name, value numbers, constant).
    """

    inputs: int
    weights: int
    steps: list = field(default_factory=list)
    outputs: list = field(default_factory=list)
    pairs: list = field(default_factory=list)

    def module(self):
        """The IRModule; every tensor is n x WIDTH, or its flat alias, or a scalar."""
        n = tirx.Var("n", "int64")
        kind = relax.TensorType([n, WIDTH], "float32")
        square = relax.TensorType([WIDTH, WIDTH], "float32")
        params = [relax.Var(f"x{i}", kind) for i in range(self.inputs)]
        params += [relax.Var(f"w{i}", square) for i in range(self.weights)]
        builder = relax.BlockBuilder()
        with builder.function("main", params):
            values = list(params)
            for name, operands, number in self.steps:
                args = [values[i] for i in operands]
                values += self._emit(builder, name, args, number, n)
            builder.emit_func_output(relax.Tuple([values[i] for i in self.outputs]))
        mod = builder.get()
        if self.pairs:
            mod["main"] = mod["main"].with_attr("relax_disc.inplace_pairs", self.pairs)
        return mod

    def _emit(self, builder, name, args, number, n):
        kind = relax.TensorType([n, WIDTH], "float32")
        emit = builder.emit
        if name == "flat":
            return [emit(relax.op.reshape(args[0], [n * WIDTH]))]
        if name == "unflat":
            return [emit(relax.op.reshape(args[0], [n, WIDTH]))]
        if name == "constant":
            data = np.full((WIDTH, WIDTH), number, "float32")
            return [emit(relax.const(data))]
        if name == "split":
            pair = emit(relax.call_dps_packed("test.split", args, [kind, kind]))
            return [emit(pair[0]), emit(pair[1])]
        if name == "total":
            return [
                emit(relax.call_dps_packed("test.total", args, relax.TensorType([], "float32")))
            ]
        if name == "rows":
            return [emit(relax.call_dps_packed("test.rows", [relax.prim_value(n)], kind))]
        if name.startswith("scale"):
            args = [*args, relax.prim_value(tirx.FloatImm("float64", number))]
        return [emit(relax.call_dps_packed(f"test.{name}", args, args[0].ty))]

    def expected(self, tensors):
        """The outputs in torch, from fresh copies of the inputs."""
        values = [tensor.clone() for tensor in tensors]
        n = tensors[0].shape[0]
        for name, operands, number in self.steps:
            args = [values[i] for i in operands]
            if name == "flat":
                values.append(args[0].reshape(-1))
            elif name == "unflat":
                values.append(args[0].reshape(-1, WIDTH))
            elif name == "constant":
                values.append(torch.full((WIDTH, WIDTH), number))
            elif name == "split":
                values += [args[0] - 1.0, args[0] + 1.0]
            elif name == "total":
                values.append(args[0].sum())
            elif name == "rows":
                values.append(torch.arange(n, dtype=torch.float32)[:, None].repeat(1, WIDTH))
            elif name.startswith("scale"):
                values.append(args[0] * number)
            elif name == "add":
                values.append(args[0] + args[1])
            else:
                values.append(args[0] @ args[1])
        return [values[i] for i in self.outputs]

    def arguments(self, n, seed=0):
        """Random inputs for one shape."""
        generator = torch.Generator().manual_seed(seed + n)
        shapes = [(n, WIDTH)] * self.inputs + [(WIDTH, WIDTH)] * self.weights
        return [torch.randn(*shape, generator=generator) for shape in shapes]


def draw_program(data, strategies, *, most=14, constants=True):
    """Draw a program with hypothesis: `data.draw` and the module of strategies."""
    program = Program(data.draw(strategies.integers(1, 2)), data.draw(strategies.integers(1, 3)))
    rows = list(range(program.inputs))
    flats, squares = [], list(range(program.inputs, program.inputs + program.weights))
    scalars = []
    count = program.inputs + program.weights
    names = [
        "scale",
        "add",
        "matmul",
        "split",
        "flat",
        "unflat",
        "total",
        "rows",
        "constant",
        "step",
    ]
    if not constants:
        names.remove("constant")
    for _ in range(data.draw(strategies.integers(1, most))):
        name = data.draw(strategies.sampled_from(names))
        number = data.draw(strategies.sampled_from([0.5, -1.0, 1.25]))
        pick = lambda items: data.draw(strategies.sampled_from(items))  # noqa: E731
        made = 1
        if name in ("flat", "total"):
            step = (name, [pick(rows)], 0)
            (flats if name == "flat" else scalars).append(count)
        elif name == "unflat":
            if not flats:
                continue
            step = (name, [pick(flats)], 0)
            rows.append(count)
        elif name in ("rows", "constant"):
            step = (name, [], number)
            (rows if name == "rows" else squares).append(count)
        elif name == "matmul":
            step = (name, [pick(rows), pick(squares)], 0)
            rows.append(count)
        elif name == "step":  # a new value for a weight
            step = ("add", [pick(squares), pick(squares)], 0)
            squares.append(count)
        elif name == "split":
            step = (name, [pick(rows)], 0)
            rows += [count, count + 1]
            made = 2
        elif name == "scale":
            pool = flats if flats and data.draw(strategies.booleans()) else rows
            step = (name, [pick(pool)], number)
            pool.append(count)
        else:
            step = (name, [pick(rows), pick(rows)], 0)
            rows.append(count)
        program.steps.append(step)
        count += made
    everything = rows + flats + squares + scalars
    program.outputs = data.draw(
        strategies.lists(strategies.sampled_from(everything), min_size=1, max_size=4)
    )
    weights = range(program.inputs, program.inputs + program.weights)
    for weight in weights:
        if data.draw(strategies.booleans()):
            program.pairs.append([len(program.outputs), weight])
            program.outputs.append(data.draw(strategies.sampled_from(squares)))
    return program


def compile_program(module):
    """Lower and load a module; return the virtual machine."""
    from relax_disc.pipeline import pipeline

    executable = relax.build(module, tvm.target.Target("llvm"), relax_pipeline=pipeline())
    return relax.VirtualMachine(executable, tvm.cpu())


def call(machine, tensors, name="main"):
    """Call a function with torch tensors; the results are a flat list of torch tensors."""
    result = machine[name](*[tvm.runtime.from_dlpack(tensor) for tensor in tensors])
    parts = [result] if hasattr(result, "__dlpack__") else list(result)
    return [torch.from_dlpack(part) for part in parts]
