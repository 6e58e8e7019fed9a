"""Everything gets a schedule for CUDA that touches memory inside threads only; no GPU is needed."""

import pytest
import torch
from tvm import relax, tirx

from relax_disc.frontend.optimizer.kernels import update_kernel
from relax_disc.frontend.optimizer.programs import programs_of
from relax_disc.tir_kernels import cuda_target, rules_for
from relax_disc.tir_kernels.cuda.guarded import Guarded, runs_on_device
from tests.tir_kernels.kernel_runs import fused_kernel, tensor
from tests.tir_kernels.test_rules import CASES

N = tirx.Var("n", "int64")


def scatter():
    return fused_kernel(
        [tensor("x", [10, 8]), tensor("i", [N, 1], "int64"), tensor("u", [N, 8])],
        lambda emit, x, i, u: relax.op.scatter_nd(x, i, u, "add"),
    )


def kernels():
    made = {name: fused_kernel(params, build) for name, (_, params, build, *_) in CASES.items()}
    weight = torch.nn.Parameter(torch.zeros(64, 256))
    optimizer = torch.optim.Adam([weight])
    program = programs_of(optimizer).of(optimizer.param_groups[0], weight)
    made["adam"] = update_kernel(program, (64, 256), "float32", True)
    made["scatter"] = scatter()
    return made


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_every_kernel_is_scheduled(arch):
    target = cuda_target(arch)
    rules = rules_for(target)
    with target:
        for name, func in kernels().items():
            assert not runs_on_device(func, target), name
            schedules = (rule.apply(func, target, False) for rule in rules)
            schedule = next((made for made in schedules if made is not None), None)
            assert schedule is not None, name
            assert runs_on_device(schedule.mod["main"], target), name


def test_an_exception_means_not_mine():
    class Broken:
        def apply(self, func, target, tunable):
            raise IndexError("no such loop")

    assert Guarded(Broken()).apply(scatter(), cuda_target(), False) is None


def test_a_schedule_without_threads_is_refused():
    class Lazy:
        def apply(self, func, target, tunable):
            from tvm import s_tir

            return s_tir.Schedule(func)

    assert Guarded(Lazy()).apply(scatter(), cuda_target(), False) is None
