"""Mixtures of experts under a budget: whatever tokens are routed where, peaks are as planned."""

import copy

import pytest
import torch

from relax_disc import compile
from relax_disc.verification import verify

pytest.importorskip("transformers.integrations.moe")
_EXPERTS, _VOCABULARY = 8, 64
_SIZES = {
    "vocab_size": _VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 32,
    "num_experts_per_tok": 2,
    "use_cache": False,
}
_OWN = {
    "Mixtral": {"num_local_experts": _EXPERTS},
    "Qwen3Moe": {"num_experts": _EXPERTS, "moe_intermediate_size": 128},
}
_SHAPES = [(4, 24), (1, 2), (3, 17)]


def _batch(batch, length, seed, alike):
    """Random words, or one word everywhere: then each layer routes all rows to the same experts."""
    words = torch.Generator().manual_seed(seed)
    shape = (1, 1) if alike else (batch, length)
    ids = torch.randint(0, _VOCABULARY, shape, generator=words).expand(batch, length).contiguous()
    return ids, ids.clone()


def _loss(model, ids, labels):
    return model(input_ids=ids, labels=labels).loss


def _compiled(family):
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**_SIZES, **_OWN[family])
    model = getattr(transformers, f"{family}ForCausalLM")(config).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    dims = {0: torch.export.Dim("batch", max=4), 1: torch.export.Dim("length", min=2, max=24)}
    example = _batch(3, 5, 0, False)
    return compile(model, optimizer, example, dynamic_shapes=(dims, dims), loss_fn=_loss)


def _gates(model):
    return [p for name, p in model.named_parameters() if name.endswith("mlp.gate.weight")]


def _rows_of_experts(model, batch):
    """Count, in PyTorch, how many rows each expert of each layer gets."""
    with torch.no_grad():
        logits = model(batch[0], output_router_logits=True).router_logits
    return [torch.bincount(x.topk(2).indices.flatten(), minlength=_EXPERTS) for x in logits]


def _result(step, batch):
    """Take a step and undo it; give the loss, what the parameters became, and the report."""
    with step.restored():
        loss = step(*batch)
        found = [loss.clone(), *(p.detach().clone() for p in step.model.parameters())]
    return found, step.memory_report()


@pytest.mark.parametrize("family", ["Mixtral", pytest.param("Qwen3Moe", marks=pytest.mark.slow)])
@pytest.mark.parametrize("routings", [16, pytest.param(1000, marks=pytest.mark.slow)])
def test_no_routing_breaks_a_budget_or_changes_a_bit(family, routings):
    step = _compiled(family)
    eager = copy.deepcopy(step.model)  # to tell the routings, for which it gets hooks
    assert len(_gates(eager)) == 2
    budgets = {}
    for shape in _SHAPES:
        plan = step.plan(batch=shape[0], length=shape[1])
        budgets[shape] = (plan.peak_bytes, (plan.least_bytes + plan.peak_bytes) // 2)
    assert all(tight < free for free, tight in budgets.values())
    recomputed, unused, crowded = 0, 0, 0
    for seed in range(routings):
        shape, alike = _SHAPES[seed % 3], seed % 4 == 0
        batch = _batch(*shape, seed, alike)
        with torch.no_grad():
            for k, gates in enumerate(zip(_gates(step.model), _gates(eager), strict=True)):
                gates[0].normal_(generator=torch.Generator().manual_seed(2 * seed + k))
                gates[1].copy_(gates[0])
        for rows in _rows_of_experts(eager, batch):
            unused += int((rows == 0).any())
            crowded += int(rows.max()) == shape[0] * shape[1]
        free, tight = budgets[shape]
        step.memory_budget = None
        expected, report = _result(step, batch)
        assert report.peak_bytes == report.planned_peak_bytes == free
        step.memory_budget = tight
        found, report = _result(step, batch)
        assert report.peak_bytes == report.planned_peak_bytes <= tight
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        recomputed += report.recomputations
    assert recomputed > 0
    assert unused > 0
    assert crowded > 0
    step.memory_budget = None
    batches = [_batch(*shape, 1, alike) for shape in _SHAPES for alike in (False, True)]
    assert verify(step, batches).ok
