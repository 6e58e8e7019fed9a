"""Models that cannot be trained by one program on one device are refused by name, at compile."""

import pytest
import torch
from torch import nn
from torch.export import Dim

from relax_disc.errors import InputMismatchError, UnsupportedOperatorError
from relax_disc.frontend import capture_forward, capture_step

SHAPES = ({0: Dim("rows", min=1, max=9)},)


class Net(nn.Module):
    def __init__(self, region=None):
        super().__init__()
        self.first, self.last = nn.Linear(6, 4), nn.Linear(4, 1)
        self.region = region

    def forward(self, x):
        if self.region is None:
            return self.last(self.first(x)).square().mean()
        with torch.autocast("cpu", self.region):
            y = self.first(x)
        return self.last(y.float()).square().mean()


def capture(model, dtype=torch.float32):
    return capture_step(model, None, (torch.ones(3, 6, dtype=dtype),), dynamic_shapes=SHAPES)


def test_float16_without_loss_scaling():
    with pytest.raises(UnsupportedOperatorError, match=r"first\.weight .*float16.*GradScaler"):
        capture(Net().half(), torch.float16)
    frozen = Net()
    frozen.first.half().requires_grad_(False)  # nothing underflows where nothing is trained
    with pytest.raises(RuntimeError, match="dtype"):  # PyTorch's own: the model does not run
        frozen(torch.ones(3, 6, dtype=torch.float16))
    with pytest.raises(UnsupportedOperatorError, match=r"test_refusals\.py:\d+.*float16"):
        capture(Net(torch.float16))
    assert capture(Net(torch.bfloat16)).outputs
    with (
        torch.autocast("cpu", torch.float16),
        pytest.raises(UnsupportedOperatorError, match="the caller"),
    ):
        capture(Net())


@pytest.mark.filterwarnings("ignore:.*quantize.*:UserWarning")
@pytest.mark.filterwarnings("ignore:.*torch.ao.quantization.*:DeprecationWarning")
def test_quantised():
    linear = Net().first
    model = nn.Sequential(torch.ao.nn.quantized.dynamic.Linear(6, 4))
    with pytest.raises(UnsupportedOperatorError, match=r"0 .*Linear.*quantised"):
        capture(model)
    linear.register_buffer("table", torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8))
    with pytest.raises(UnsupportedOperatorError, match="table is quantised"):
        capture(linear)


class Packed(torch.Tensor):
    """Stands for the packed weights of a quantisation library."""


def test_tensors_with_rules_of_their_own():
    model = Net()
    packed = torch.ones(4, 6).as_subclass(Packed)
    model.first.register_buffer("packed", packed)
    with pytest.raises(UnsupportedOperatorError, match=r"first\.packed is a .*Packed"):
        capture(model)
    with pytest.raises(UnsupportedOperatorError, match="UninitializedParameter"):
        capture(nn.LazyLinear(3))


class Graph(nn.Module):
    """A layer over the neighbours that a matrix tells, from wherever that comes."""

    def __init__(self, matrix, is_buffer):
        super().__init__()
        self.layer = nn.Linear(4, 2)
        if is_buffer:
            self.register_buffer("matrix", matrix)
        else:
            self.of_graph = lambda x: torch.sparse.mm(matrix, x)

    def forward(self, x, matrix=None):
        x = self.layer(x)
        if matrix is not None or "matrix" in self._buffers:
            return torch.sparse.mm(self.matrix if matrix is None else matrix, x).square().mean()
        return self.of_graph(x).square().mean()


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_sparse_tensors(layout):
    matrix, x = torch.eye(6).to_sparse(layout=layout), torch.randn(6, 4)
    for model, batch, where in (
        (Graph(matrix, True), (x,), "^matrix: "),
        (Graph(matrix, False), (x,), r"test_refusals\.py:\d+, _sparse_mm: "),
        (Graph(torch.eye(6), True), (x, matrix), "^example_inputs: "),
    ):
        assert torch.isfinite(model(*batch))
        words = f"{where}.*{layout}.*dense.*index_add"
        with pytest.raises(UnsupportedOperatorError, match=words):
            capture_step(model, None, batch, dynamic_shapes=({},) * len(batch))


class Turned(nn.Module):
    """Turns a plane by a complex weight."""

    def __init__(self, weight):
        super().__init__()
        self.layer, self.weight = nn.Linear(4, 4), weight

    def forward(self, x):
        return (self.layer(x.real) * self.weight).abs().square().mean()


def test_complex_numbers_that_go_into_a_step():
    turn, x = torch.randn(4, dtype=torch.complex64), torch.randn(6, 4)
    for weight, batch, where in (
        (nn.Parameter(turn), x, "^The parameter weight is of type"),
        (2.0, x + 1j, "^The batch x is of type"),
    ):
        model = Turned(weight)
        assert torch.isfinite(model(batch))
        with pytest.raises(UnsupportedOperatorError, match=f"{where} .*view_as_real"):
            capture_step(model, None, (batch,), dynamic_shapes=({},))


@pytest.fixture
def group(tmp_path):
    """A process group of this process alone."""
    distributed = torch.distributed
    if not distributed.is_available():
        pytest.skip("this torch has no torch.distributed")
    store = distributed.FileStore(str(tmp_path / "store"), 1)
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def test_wrapped_for_several_processes(group):
    from torch.distributed.fsdp import FSDPModule, fully_shard

    wrapped = nn.parallel.DistributedDataParallel(Net())
    for model in (wrapped, nn.Sequential(wrapped), nn.DataParallel(Net())):
        with pytest.raises(UnsupportedOperatorError, match="DataParallel"):
            capture(model)
    with pytest.raises(UnsupportedOperatorError, match="DistributedDataParallel"):
        capture_forward(wrapped, (torch.ones(3, 6),), dynamic_shapes=SHAPES)
    sharded = Net()
    mesh = torch.distributed.init_device_mesh("cpu", (1,))
    fully_shard(sharded, mesh=mesh)
    assert isinstance(sharded, FSDPModule)
    with pytest.raises(UnsupportedOperatorError, match="FSDPModule"):
        capture(sharded)


def test_several_devices_and_none():
    model = Net()
    model.last.to("meta")
    with pytest.raises(UnsupportedOperatorError, match=r"first\.weight on cpu.*last\.weight on me"):
        capture(model)
    with pytest.raises(UnsupportedOperatorError, match="meta device and has no values"):
        capture(model.to("meta"))


class Addresses(nn.Module):
    """Asks where its input lies, which no tensor of a trace does."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return self.layer(x).sum() * (x.data_ptr() % 2)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
def test_what_is_no_module_of_pytorchs_own():
    with pytest.raises(InputMismatchError, match=r"torch\.nn\.Module, got .*Net"):
        capture(Net)
    scripted = nn.Sequential(torch.jit.script(nn.Linear(6, 1)))
    with pytest.raises(UnsupportedOperatorError, match=r"0 .*torch\.jit"):
        capture(scripted)


def test_what_pytorch_cannot_trace_names_the_line():
    rows = ({0: Dim("rows", min=1, max=8)},)
    with pytest.raises(UnsupportedOperatorError, match=r"test_refusals.py:\d+: PyTorch cannot"):
        capture_step(Addresses(), None, (torch.ones(3, 4),), dynamic_shapes=rows)


class Hooked(Net):
    def forward(self, x):
        hidden = self.first(x)
        hidden.register_hook(lambda grad: 2 * grad)
        return self.last(hidden).square().mean()


def test_hooks_on_gradients():
    """PyTorch calls them; one compiled step does not, and would train as something else."""
    with pytest.raises(UnsupportedOperatorError, match=r"test_refusals\.py:\d+.*register_hook"):
        capture(Hooked())
    model = Net()
    for register in (
        model.first.register_full_backward_hook,
        model.first.register_full_backward_pre_hook,
        model.first.weight.register_hook,
        model.first.weight.register_post_accumulate_grad_hook,
    ):
        handle = register(lambda *_: None)
        with pytest.raises(UnsupportedOperatorError, match=r"first.*hook"):
            capture(model)
        assert capture_forward(model, (torch.ones(3, 6),), dynamic_shapes=SHAPES).outputs
        handle.remove()
    assert capture(model).outputs


def test_hooks_around_the_optimizer_s_step():
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = optimizer.register_step_post_hook(lambda *_: None)
    with pytest.raises(UnsupportedOperatorError, match="hooks around step"):
        capture_step(model, optimizer, (torch.ones(3, 6),), dynamic_shapes=SHAPES)
    handle.remove()
    assert capture_step(model, optimizer, (torch.ones(3, 6),), dynamic_shapes=SHAPES).outputs


def test_complex_tensors_beside_the_loss():
    class Spectrum(Net):
        def forward(self, x):
            return super().forward(x), {"spectrum": torch.fft.fft(x)}

    with pytest.raises(UnsupportedOperatorError, match=r"return torch\.view_as_real\(x\)"):
        capture(Spectrum())
