"""Compute a linear head with cross-entropy in chunks of rows, so that the logits never exist whole.

The logits of a language model and their gradient are its largest tensors by far.  Where the
gradient of the loss is known when the loss is computed, one pass over chunks of rows gives the
loss, the gradient of the head's input and that of its weight, with no further matrix products;
rows whose label is ignored are left out.  Where it comes later, as PyTorch's autograd brings it to
the second half of a function, gradients are computed for 1 and multiplied by it.  The number of
rows in a chunk depends on the shape alone, so that results do not depend on the memory budget.

Recognised: ``cross_entropy(x @ w.T, target)``, with or without a bias, and its gradient, float32,
class indices, label smoothing, "mean" or "sum", tied or frozen weights; beside it a z-loss, that is
anything whose gradient by the log-sum-exp of a row is that times a known factor
(:mod:`.lse_factor`).  Anything else is left as it is, exact but with whole logits: logits that
something else uses, and class weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import tvm
from tvm import relax, tirx
from tvm.sym.analyzer import Analyzer

from relax_disc.ops import registry, vocabulary_head
from relax_disc.ops.operand_views import Uses, extents_of, is_call_of, matrix_view, same_shape
from relax_disc.transform.functions import at_span, copy_module
from relax_disc.transform.libraries.lse_factor import LseTerm, late_definitions, lse_term
from relax_disc.vm_builtins.libraries.install import install

# An eighth of the rows, but not too few: on one thread, 512 rows in chunks of 64 take 0.95 of the
# time of the head in one piece, in chunks of 128 or 256 about 0.92.
CHUNKS, LEAST_ROWS, MOST_ROWS = 8, 64, 128

_MOVES = ("relax.permute_dims", "relax.reshape")


@dataclass(frozen=True, slots=True)
class _Head:
    """One head and loss; variables of the function before the pass."""

    forward: relax.Var
    x: relax.Expr
    weight: relax.Expr
    bias: relax.Expr | None
    target: relax.Expr
    grad_loss: relax.Expr
    factor: relax.Expr | None  # of the gradients, known later
    ignore_index: int
    label_smoothing: float
    is_mean: bool
    grad_x: relax.Var
    grad_weight: relax.Var | None
    grad_biases: tuple[relax.Var, ...]
    term: LseTerm | None
    moved: tuple[relax.Var, ...]  # bindings that have to come before the head

    @property
    def wholes(self) -> list[relax.Var]:
        """What the head computes at once; it is emitted in the place of the first."""
        return [self.forward] if self.term is None else [self.forward, self.term.lse]


@tvm.transform.module_pass(opt_level=0, name="ChunkVocabularyHead")
class ChunkVocabularyHead:
    """Replace linear heads with cross-entropy by a call that works in chunks of rows."""

    def transform_module(self, mod: tvm.IRModule, ctx: tvm.transform.PassContext) -> tvm.IRModule:
        """Rewrite every Relax function."""
        del ctx
        install("llvm")
        result = copy_module(mod)
        for variable, function in mod.functions_items():
            if not isinstance(function, relax.Function) or (function.attrs or {}).get("Primitive"):
                continue
            heads = list(_find_heads(function))
            if heads:
                result.update_func(variable, _Rewriter(mod, function, heads).run())
        return relax.transform.DeadCodeElimination()(result)


def chunk_rows(rows: tvm.ir.Expr) -> tvm.ir.Expr:
    """Rows in a chunk when there are ``rows`` in all: whole vectors, an eighth within bounds."""
    eighth = tirx.floordiv(rows + (CHUNKS - 1), CHUNKS)
    bounded = tirx.max(tirx.min(eighth, _rows(MOST_ROWS)), _rows(LEAST_ROWS))
    unit = vocabulary_head.ROW_UNIT
    return tirx.floordiv(tirx.min(rows, bounded) + (unit - 1), unit) * unit


def _rows(count: int) -> tvm.ir.Expr:
    return tirx.const(count, "int64")


def _find_heads(function: relax.Function) -> Iterator[_Head]:
    uses = Uses.of(function)
    order = {variable: k for k, variable in enumerate(uses.definitions)}
    analyzer = Analyzer()
    for variable, value in uses.definitions.items():
        if is_call_of(value, "relax_disc.cross_entropy_backward"):
            head = _match(variable, value, uses, order, analyzer)
            if head is not None:
                yield head


def _match(
    variable: relax.Var,
    backward: relax.Call,
    uses: Uses,
    order: dict[relax.Var, int],
    analyzer: Analyzer,
) -> _Head | None:
    def definition(expr: relax.Expr) -> relax.Expr:
        while isinstance(expr, relax.Var) and expr in uses.definitions:
            expr = uses.definitions[expr]
        return expr

    if len(backward.args) != 5 or backward.attrs["reduction"] == "none":
        return None
    grad_loss, logits, target, lse, count = backward.args
    if registry.dtype_name(registry.tensor_type(logits, "logits")) != "float32":
        return None
    product, bias = definition(logits), None
    if is_call_of(product, "relax.add"):
        product, bias = _product_and_bias(product, logits, uses)
    if not is_call_of(product, "relax.matmul"):
        return None
    forward = _forward(lse, count, logits, target, backward, uses)
    if forward is None:
        return None
    gradient, term = _total_gradient(variable, logits, uses, analyzer)
    users = {forward, variable} | ({term.lse, term.backward} if term is not None else set())
    if not _used_only_by(logits, users, uses):
        return None
    x = matrix_view(product.args[0], 1, definition, analyzer)
    weight = matrix_view(product.args[1], 1, definition, analyzer)
    if x.transposed or not weight.transposed or weight.split != 1:
        return None
    known, factor = definition(grad_loss), None
    if is_call_of(known, "relax_disc.await_gradient"):
        known, factor = relax.const(1.0, "float32"), grad_loss
    elif not isinstance(known, tvm.ir.GenericConst):
        known = grad_loss
    wholes = [forward] if term is None else [forward, term.lse]
    place = min(wholes, key=order.__getitem__)
    operands = [x.tensor, weight.tensor, target, known, *([] if bias is None else [bias])]
    operands += [] if term is None else [term.factor]
    moved = late_definitions(operands, place, order, uses)
    if moved is None or set(moved) & set(wholes):
        return None  # what it reads is computed from what it computes
    found = _users_of_gradient(gradient, extents_of(logits), uses, analyzer)
    if found is None:
        return None
    products, sums = found
    if bias is None and sums:
        return None
    grad_x = grad_weight = None
    for result in products:
        left, right = uses.definitions[result].args
        first = matrix_view(left, 1, definition, analyzer)
        second = matrix_view(right, 1, definition, analyzer)
        ours = first.tensor.same_as(gradient) and not second.transposed
        if ours and first.transposed and second.tensor.same_as(x.tensor):
            grad_weight = result
        elif ours and not first.transposed and second.tensor.same_as(weight.tensor):
            grad_x = result
        else:
            return None
    if grad_x is None or len(products) != 1 + (grad_weight is not None):
        return None
    if grad_weight is not None and not same_shape(grad_weight, weight.tensor, analyzer):
        return None
    options = uses.definitions[forward].attrs
    return _Head(
        forward=forward,
        x=x.tensor,
        weight=weight.tensor,
        bias=bias,
        target=target,
        grad_loss=known,
        factor=factor,
        ignore_index=int(options["ignore_index"]),
        label_smoothing=float(options["label_smoothing"]),
        is_mean=options["reduction"] == "mean",
        grad_x=grad_x,
        grad_weight=grad_weight,
        grad_biases=tuple(sums),
        term=term,
        moved=moved,
    )


def _total_gradient(
    variable: relax.Var, logits: relax.Expr, uses: Uses, analyzer: Analyzer
) -> tuple[relax.Var, LseTerm | None]:
    """All of the logits' gradient: that of the cross-entropy, or its sum with that of a term."""
    source = variable
    while True:
        users = uses.users_of(source)
        if len(users) != 1 or users[0][0] is None:
            return variable, None
        user, value = users[0]
        if not is_call_of(value, "relax.reshape"):
            break
        source = user
    if not is_call_of(value, "relax.add") or not same_shape(value.args[0], value.args[1], analyzer):
        return variable, None
    other = value.args[1] if value.args[0].same_as(source) else value.args[0]
    while is_call_of(known := uses.definitions.get(other), "relax.reshape"):
        if len(uses.users_of(other)) != 1:
            return variable, None
        other = known.args[0]
    if not isinstance(other, relax.Var) or len(uses.users_of(other)) != 1:
        return variable, None
    term = lse_term(other, logits, uses)
    return (variable, None) if term is None else (user, term)


def _forward(
    lse: relax.Expr,
    count: relax.Expr,
    logits: relax.Expr,
    target: relax.Expr,
    backward: relax.Call,
    uses: Uses,
) -> relax.Var | None:
    """Variable of the cross-entropy whose gradient this is, if only the gradient needs its rest."""
    wholes = []
    for element, index in ((lse, 1), (count, 2)):
        value = uses.definitions.get(element) if isinstance(element, relax.Var) else None
        if not isinstance(value, relax.TupleGetItem) or value.index != index:
            return None
        if len(uses.users_of(element)) != 1:
            return None
        wholes.append(value.tuple_value)
    whole = wholes[0]
    if not wholes[1].same_as(whole) or not isinstance(whole, relax.Var):
        return None
    call = uses.definitions.get(whole)
    if not is_call_of(call, "relax_disc.cross_entropy"):
        return None
    same = call.args[0].same_as(logits) and call.args[1].same_as(target) and len(call.args) == 2
    names = ("ignore_index", "label_smoothing", "reduction")
    same = same and all(call.attrs[name] == backward.attrs[name] for name in names)
    elements = [uses.definitions.get(user) for user, _ in uses.users_of(whole) if user is not None]
    same = same and all(isinstance(value, relax.TupleGetItem) for value in elements)
    return whole if same and len(elements) == len(uses.users_of(whole)) else None


def _used_only_by(variable: relax.Expr, users: set[relax.Var], uses: Uses) -> bool:
    return isinstance(variable, relax.Var) and all(
        user in users for user, _ in uses.users_of(variable)
    )


def _product_and_bias(
    total: relax.Call, logits: relax.Expr, uses: Uses
) -> tuple[relax.Expr | None, relax.Expr | None]:
    """Matrix product and bias, one number for each class, that logits are the sum of."""
    for product, bias in (total.args, reversed(total.args)):
        value = uses.definitions.get(product) if isinstance(product, relax.Var) else None
        if not is_call_of(value, "relax.matmul") or len(uses.users_of(product)) != 1:
            continue
        kind = registry.tensor_type(bias, "bias")
        if registry.dtype_name(kind) != "float32" or not isinstance(kind.shape, relax.ShapeExpr):
            continue
        extents, classes = registry.extents(kind), registry.extents(logits.ty)[-1]
        if len(extents) == 1 and Analyzer().can_prove_equal(extents[0], classes):
            return value, bias
    return None, None


def _users_of_gradient(
    gradient: relax.Var, shape: Sequence[tvm.ir.Expr], uses: Uses, analyzer: Analyzer
) -> tuple[list[relax.Var], list[relax.Var]] | None:
    """Matrix products that use the logits' gradient, through moves, and sums over its rows.

    None if anything else uses it; `shape` is that of the logits.
    """
    products: list[relax.Var] = []
    sums: list[relax.Var] = []
    pending = [(gradient, True)]
    while pending:
        source, in_order = pending.pop()
        for user, value in uses.users_of(source):
            if user is None:
                return None
            if any(is_call_of(value, name) for name in _MOVES):
                pending.append((user, in_order and is_call_of(value, "relax.reshape")))
            elif is_call_of(value, "relax.matmul"):
                if user not in products:
                    products.append(user)
            elif in_order and _is_sum_over_rows(value, shape, analyzer):
                sums.append(user)
            else:
                return None
    return products, sums


def _is_sum_over_rows(value: relax.Expr, shape: Sequence[tvm.ir.Expr], analyzer: Analyzer) -> bool:
    if not is_call_of(value, "relax.sum"):
        return False
    summed = extents_of(value.args[0])
    whole = len(summed) == len(shape) and all(map(analyzer.can_prove_equal, summed, shape))
    return whole and [int(axis) for axis in value.attrs.axis or []] == [0]


@relax.expr_functor.mutator
class _Rewriter(relax.PyExprMutator):
    def __init__(self, mod: tvm.IRModule, function: relax.Function, heads: list[_Head]) -> None:
        super().__init__(mod)
        self._function = function
        self._definitions = Uses.of(function).definitions
        self._heads = {whole: head for head in heads for whole in head.wholes}
        self._emitted: set[relax.Var] = set()  # heads, by their forward
        self._moved: set[relax.Var] = set()
        self._parts: dict[relax.Var, relax.Expr] = {}
        self._factors: dict[relax.Var, relax.Expr] = {}

    def run(self) -> relax.Function:
        return self.visit_expr(self._function)

    def visit_var_binding_(self, binding: relax.VarBinding) -> None:
        if binding.var in self._moved:
            return
        head = self._heads.get(binding.var)
        if head is not None and head.forward not in self._emitted:
            for variable in head.moved:
                self._move(variable)
            self._emit(head)
        element = binding.value
        if isinstance(element, relax.TupleGetItem) and element.index == 0:
            replaced = self._parts.get(element.tuple_value)
        else:
            forward = head is not None and binding.var.same_as(head.forward)
            replaced = None if forward else self._parts.get(binding.var)
        if replaced is None:
            super().visit_var_binding_(binding)
        else:
            factor = self._factors.get(binding.var)
            if factor is not None:
                replaced = relax.op.multiply(self.builder_.emit(replaced), self.visit_expr(factor))
            self.set_var_remap(binding.var, self.builder_.emit(replaced, binding.var.name))

    def _move(self, variable: relax.Var) -> None:
        """Compute a binding here, before its own place."""
        if variable not in self._moved:
            value = self.visit_expr(self._definitions[variable])
            self.set_var_remap(variable, self.builder_.emit(value, variable.name))
            self._moved.add(variable)

    def _emit(self, head: _Head) -> None:
        self._emitted.add(head.forward)
        weight = registry.tensor_type(head.weight, "weight", 2)
        classes, width = registry.extents(weight)
        rows = registry.extents(registry.tensor_type(head.target, "target", 1))[0]
        results = [relax.TensorType([], "float32"), head.grad_x.ty]
        if head.bias is not None:
            results.append(relax.TensorType([classes], "float32"))
        if head.term is not None:
            results.append(relax.TensorType([rows], "float32"))
        if head.grad_weight is not None:
            results.append(weight)
        columns = vocabulary_head.workspace_columns(classes, width)
        results.append(relax.TensorType([chunk_rows(rows), columns], "float32"))
        operands = [head.x, head.weight, head.target, head.grad_loss]
        operands += [] if head.bias is None else [head.bias]
        if head.term is not None:
            operands.append(self.builder_.emit(self.visit_expr(head.term.factor), "lse_factor"))
        name = "vocabulary_head" + ("" if head.bias is None else "_bias")
        name += "" if head.term is None else "_z"
        name += "_frozen" if head.grad_weight is None else ""
        arguments = [
            *(self.visit_expr(operand) for operand in operands),
            relax.prim_value(head.ignore_index),
            relax.prim_value(tirx.const(head.label_smoothing, "float64")),
            relax.prim_value(int(head.is_mean)),
        ]
        call = relax.call_dps_packed(f"relax_disc.cpu.{name}", arguments, results)
        # At the line of the loss.
        whole = self.builder_.emit(at_span(call, head.forward.span), "vocabulary_head")
        self._parts[head.forward] = relax.TupleGetItem(whole, 0)
        self._parts[head.grad_x] = relax.TupleGetItem(whole, 1)
        for variable in head.grad_biases:
            element = self.builder_.emit(relax.TupleGetItem(whole, 2))
            self._parts[variable] = relax.op.reshape(element, registry.extents(variable.ty))
        if head.term is not None:
            self._parts[head.term.lse] = relax.TupleGetItem(whole, 2 + (head.bias is not None))
        if head.grad_weight is not None:
            self._parts[head.grad_weight] = relax.TupleGetItem(whole, len(results) - 2)
        if head.factor is not None:
            gradients = (head.grad_x, head.grad_weight, *head.grad_biases)
            self._factors.update({each: head.factor for each in gradients if each is not None})
