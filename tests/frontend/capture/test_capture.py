"""Loss and gradients of captured models against float64 PyTorch, many shapes from one build."""

import pytest
import torch
from torch import nn
from torch.export import Dim
from torch.nn import functional as F
from tvm import relax

from relax_disc.errors import InputMismatchError, ShapeRangeError, UnsupportedOperatorError
from relax_disc.frontend import capture_forward, capture_step
from tests.frontend.models import MLP, Llama, dims, mlp_batch, token_batch
from tests.frontend.running import check_gradients

SHAPES = [(3, 12), (1, 1), (5, 33), (8, 48)]


def two(b, s):
    return ({0: b, 1: s}, {0: b, 1: s})


def bindings(captured):
    return [x for block in captured.module["main"].body.blocks for x in block.bindings]


def test_mlp():
    torch.manual_seed(0)
    model = MLP()
    captured = capture_step(model, None, mlp_batch(3, 12), dynamic_shapes=two(*dims()))
    assert [d.name for d in captured.dims] == ["b", "s"]
    assert (captured.dims[1].lower, captured.dims[1].upper) == (1, 48)
    check_gradients(captured, model, [mlp_batch(*shape) for shape in SHAPES])


@pytest.mark.parametrize(
    ("whole", "tied"),
    [
        pytest.param(True, True, id="whole-tied"),
        pytest.param(False, False, id="by-hand-untied"),
        pytest.param(True, False, id="whole-untied", marks=pytest.mark.slow),
        pytest.param(False, True, id="by-hand-tied", marks=pytest.mark.slow),
    ],
)
def test_llama(whole, tied):
    torch.manual_seed(0)
    model = Llama(whole=whole, tied=tied, layers=1)
    captured = capture_step(model, None, token_batch(3, 12), dynamic_shapes=two(*dims()))
    names = [getattr(getattr(b.value, "op", None), "name", "") for b in bindings(captured)]
    # Attention that is written out by hand is found, and is the same operator.
    assert names.count("relax_disc.attention") == 1
    assert names.count("relax_disc.attention_backward") == 1
    parameters = [spec for spec in captured.inputs if spec.kind == "parameter"]
    assert len(parameters) == len(list(model.parameters()))
    check_gradients(captured, model, [token_batch(*shape) for shape in SHAPES])


def test_everything_has_a_known_shape_and_a_line():
    model = Llama()
    captured = capture_step(model, None, token_batch(3, 12), dynamic_shapes=two(*dims()))
    relax.analysis.check_well_formed(captured.module)
    without = 0
    for binding in bindings(captured):
        kind = binding.var.ty
        kinds = kind.fields if isinstance(kind, relax.TupleType) else [kind]
        assert all(isinstance(k.shape, relax.ShapeExpr) for k in kinds)
        without += binding.span is None
        if binding.span is not None:
            assert binding.span.source_name.name.endswith("models.py")
    assert without <= 3


def test_the_model_is_left_alone():
    model = MLP()
    optimizer = torch.optim.AdamW(model.parameters())
    before = {k: v.clone() for k, v in model.state_dict().items()}
    capture_step(model, optimizer, mlp_batch(3, 12), dynamic_shapes=two(*dims()))
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert not optimizer.state
    assert all(p.grad is None for p in model.parameters())


def test_loss_function_keywords_and_pytrees():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 3))

    def loss_fn(model, batch, *, scale):
        out = model(batch["x"])
        return F.mse_loss(out, batch["y"]) * scale, {"mean": out.mean()}

    b = Dim("b", min=1, max=32)

    def batch(n):
        g = torch.Generator().manual_seed(n)
        x, y = torch.randn(n, 16, generator=g), torch.randn(n, 3, generator=g)
        return {"scale": 2.0, "batch": {"x": x, "y": y}}

    shapes = {"batch": {"x": {0: b}, "y": {0: b}}, "scale": None}
    captured = capture_step(model, None, batch(4), dynamic_shapes=shapes, loss_fn=loss_fn)
    assert [out.kind for out in captured.outputs][:2] == ["loss", "extra"]
    run = check_gradients(captured, model, [batch(n) for n in (4, 1, 32, 7)], loss_fn)
    with pytest.raises(InputMismatchError, match="compile again"):
        run(model, None, (), {**batch(4), "scale": 3.0})
    with pytest.raises(InputMismatchError, match="lacks scale"):
        run(model, None, (), {"batch": batch(4)["batch"]})


def test_an_example_of_size_one_and_keywords_in_another_order():
    torch.manual_seed(0)
    model = MLP()
    x, y = mlp_batch(1, 1)
    b, s = dims()
    shapes = {"x": {0: b, 1: s}, "y": {0: b, 1: s}}
    captured = capture_step(model, None, {"y": y, "x": x}, dynamic_shapes=shapes)
    assert [spec.shape for spec in captured.inputs[:2]] == [("b", "s"), ("b", "s", 16)]
    batches = [dict(zip("yx", mlp_batch(*size)[::-1], strict=True)) for size in SHAPES[:3]]
    check_gradients(captured, model, batches)


def test_two_inputs_share_a_dim_of_two_sizes():
    """Each input has a symbol of its own until something compares them."""

    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(1, 1)

        def forward(self, x, mask):
            mask = mask.view(x.shape[0], -1)
            return (self.linear(x[..., None])[..., 0] * mask).pow(2).mean()

    model, shape = Masked(), {0: Dim("b", min=1, max=2), 1: Dim("s", min=2, max=64)}
    batches = [(torch.randn(b, s), torch.ones(b, s)) for b, s in [(2, 5), (1, 2), (2, 33)]]
    captured = capture_step(model, None, batches[0], dynamic_shapes=(shape, shape))
    check_gradients(captured, model, batches)


class Padded(nn.Module):
    """Sums over the chunks of a length that is padded to a multiple of four."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x):
        batch, length, size = x.shape
        x = F.pad(self.linear(x), (0, 0, 0, (4 - length % 4) % 4)).transpose(1, 2)
        x = x.reshape(batch, size, -1, 4)
        x = x + x.mean(-1, keepdim=True).cumsum(2)
        return x.reshape(batch, size, -1)[..., :length].square().mean()


@pytest.mark.parametrize("length", [6, 8])
def test_an_example_that_needs_no_padding_stands_for_all_lengths(length):
    model = Padded()
    shapes = ({0: Dim("b", min=1, max=8), 1: Dim("s", min=1, max=48)},)
    captured = capture_step(model, None, (torch.randn(3, length, 6),), dynamic_shapes=shapes)
    batches = [(torch.randn(*shape, 6),) for shape in SHAPES]
    check_gradients(captured, model, batches)


class AsksWhetherExported(nn.Module):
    """Has a way of its own for exports; ``eager``: what the other one does."""

    def __init__(self, eager):
        super().__init__()
        self.linear, self.eager = nn.Linear(6, 6), eager

    def forward(self, x):
        x = self.linear(x)
        if not torch.compiler.is_exporting():
            x = self.eager(x)
        else:
            x = x * 3
        return x.square().mean()


def _picks(x):
    return x * 3 if x.detach().numpy().max() > -1e9 else x


@pytest.mark.parametrize("eager", [lambda x: x * 2, _picks], ids=["plain", "of-data"])
def test_a_model_that_asks_whether_it_is_exported_goes_the_eager_way_where_it_can(eager):
    model = AsksWhetherExported(eager)
    shapes = ({0: Dim("b", min=1, max=8)},)
    captured = capture_step(model, None, (torch.randn(3, 6),), dynamic_shapes=shapes)
    check_gradients(captured, model, [(torch.randn(rows, 6),) for rows in (1, 5)])


def test_derived_dims():
    torch.manual_seed(0)
    model = nn.Linear(8, 4)
    k = Dim("k", min=1, max=6)

    def loss_fn(model, x):
        return model(x.reshape(-1, 8, 8)).mean(1).square().sum()

    def batch(n):
        return (torch.randn(8 * n, 8, generator=torch.Generator().manual_seed(n)),)

    captured = capture_step(model, None, batch(3), dynamic_shapes=({0: 8 * k},), loss_fn=loss_fn)
    assert captured.inputs[0].kind == "shape"
    assert captured.inputs[1].shape == ("8*k", 8)
    check_gradients(captured, model, [batch(n) for n in (3, 1, 6, 5)], loss_fn)


class Routed(nn.Module):
    """Dynamic routing (Sabour and others, 2017) over the pixels of ``[rows, 1, side, side]``."""

    def __init__(self):
        super().__init__()
        self.embed, self.parts = nn.Conv2d(1, 8, 3, 2), nn.Parameter(torch.randn(3, 4, 4) * 0.3)

    def forward(self, x):
        x = self.embed(x)
        rows = x.shape[0]
        x = x.view(rows, 2, 4, -1).permute(0, 1, 3, 2).reshape(rows, -1, 4)
        votes = torch.einsum("bic,jdc->bijd", x, self.parts)
        logits = torch.zeros(votes.shape[:3])
        for _ in range(2):
            routed = (logits.softmax(2)[..., None] * votes).sum(1).tanh()
            logits = logits + (votes.detach() * routed[:, None]).sum(-1)
        return routed.square().mean()


def test_sizes_that_are_multiplied_out_are_the_same():
    torch.manual_seed(0)
    model, side = Routed(), Dim("side", min=3, max=20)
    shapes = ({0: Dim("n", min=1, max=4), 2: side, 3: side},)
    captured = capture_step(model, None, (torch.randn(2, 1, 12, 12),), dynamic_shapes=shapes)
    batches = [(torch.randn(rows, 1, n, n),) for rows, n in ((1, 3), (4, 20), (2, 9))]
    check_gradients(captured, model, batches, least=5e-6)


class Frozen(nn.Module):
    """Batch norm (mutated buffers), a frozen part, and a parameter that nothing uses."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(16, 8)
        self.norm = nn.BatchNorm1d(8)
        self.last = nn.Linear(8, 3)
        self.unused = nn.Parameter(torch.zeros(5))
        self.first.requires_grad_(False)

    def forward(self, x, y):
        return F.cross_entropy(self.last(self.norm(self.first(x))), y)


def test_forward():
    torch.manual_seed(0)
    model = MLP()
    b, s = dims()
    captured = capture_forward(model, mlp_batch(3, 12), dynamic_shapes=two(b, s))
    assert [out.kind for out in captured.outputs] == ["extra"]


class Unknown(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x):
        x = self.linear(x)
        drawn = torch._standard_gamma(x.exp().detach())
        return (x * torch.poisson(x.exp()) * drawn).sum()


def test_operators_that_are_refused_are_all_named_with_their_lines():
    with pytest.raises(UnsupportedOperatorError) as caught:
        capture_step(Unknown(), None, (torch.randn(4, 16),), dynamic_shapes=({0: Dim("n", max=9)},))
    names = {name.split(".")[1] for name, _ in caught.value.operators}
    assert names >= {"poisson", "_standard_gamma"}
    assert all("test_capture.py" in line for _, line in caught.value.operators)


class Deciding(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.linear = nn.Linear(16, 1)
        self.how = how

    def forward(self, x):
        y = self.linear(x)
        if self.how == "branch" and int(y.sum()) > 0:
            y = -y
        if self.how == "consecutive":
            y = torch.unique_consecutive(y)
        if self.how == "item":
            y = y[: int(y.argmax())]
        return y.sum()


@pytest.mark.parametrize("how", ["branch", "consecutive", "item"])
def test_data_dependence_is_refused_with_its_line(how):
    shapes = ({0: Dim("n", max=9)},)
    with pytest.raises(UnsupportedOperatorError, match=r"test_capture\.py:\d+"):
        capture_step(Deciding(how), None, (torch.randn(4, 16),), dynamic_shapes=shapes)


def test_contradicted_dims_are_refused():
    model = MLP()
    with pytest.raises(ShapeRangeError):
        b = Dim("b")
        capture_step(
            model, None, mlp_batch(3, 12), dynamic_shapes=({0: b, 2: Dim("w")}, {0: b, 1: None})
        )


def test_a_name_alone_is_a_dim_without_an_upper_bound():
    class Net(nn.Module):
        def forward(self, x, pair):
            return (x * pair["y"]).sum() * self.scale + pair["z"].sum()

        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

    example = (torch.ones(3, 4), {"y": torch.ones(3, 4), "z": torch.ones(5)})
    shapes = ({0: "rows"}, {"y": {0: "rows", 1: None}, "z": ("others",)})
    captured = capture_step(Net(), None, example, dynamic_shapes=shapes)
    assert {dim.name: (dim.lower, dim.upper) for dim in captured.dims} == {
        "rows": (1, None),
        "others": (1, None),
    }


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (({0: Dim.AUTO}, {0: Dim.AUTO}), r"dynamic_shapes\[0\]\[0\] is Dim.AUTO, .* Name it"),
        (({0: "rows"}, {0: Dim.DYNAMIC}), r"dynamic_shapes\[1\]\[0\] is Dim.DYNAMIC"),
        (({0: "two words"}, {0: "rows"}), "'two words', which is no name"),
        (({-1: "rows"}, {0: "rows"}), "axis -1 .* has no such axis: the first one is 0"),
        (({2: "rows"}, {0: "rows"}), "axis 2 .* has no such axis"),
    ],
)
def test_dims_that_say_too_little_are_refused(shapes, message):
    example = torch.ones(4, 2), torch.ones(4, 2)
    with pytest.raises(InputMismatchError, match=message):
        capture_step(
            nn.Linear(2, 2), None, example, dynamic_shapes=shapes,
            loss_fn=lambda model, x, y: nn.functional.mse_loss(model(x), y),
        )  # fmt: skip


def test_a_batch_of_unknown_objects_is_refused():
    with pytest.raises(InputMismatchError, match=r"example_inputs.*Unsupported input type"):
        capture_step(
            nn.Linear(4, 4),
            None,
            (torch.randn(3, 4), object()),
            dynamic_shapes=({0: Dim("n", max=9)}, None),
            loss_fn=lambda model, x, _: model(x).mean(),
        )


def test_without_a_loss_it_is_refused():
    with pytest.raises(InputMismatchError, match="loss"):
        capture_step(
            nn.Linear(4, 4), None, (torch.randn(3, 4),), dynamic_shapes=({0: Dim("n", max=9)},)
        )


def test_two_arguments_may_be_one_tensor_in_the_example():
    torch.manual_seed(0)
    model = Llama(whole=False, tied=False, layers=1)
    ids, _ = token_batch(3, 12)
    batch, length = dims()
    shape = {0: batch, 1: length}
    captured = capture_step(model, None, (ids, ids), dynamic_shapes=(shape, shape))
    check_gradients(captured, model, [token_batch(2, 9)])


def test_a_module_as_loss_is_a_criterion_and_the_error_says_so():
    class Loss(nn.Module):
        def forward(self, model, x):
            return model(x).mean()

    with pytest.raises(InputMismatchError, match=r"loss_fn\(model\(\*inputs\), target\).*'target'"):
        capture_step(
            nn.Linear(4, 4), None, (torch.randn(3, 4),), dynamic_shapes=({0: Dim("n", max=9)},),
            loss_fn=Loss(),
        )  # fmt: skip
