"""Every converter against PyTorch at several shapes; the table holds nothing that is not run."""

import pytest
import torch
from torch import nn
from torch.export import Dim

from relax_disc.frontend.capture.exported.export import export, wrap_forward
from relax_disc.frontend.capture.traced.trace import trace_forward
from relax_disc.frontend.converters import TABLE
from relax_disc.frontend.emission import Wanted, emit_functions
from relax_disc.frontend.importer import refuse_unknown
from relax_disc.vm_builtins.libraries import install
from tests.frontend.converters.converter_cases import FAMILIES
from tests.frontend.running import Runner

N, M = Dim("n", min=1, max=9), Dim("m", min=5, max=20)
SIZES = [(4, 6), (1, 5), (9, 20), (5, 9)]

SEEN: set[str] = set()

# Run by test_networks.py, test_random.py and test_capture.py.
IN_NETWORKS = {
    "aten._unique2.default",
    "aten.as_strided.default",
    "aten.avg_pool2d.default",
    "aten.avg_pool2d_backward.default",
    "aten.convolution.default",
    "aten.convolution_backward.default",
    "aten.max_pool2d_with_indices.default",
    "aten.max_pool2d_with_indices_backward.default",
    "aten.nonzero.default",
    "relax_disc.attention.default",
    "relax_disc.attention_backward.default",
    "relax_disc.attention_backward_trained.default",
    "relax_disc.batch_norm.default",
    "relax_disc.batch_norm_backward.default",
    "relax_disc.cross_entropy.default",
    "relax_disc.cross_entropy_backward.default",
    "relax_disc.keep.default",
    "relax_disc.logsumexp_backward.default",
    "relax_disc.uniform.default",
    "transformers.grouped_mm_fallback.default",
    "transformers.grouped_mm_fallback_backward.default",
    # Run by tests/integrations/test_torch_compile.py.
    "relax_disc.await_gradient.default",
    # Run by tests/training/kernels/test_recurrence.py, which has the library.
    "relax_disc.recurrence.default",
    "relax_disc.recurrence_backward.default",
    # Run by test_upsampling.py and tests/training/kernels/test_operators.py.
    "aten.upsample_bilinear2d.default",
    "aten.upsample_bilinear2d_backward.default",
    "relax_disc.cumprod_backward.default",
    # Run by tests/training/test_dynamic_loops.py.
    "relax_disc.loop_call.default",
    # Run by tests/training/kernels/test_ctc.py.
    "relax_disc.ctc_loss.default",
    "relax_disc.ctc_loss_backward.default",
}


def data(n, m):
    g = torch.Generator().manual_seed(31 * n + m)
    x, y = torch.randn(n, m, generator=g), torch.randn(n, m, generator=g)
    return {
        "x": x,
        "y": y,
        "p": y.abs() + 0.1,
        "i": torch.randint(0, 2, (n, m), generator=g),
        "j": torch.randint(-5, 5, (n, m), generator=g),
        "b": torch.randint(0, 2, (n, m), generator=g).bool(),
    }


class Family(nn.Module):
    def __init__(self, functions):
        super().__init__()
        self.functions = functions

    def forward(self, x, y, p, i, j, b):
        given = {"x": x, "y": y, "p": p, "i": i, "j": j, "b": b}
        outputs = []
        for function in self.functions:
            code = function.__code__
            used = code.co_varnames[: code.co_argcount - len(function.__defaults__ or ())]
            outputs.append(function(*(given[name] for name in used)))
        return tuple(outputs)


def run_family(functions, sizes):
    model = Family(functions)
    example = data(*SIZES[0])
    shapes = {name: {0: N, 1: M} for name in example}
    exported = export(wrap_forward(model), example, shapes)
    traced = trace_forward(exported, model)
    SEEN.update(str(node.target) for node in traced.graph.graph.nodes)
    refuse_unknown(traced)
    install.install("llvm")  # what no converter fits is PyTorch's own kernel
    run = Runner(emit_functions(exported, traced, [Wanted(forward=True)])[0])
    for size in sizes:
        batch = data(*size)
        found = run(model, None, (), batch)["extra"]
        expected = model(**batch)
        assert len(found) == len(expected)
        for k, ((_, ours), theirs) in enumerate(zip(found, expected, strict=True)):
            torch.testing.assert_close(
                ours, theirs, equal_nan=True, msg=lambda text, k=k, size=size: f"{k} {size} {text}"
            )


@pytest.mark.parametrize("name", FAMILIES)
def test_converters(name):
    run_family(FAMILIES[name], SIZES)


def test_every_converter_was_exercised():
    if "aten.mm.default" not in SEEN:
        pytest.skip("needs the other tests of this file")
    assert sorted(set(TABLE) - SEEN) == sorted(IN_NETWORKS)
