"""Your own pass, your own rule, another processor
================================================

All passes of `relax_disc.transform` are TVM passes, and compose with TVM's and with yours in
`tvm.transform.Sequential`.

    python tutorials/own_pass_and_rule.py
"""  # noqa: D205, D400

from __future__ import annotations

from typing import Any

import torch
import tvm
from torch import Tensor, nn
from torch.export import Dim
from tvm import relax, s_tir, tirx
from tvm.relax.dpl import is_op, rewrite_call, wildcard
from tvm.target import Target

import relax_disc
from relax_disc.frontend import capture_forward
from relax_disc.pipeline import PipelineOptions, phases
from relax_disc.tir_kernels import rules_for
from relax_disc.transform import ScheduleKernels, Simplify, UnifyDims

# %%
# A pass
# ------
# A module goes in, another comes out; the one that came in stays as it was.


@tvm.transform.module_pass(opt_level=0, name="CancelLogExp")
class CancelLogExp:
    """Rewrite ``log(exp(x))`` to ``x``, which does not overflow either."""

    def transform_module(self, mod: tvm.IRModule, ctx: tvm.transform.PassContext) -> tvm.IRModule:
        """Return the module without those pairs."""
        del ctx
        x = wildcard()
        pattern = is_op("relax.log")(is_op("relax.exp")(x))
        result = tvm.IRModule(dict(mod.functions_items()), attrs=mod.attrs)
        for name, function in mod.functions_items():
            if isinstance(function, relax.Function):
                result.update_func(
                    name, rewrite_call(pattern, lambda _, matched: matched[x], function)
                )
        return result


# %%
# A rule
# ------
# It schedules a kernel, or says None: "not mine".  This one takes kernels of a single loop nest and
# runs their outermost loop in parallel; what is left is for the rules behind it.

taken: list[str] = []


class OutermostInParallel:
    """Schedule rule for kernels of one block."""

    def apply(self, func: tirx.PrimFunc, target: Target, tunable: bool = False) -> Any:
        """Return the scheduled kernel, or None."""
        del target, tunable
        schedule = s_tir.Schedule(tvm.IRModule({"main": func}))
        blocks = schedule.get_child_blocks(schedule.get_sblock("root"))
        if len(blocks) != 1 or not schedule.get_loops(blocks[0]):
            return None
        schedule.parallel(schedule.get_loops(blocks[0])[0])
        taken.append(schedule.get(blocks[0]).name_hint)
        return schedule


# %%
# Put together, for another processor
# -----------------------------------
# Sixteen-byte vectors, as every x86-64 has them: the code runs on older machines than this one.


class Net(nn.Module):
    """Softplus in a way that overflows, between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(32, 64), nn.Linear(64, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.log(torch.exp(100 * self.first(x))))


torch.manual_seed(0)
model, x = Net(), torch.randn(6, 32)
captured = capture_forward(model, (x,), dynamic_shapes=({0: Dim("rows", min=1, max=512)},))
target = Target({"kind": "llvm", "mcpu": "x86-64"})

print("alone:")
alone = tvm.transform.Sequential([UnifyDims(), CancelLogExp(), Simplify()])(captured.module)
print(alone["main"].script())
assert "R.exp" in captured.module["main"].script() and "R.exp" not in alone["main"].script()

stages = phases(target, PipelineOptions())
stages["simplify"].insert(0, CancelLogExp())
ours = ScheduleKernels(target, rules=[OutermostInParallel(), *rules_for(target)])
stages["kernels"] = [
    ours if stage.info.name == "ScheduleKernels" else stage for stage in stages["kernels"]
]
whole = tvm.transform.Sequential([each for some in stages.values() for each in some])
with target:
    executable = relax.build(captured.module, target, relax_pipeline=whole)
function = relax_disc.ForwardFunction(captured, executable, model, None)

# %%
# Eager PyTorch overflows in the exponential; the compiled program has none.

for rows in (6, 200):
    x = torch.randn(rows, 32)
    expected = model.last(100 * model.first(x))
    torch.testing.assert_close(function(x), expected.detach(), rtol=1e-4, atol=1e-3)
print("the rule took:", *taken)
print("eager PyTorch is finite:", bool(model(x).isfinite().all()))
print("the compiled program is finite:", bool(function(x).isfinite().all()))
