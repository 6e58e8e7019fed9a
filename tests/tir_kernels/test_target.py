"""Tags of known devices: what they tell TVM, plans and users."""

import importlib
import subprocess
import sys

import pytest
import torch
import tvm
import tvm_ffi
from torch.export import Dim

import relax_disc
from relax_disc.compiler import build
from relax_disc.devices import TAGS, device_figures, register_tags
from relax_disc.errors import InputMismatchError
from relax_disc.frontend import capture_step
from relax_disc.tir_kernels.target import cpu_target, resolve_target


@pytest.mark.parametrize("name", TAGS)
def test_a_tag_is_a_target_of_tvm_whose_figures_are_found_again(name):
    target = resolve_target(name)
    assert device_figures(target) is TAGS[name]
    assert target.kind.name == ("cuda" if TAGS[name].arch else "llvm")
    assert (TAGS[name].host_bytes_per_ns > 0) == bool(TAGS[name].arch)
    if TAGS[name].arch:
        assert str(target.attrs["arch"]) == TAGS[name].arch
        assert target.host.kind.name == "llvm"
        assert device_figures(target).default_budget_bytes() < TAGS[name].memory_bytes
    else:
        assert device_figures(target).default_budget_bytes() is None


def test_tags_are_known_after_the_import_alone():
    code = "import relax_disc, tvm; print(tvm.target.Target('relax_disc/h100').attrs['arch'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert done.stdout.strip() == "sm_90", done.stderr


def test_registering_twice_is_harmless():
    register_tags()
    assert str(resolve_target("relax_disc/l4").attrs["arch"]) == "sm_89"


def test_other_targets_have_no_figures():
    assert device_figures(cpu_target()) is None
    given = tvm.target.Target({"kind": "cuda", "arch": "sm_90"})
    assert resolve_target(given) is given
    assert device_figures(given) is None


@pytest.mark.parametrize("name", ["relax_disc/h900", "nonsense", "cuda -arch=sm_90"])
def test_what_is_no_target_is_refused_with_the_list_of_tags(name):
    with pytest.raises(InputMismatchError, match=r"no target of TVM.*relax_disc/h100"):
        resolve_target(name)


def test_a_generic_processor_trains_without_a_budget():
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(5, 3)

        def forward(self, x):
            return self.layer(x).square().mean()

    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    shapes = ({0: Dim("rows", min=1, max=64)},)
    x = torch.rand(4, 5)
    expected = model(x).detach()
    step = relax_disc.compile(
        model, optimizer, (x,), dynamic_shapes=shapes, target="relax_disc/cpu"
    )
    assert step.memory_budget is None
    torch.testing.assert_close(step(x), expected)


class Normed(torch.nn.Module):
    """Kernels of every rule: sums along rows and columns, elements, updates."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = torch.nn.Linear(5, 7), torch.nn.LayerNorm(7)

    def forward(self, x):
        return torch.tanh(self.norm(self.first(x))).square().mean()


def captured():
    model = Normed()
    return capture_step(
        model,
        torch.optim.AdamW(model.parameters()),
        (torch.randn(3, 5),),
        dynamic_shapes=({0: Dim("rows", min=1, max=64)},),
        loss_fn=lambda model, x: model(x),
    ).module


def test_code_for_rocm_is_generated():
    """Without ROCm: its linker and its library of functions are stood in for."""
    before = {}
    stand_ins = {"bitcode_path": lambda *_: [], "link": lambda code: code}
    importlib.import_module("tvm.support.rocm")  # registers what looks for ROCm
    for name, stand_in in stand_ins.items():
        full = f"tvm_callback_rocm_{name}"
        before[full] = tvm_ffi.get_global_func(full)
        tvm_ffi.register_global_func(full, stand_in, override=True)
    target = tvm.target.Target({"kind": "rocm", "mcpu": "gfx90a"}, host=cpu_target())
    try:
        program = build(captured(), target)
    finally:
        for full, function in before.items():
            tvm_ffi.register_global_func(full, function, override=True)
    (host,) = program.mod.imports
    (device,) = host.imports
    assert device.kind in ("rocm", "hip")
    assert device.inspect_source("asm").count(".amdhsa_kernel") > 10


@pytest.mark.parametrize("target", [{"kind": "nvptx", "mcpu": "sm_80"}, {"kind": "opencl"}])
def test_a_target_without_kernels_is_refused(target):
    """Kernels without threads would run on the host, on the device's addresses."""
    with pytest.raises(InputMismatchError, match=target["kind"]):
        build(captured(), tvm.target.Target(target, host=cpu_target()))


def test_plans_for_a_device_know_its_speed_and_alignment():
    """Before anything is measured on it; the figures travel with the compiled program."""
    from relax_disc.analysis.program.extraction import machine_of
    from relax_disc.vm_builtins.plan_metadata import Machine, PlanMetadata

    h100, l4 = (machine_of(resolve_target(f"relax_disc/{name}")) for name in ("h100", "l4"))
    assert h100.alignment == l4.alignment == 256
    assert h100.bytes_per_ns == TAGS["relax_disc/h100"].copy_bytes_per_ns
    assert h100.bytes_per_ns > 10 * l4.bytes_per_ns
    assert machine_of(cpu_target()) == Machine()
    table = PlanMetadata("main", (), (), (), (), (), (), h100)
    assert PlanMetadata.from_json(table.to_json()).machine == h100
