"""The function with gradients by rows: its kernels, where they write, and what stays whole."""

from __future__ import annotations

from itertools import pairwise

import pytest
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

from relax_disc.analysis.program.extraction import extract
from relax_disc.transform.functions import copy_module
from relax_disc.transform.memory.split_gradients import SplitGradients
from relax_disc.vm_builtins.plan_metadata import Storage

ROWS, WIDTH = 1024, 256
BOUNDS = [0, 336, 672, 1008, 1024]


@I.ir_module
class Table:
    @T.prim_func(private=True, s_tir=True)
    def update(
        w: T.Buffer((T.int64(1024), T.int64(256)), "float32"),
        g: T.Buffer((T.int64(1024), T.int64(256)), "float32"),
        new: T.Buffer((T.int64(1024), T.int64(256)), "float32"),
    ):
        for i, j in T.grid(T.int64(1024), T.int64(256)):
            with T.sblock("update"):
                v, k = T.axis.remap("SS", [i, j])
                new[v, k] = w[v, k] - g[v, k]

    @T.prim_func(private=True, s_tir=True)
    def shifted(
        w: T.Buffer((T.int64(1024), T.int64(256)), "float32"),
        g: T.Buffer((T.int64(1024), T.int64(256)), "float32"),
        new: T.Buffer((T.int64(1024), T.int64(256)), "float32"),
    ):
        for i, j in T.grid(T.int64(1024), T.int64(256)):
            with T.sblock("update"):
                v, k = T.axis.remap("SS", [i, j])
                new[v, k] = w[v, k] - g[T.int64(1023) - v, k]

    @R.function
    def main(
        w: R.Tensor((1024, 256), "float32"),
        x: R.Tensor(("n", 256), "float32"),
        ids: R.Tensor(("n",), "int64"),
    ):
        R.func_attr({"relax_disc.inplace_pairs": [[0, 0]], "relax.force_pure": True})
        cls = Table
        g = R.call_dps_packed(
            "relax_disc.cpu.embedding_backward",
            (x, ids, R.prim_value(-1)),
            out_ty=R.Tensor((1024, 256), "float32"),
        )
        new = R.call_tir(cls.update, (w, g), out_ty=R.Tensor((1024, 256), "float32"))
        out = (new,)
        return out


def split(module):
    return relax.transform.Normalize()(SplitGradients()(module))


def test_each_part_is_made_and_used_before_the_next():
    module = split(Table)
    names = [str(variable.name_hint) for variable in module.get_global_vars()]
    assert "main__by_rows" in names
    found = extract(module, "main__by_rows")
    kernels = [kernel.name.rpartition(".")[2].partition("_rows")[0] for kernel in found.kernels]
    assert kernels == ["embedding_backward", "update"] * 4
    tables = found.table.buffers
    written = [b for b in tables if b.storage is Storage.OVERWRITE]
    assert [b.begin for b in written] == [4 * WIDTH * begin for begin in BOUNDS[:-1]]
    assert [b.bytes.as_int() for b in written] == [
        4 * WIDTH * (end - begin) for begin, end in pairwise(BOUNDS)
    ]
    assert max(b.bytes.as_int() for b in tables if b.storage is Storage.ARENA) == 4 * WIDTH * 336
    assert found.graph().kernels[1].inplace
    numbers = [v.as_int() for k in found.kernels for kind, v in k.arguments if kind == "integer"]
    assert numbers == [n for begin in BOUNDS[:-1] for n in (-1, begin, ROWS)]


def test_the_plain_function_is_left_alone():
    before, after = extract(Table, "main"), extract(split(Table), "main")
    assert before.graph() == after.graph()


@pytest.mark.parametrize("what", ["shifted", "returned", "small"])
def test_what_cannot_go_by_rows_stays_whole(what):
    builder = relax.BlockBuilder(Table)
    function = Table["main"]
    g, update, _ = function.body.blocks[0].bindings
    call = update.value
    kernels = {str(v.name_hint): v for v in Table.get_global_vars()}
    callee = kernels["shifted"] if what == "shifted" else call.args[0]
    rows = 512 if what == "small" else ROWS
    kind = relax.TensorType([rows, WIDTH], "float32")
    made = relax.Var("g", kind)
    fields = list(g.value.args[1].fields)
    gradient = relax.call_dps_packed("relax_disc.cpu.embedding_backward", fields, kind)
    bindings = [relax.VarBinding(made, builder.normalize(gradient))]
    results = [made]
    if what != "small":
        new = relax.Var("new", kind)
        value = relax.call_tir(callee, relax.Tuple([function.params[0], made]), kind)
        bindings.append(relax.VarBinding(new, builder.normalize(value)))
        results = [new, made] if what == "returned" else [new]
    out = builder.normalize(relax.Tuple(results))
    body = relax.SeqExpr([relax.BindingBlock(bindings)], out)
    module = copy_module(Table)
    module.update_func(
        kernels["main"],
        relax.Function(function.params, body, out.ty, True, function.attrs),
    )
    result = SplitGradients()(module)
    assert "main__by_rows" not in [str(v.name_hint) for v in result.get_global_vars()]
    told = [(name, place) for name, place, _ in extract(result, "main").whole_gradients]
    assert told == ([] if what == "small" else [("w", 0)])
