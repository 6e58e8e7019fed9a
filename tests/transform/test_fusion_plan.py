"""The groups that are planned are those that TVM's `FuseOps` makes."""

import random

import pytest
import tvm
from tvm import relax
from tvm.script import relax as R

from relax_disc.transform.fusion.fusion_groups import blocks_of, fuse_ops
from relax_disc.transform.fusion.fusion_plan import plan_fusion

N = 8
HALF = R.Tensor((N // 2, N), "float32")


def random_program(seed, operators):
    """Element-wise operators, views, reductions, products and tuples over earlier values."""
    chance = random.Random(seed)
    builder = relax.BlockBuilder()
    parameters = [relax.Var(f"p{k}", R.Tensor((N, N), "float32")) for k in range(3)]
    with builder.function("main", parameters):
        with builder.dataflow():
            values = list(parameters)

            def pick():
                return chance.choice(values[-6:] if chance.random() < 0.7 else values)

            for _ in range(operators):
                made = {
                    "unary": lambda: relax.op.exp(pick()),
                    "binary": lambda: relax.op.add(pick(), pick()),
                    "view": lambda: relax.op.permute_dims(pick(), [1, 0]),
                    "broadcast": lambda: relax.op.broadcast_to(
                        relax.op.sum(pick(), [0], True), (N, N)
                    ),
                    "product": lambda: relax.op.matmul(pick(), pick()),
                    "parts": lambda: relax.op.split(pick(), 2, 0),
                    "library": lambda: relax.call_dps_packed("library", pick(), [HALF, HALF]),
                }
                kind = chance.choice(["unary", "binary", "binary", "view", *made])
                value = builder.emit(made[kind]())
                if kind in ("parts", "library"):
                    halves = [builder.emit(relax.TupleGetItem(value, k)) for k in (1, 0)]
                    value = builder.emit(relax.op.concat(halves, 0))
                values.append(value)
            result = builder.emit_output(relax.Tuple([values[-1], chance.choice(values)]))
        builder.emit_func_output(result)
    passes = [
        relax.transform.LegalizeOps(),
        relax.transform.AnnotateTIROpPattern(),
        relax.transform.DeadCodeElimination(),
    ]
    return tvm.transform.Sequential(passes)(builder.get())


def callee(value):
    if not isinstance(value, relax.Call):
        return "element"
    kernel = value.args[0]
    return kernel.name_hint if isinstance(kernel, tvm.ir.GlobalVar) else kernel.global_symbol


def made_by_tvm(module):
    """Kernels of each group."""
    fused, _ = fuse_ops(module)
    groups = []
    for binding in (b for block in blocks_of(fused["main"]) for b in block.bindings):
        value = binding.value
        if isinstance(value, relax.Call) and isinstance(value.op, tvm.ir.GlobalVar):
            (block,) = blocks_of(fused[value.op])
            groups.append([callee(each.value) for each in block.bindings])
        elif isinstance(value, relax.Call | relax.TupleGetItem):
            groups.append([callee(value)])
    return sorted(groups)


def planned(module):
    (groups,) = plan_fusion(module).values()
    plan_fusion.cache_clear()
    return sorted([callee(binding.value) for binding in group.bindings] for group in groups)


@pytest.mark.parametrize("seed", range(40))
def test_plans_what_tvm_fuses(seed):
    module = random_program(seed, operators=6 + seed)
    assert planned(module) == made_by_tvm(module)


def test_long_chains_are_cut():
    builder = relax.BlockBuilder()
    value = relax.Var("x", R.Tensor((N, N), "float32"))
    with builder.function("main", [value]):
        with builder.dataflow():
            for _ in range(250):
                value = builder.emit(relax.op.exp(value))
            result = builder.emit_output(value)
        builder.emit_func_output(result)
    passes = [relax.transform.LegalizeOps(), relax.transform.AnnotateTIROpPattern()]
    module = tvm.transform.Sequential(passes)(builder.get())
    groups = planned(module)
    assert groups == made_by_tvm(module)
    assert sum(map(len, groups)) == 250
    assert max(map(len, groups)) == 96


@pytest.mark.parametrize("options", [{"opt_level": 0}, {"config": {"relax.FuseOps.max_depth": 3}}])
def test_knows_the_limits_that_tvm_is_given(options):
    module = random_program(7, operators=40)
    with tvm.transform.PassContext(**options):
        groups = planned(module)
        assert groups == made_by_tvm(module)
    assert max(map(len, groups)) <= 3 < max(map(len, planned(module)))
