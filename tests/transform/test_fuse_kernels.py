"""Fused kernels name the lines of the model that they stem from."""

import inspect

import pytest
import torch
import tvm
from torch import nn
from torch.export import Dim
from tvm import relax

import relax_disc
from relax_disc.frontend import capture_forward
from relax_disc.memory_analysis import step_graph
from relax_disc.pipeline import PipelineOptions, legalize_passes, simplify_passes
from relax_disc.transform import FuseKernels
from relax_disc.transform.fusion.fusion_plan import plan_fusion


class TwoLines(nn.Module):
    """The same operators on two lines, of which fusion makes one function."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        x = self.first(torch.sigmoid(x) * 2.0)  # line one
        low, high = x.split([1, 3], dim=1)
        return self.second(torch.sigmoid(torch.cat([high, low], 1)) * 2.0)  # line two


@pytest.fixture(scope="module")
def module():
    rows = {"x": {0: Dim("rows", min=1, max=64)}}
    return capture_forward(TwoLines(), (torch.randn(3, 4),), dynamic_shapes=rows).module


def numbered(text):
    lines, start = inspect.getsourcelines(TwoLines)
    return next(start + k for k, line in enumerate(lines) if text in line)


def test_each_call_of_a_fused_kernel_has_its_own_line(module):
    kernels = [k for k in step_graph(module).kernels if k.name.startswith("fused")]
    found = {int(kernel.source.rpartition(":")[2]) for kernel in kernels}
    assert {numbered("line one"), numbered("line two")} <= found
    assert all(__file__ in kernel.source for kernel in kernels)


def test_fuses_what_tvm_fuses(module):
    with tvm.target.Target("llvm") as target:
        passes = [*simplify_passes(), *legalize_passes(target, PipelineOptions())]
        place = next(k for k, stage in enumerate(passes) if stage.info.name == "FuseKernels")
        before = tvm.transform.Sequential(passes[:place])(module)
        ours = FuseKernels()(before)
        theirs = relax.transform.FuseTIR()(relax.transform.FuseOps()(before))
    tvm.ir.assert_structural_equal(ours, theirs)
    tvm.ir.assert_structural_equal(FuseKernels()(ours), ours)


class Counted(nn.Module):
    """Counts the entries of a row by a tensor of ones, as masks are made."""

    def forward(self, x):
        return x.sum(-1) / torch.ones_like(x, dtype=torch.int64).sum(-1)


def test_what_fills_a_compound_extent_is_not_fused_with_its_reader():
    shapes = {"x": {0: Dim("rows", min=1, max=8), 1: 20 * Dim("parts", min=1, max=9)}}
    example = torch.randn(3, 40)
    forward = relax_disc.compile_forward(Counted(), (example,), dynamic_shapes=shapes)
    for x in (example, torch.randn(1, 20), torch.randn(8, 180)):
        torch.testing.assert_close(forward(x), x.mean(-1), rtol=1e-4, atol=1e-6)


def test_fusion_runs_once(module, monkeypatch):
    """What is fused is planned without `FuseOps`, whose time grows with the square of a step's."""
    runs, fuse = [], relax.transform.FuseOps
    with tvm.target.Target("llvm") as target:
        passes = [*simplify_passes(), *legalize_passes(target, PipelineOptions())]
        monkeypatch.setattr(relax.transform, "FuseOps", lambda: (runs.append(1), fuse())[1])
        tvm.transform.Sequential(passes)(module)
    assert len(runs) == 1
    assert plan_fusion.cache_info().currsize == 0, "keeps no module"
