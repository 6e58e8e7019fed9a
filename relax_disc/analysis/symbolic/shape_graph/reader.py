"""Read all functions of a module into one system of size equalities.

Each Relax function keeps its own variables.  At a call site the sizes of the arguments and of the
callee's parameters are equal for that call: where a callee has one caller its dims join the
caller's; where it has several, each call is read with dims of its own, and the callee's dims join
only if all calls agree.  Kernels (PrimFuncs) are read in the same way.

Equalities are learnt from code that always runs; branches of `If` teach nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import tvm
from tvm import relax, tirx
from tvm.relax.analysis import tir_vars_in_type

from relax_disc.analysis.symbolic.dim import SymbolicDim
from relax_disc.analysis.symbolic.expr import SymbolicExpr
from relax_disc.analysis.symbolic.from_tirx import from_tirx, to_tirx
from relax_disc.analysis.symbolic.shape_graph.facts import (
    Fact,
    OtherFact,
    ScalarFact,
    ShapeFact,
    TensorFact,
    TupleFact,
    declared_ranges,
    fact_of_type,
    is_size,
    is_unknown,
    kernel_operands,
    size_pairs,
    tensors_of,
)
from relax_disc.analysis.symbolic.shape_graph.rules import operator_equalities
from relax_disc.analysis.symbolic.shape_graph.solver import ShapeConstraints
from relax_disc.errors import GraphError

DECLARED, PARAMETER, INNER = 2, 1, 0  # which of two equal dims stays


class ModuleReader:
    """Walks a module; fills `constraints`, `dims` and `facts`."""

    def __init__(self, mod: tvm.IRModule) -> None:
        self.mod = mod
        self.constraints = ShapeConstraints()
        self.dims: dict[tuple[str, Any], SymbolicExpr] = {}  # by function and tirx variable
        self.facts: dict[Any, Fact] = {}
        self.undeclared: set[str] = set()
        self._inferred: dict[str, Any] = {}  # a tirx variable for each dim, to infer types with
        self._calls: dict[str, list[dict[Any, SymbolicExpr]]] = {}
        self._sites: Counter[str] = Counter()  # calls of each function in the text
        self._sized: set[SymbolicExpr] = set()
        self._functions = {
            gvar.name_hint: func
            for gvar, func in mod.functions.items()
            if isinstance(func, relax.Function | tirx.PrimFunc)
        }

    def read(self) -> None:
        """Read every function and solve.

        Raises `GraphError`: sizes contradict each other, or a shape is unknown.
        """
        functions = {
            name: func for name, func in self._functions.items() if isinstance(func, relax.Function)
        }
        for func in functions.values():
            relax.analysis.post_order_visit(func, self._count_call)
        # Callers first, so that the dims of the entry keep their plain names.
        for name in sorted(functions, key=lambda name: (self._sites[name] > 0, name)):
            self._read_function(name, functions[name])
        for name, calls in self._calls.items():
            self._join_if_all_agree(name, calls)
        self.constraints.close()

    def size(self, function: str, expr: Any) -> SymbolicExpr:
        """Return a TVM size expression of a function in the dims of the graph."""
        return from_tirx(expr, _FunctionDims(self, function))

    def dim_of(self, function: str, variable: Any) -> SymbolicExpr:
        """Return the dim of a variable, made at first sight."""
        found = self.dims.get((function, variable))
        return self._new_dim(function, variable, {}, INNER) if found is None else found

    def _count_call(self, node: Any) -> None:
        if isinstance(node, relax.Call):
            callee = node.op if isinstance(node.op, tvm.ir.GlobalVar) else None
            if callee is None and node.args and isinstance(node.args[0], tvm.ir.GlobalVar):
                callee = node.args[0]
            if callee is not None:
                self._sites[callee.name_hint] += 1

    def _new_dim(
        self, function: str, variable: Any, declared: Mapping[str, Sequence[int]], keep: int
    ) -> SymbolicExpr:
        base = "".join(c if c.isalnum() or c == "_" else "_" for c in variable.name)
        base = base if base.isidentifier() and not base.startswith("__") else f"dim{base}"
        taken = self.constraints.dims
        name = base if base not in taken else f"{function}_{base}"
        while name in taken:
            name += "_"
        if variable.name in declared:
            lower, upper, divisor = declared[variable.name]
            dim = SymbolicDim(name, lower, None if upper < 0 else upper, divisor)
            keep = DECLARED if keep == PARAMETER else keep
        else:
            dim = SymbolicDim(name)
            self.undeclared.add(name)
        expr = self.constraints.declare(dim, keep)
        self.dims[function, variable] = expr
        return expr

    def _read_function(self, name: str, func: relax.Function) -> None:
        self._declare_parameters(name, func)
        for param in func.params:
            self.facts[param] = self._typed(name, param)
            self._require_known(self.facts[param], f"{name}: parameter {param.name}")
        self._read_body(name, func.body, learn=True)

    def _declare_parameters(self, name: str, func: relax.Function) -> None:
        try:
            declared = declared_ranges(func)
            for variable in _parameter_variables(func):
                if (name, variable) not in self.dims:
                    # The dims of the entry stay, not those of what it calls.
                    keep = INNER if self._sites[name] else PARAMETER
                    self._new_dim(name, variable, declared, keep)
        except GraphError as error:
            raise GraphError(f"{name}: {error}") from error

    def _read_body(self, function: str, body: Any, learn: bool) -> None:
        if not isinstance(body, relax.SeqExpr):
            return
        for block in body.blocks:
            for binding in block.bindings:
                self._read_binding(function, binding, learn)

    def _read_binding(self, function: str, binding: Any, learn: bool) -> None:
        var, value = binding.var, binding.value
        origin = _describe(function, binding)
        if isinstance(value, relax.Function):
            return  # a closure; its calls are opaque
        if isinstance(value, relax.If):
            self._read_body(function, value.true_branch, False)
            self._read_body(function, value.false_branch, False)
        try:
            fact = self._typed(function, var)
            if isinstance(binding, relax.MatchCast):
                if learn:
                    self._equate(self.fact_of(function, value), fact, origin)
            elif isinstance(value, relax.Call):
                fact = self._read_call(function, value, fact, origin, learn)
            elif is_unknown(fact):
                fact = self.fact_of(function, value)
        except GraphError as error:
            raise _with_origin(error, origin) from error
        self.facts[var] = fact
        self._require_known(fact, origin)
        for tensor in tensors_of(fact):
            for size in tensor.shape or ():
                if size not in self._sized:
                    self._sized.add(size)
                    self.constraints.require_size(size, origin)

    def _read_call(
        self, function: str, call: relax.Call, fact: Fact, origin: str, learn: bool
    ) -> Fact:
        operands = [self.fact_of(function, arg) for arg in call.args]
        if isinstance(call.op, tvm.ir.GlobalVar):
            if learn:
                self._read_site(function, call.op.name_hint, operands, fact, origin)
            return fact
        if not isinstance(call.op, tvm.ir.Op):
            return fact
        if call.op.name in ("relax.call_tir", "relax.call_tir_inplace"):
            if learn:
                given = kernel_operands([*operands[1:], fact])
                self._read_site(function, call.args[0].name_hint, given, None, origin)
            return fact
        if learn:
            for left, right in operator_equalities(call, operands, fact, self._never_one):
                self.constraints.require_equal(left, right, origin)
        return self._infer(call, operands) if is_unknown(fact) else fact

    def fact_of(self, function: str, expr: Any) -> Fact:
        """Return what is known of an expression."""
        if isinstance(expr, relax.Var) and expr in self.facts:
            return self.facts[expr]
        if isinstance(expr, relax.Tuple):
            return TupleFact(tuple(self.fact_of(function, field) for field in expr.fields))
        if isinstance(expr, relax.TupleGetItem):
            held = self.fact_of(function, expr.tuple_value)
            if isinstance(held, TupleFact):
                return held.fields[expr.index]
        if is_size(expr):
            try:
                return ScalarFact(self.size(function, expr))
            except GraphError:
                return OtherFact()  # an integer that is computed from data
        if isinstance(expr, relax.ShapeExpr):
            return ShapeFact(tuple(self.size(function, value) for value in expr.values))
        return self._typed(function, expr)

    def _typed(self, function: str, expr: Any) -> Fact:
        if getattr(expr, "ty", None) is None:
            return OtherFact()
        known = self.facts.get
        return fact_of_type(
            expr.ty, lambda size: self.size(function, size), lambda var: known(var, OtherFact())
        )

    def _never_one(self, size: SymbolicExpr) -> bool:
        """Whether a size cannot broadcast.

        A dim whose range nobody declared counts as one that never is 1, like in torch.export.
        """
        size = self.constraints.canonical(size)
        lower, _ = size.bounds()
        if lower is not None and lower > 1:
            return True
        return len(size.free_dims) == 1 and str(size) in self.undeclared

    def _equate(self, left: Fact, right: Fact, origin: str) -> None:
        match left, right:
            case TensorFact(), TensorFact():
                self._equate_shapes(left.shape, right.shape, origin)
            case ShapeFact(), ShapeFact():
                self._equate_shapes(left.shape, right.shape, origin)
            case TupleFact(), TupleFact():
                for first, second in zip(left.fields, right.fields, strict=False):
                    self._equate(first, second, origin)

    def _equate_shapes(self, left: Any, right: Any, origin: str) -> None:
        if left is None or right is None:
            return
        if len(left) != len(right):
            raise GraphError(
                f"a tensor of {len(left)} dims is used where {len(right)} are declared; "
                "correct the shapes."
            )
        for first, second in zip(left, right, strict=True):
            self.constraints.require_equal(first, second, origin)

    def _read_site(
        self, caller: str, callee: str, operands: Sequence[Fact], result: Fact | None, origin: str
    ) -> None:
        """Learn that the parameters of a function have the sizes of the arguments."""
        func = self._functions.get(callee)
        if func is None or callee == caller:
            return
        is_kernel = not isinstance(func, relax.Function)
        parameters = [param if is_size(param) else param.ty for param in func.params]
        site: dict[Any, SymbolicExpr] = {}
        shared = self._sites[callee] == 1 and not is_kernel
        if shared and not is_kernel:
            self._declare_parameters(callee, func)
            for variable in _parameter_variables(func):
                site[variable] = self.dims[callee, variable]
        pairs: list[tuple[Any, SymbolicExpr]] = []
        for kind, operand in zip(parameters, operands, strict=False):
            pairs += size_pairs(kind, operand)
        if not is_kernel and result is not None:
            pairs += size_pairs(func.ret_ty, result)
        # A lone variable is its argument; only then the other sizes say something.
        for parameter, size in pairs:
            if isinstance(parameter, tirx.Var) and parameter not in site:
                site[parameter] = size
        local = _SiteDims(self, f"{callee}_in_{caller}", site)
        for parameter, size in pairs:
            if is_kernel and any(v not in site for v in _variables_of(parameter)):
                continue  # nothing is learnt of a dim that only this kernel knows
            self.constraints.require_equal(from_tirx(parameter, local), size, origin)
        if not shared:
            self._calls.setdefault(callee, []).append(site)

    def _join_if_all_agree(self, callee: str, calls: Sequence[dict[Any, SymbolicExpr]]) -> None:
        for variable in calls[0]:
            values = {self.constraints.canonical(c[variable]) for c in calls if variable in c}
            if len(values) != 1 or len(calls) != self._sites[callee]:
                continue
            value = values.pop()
            known = self.dims.get((callee, variable))
            if known is None:
                self.dims[callee, variable] = value
            else:
                self.constraints.require_equal(known, value, f"all calls of {callee}")

    def _infer(self, call: relax.Call, operands: Sequence[Fact]) -> Fact:
        """Infer a type once more, with equal sizes written equally."""
        args = [self._retyped(arg, fact) for arg, fact in zip(call.args, operands, strict=True)]
        again = relax.Call(call.op, args, call.attrs, call.ty_args)
        try:
            kind = relax.BlockBuilder().normalize(again).ty
        except (RuntimeError, TypeError, ValueError):
            return TensorFact(None, "")  # reported with the binding
        names = {variable: SymbolicExpr.dim(name) for name, variable in self._inferred.items()}
        return fact_of_type(
            kind,
            lambda size: self.constraints.canonical(from_tirx(size, names)),
            lambda _: OtherFact(),
        )

    def _retyped(self, arg: Any, fact: Fact) -> Any:
        if isinstance(arg, relax.ShapeExpr) and isinstance(fact, ShapeFact):
            return relax.ShapeExpr([self._to_tirx(size) for size in fact.shape or ()])
        if isinstance(arg, relax.Tuple) and isinstance(fact, TupleFact):
            pairs = zip(arg.fields, fact.fields, strict=True)
            return relax.Tuple([self._retyped(field, inner) for field, inner in pairs])
        if isinstance(fact, TensorFact) and fact.shape is not None:
            shape = [self._to_tirx(size) for size in fact.shape]
            return relax.Var("operand", relax.TensorType(shape, fact.dtype))
        return arg

    def _to_tirx(self, size: SymbolicExpr) -> Any:
        size = self.constraints.canonical(size)
        for dim in size.free_dims:
            self._inferred.setdefault(dim.name, tirx.Var(dim.name, "int64"))
        return to_tirx(size, self._inferred)

    def _require_known(self, fact: Fact, origin: str) -> None:
        if is_unknown(fact):
            raise GraphError(
                f"{origin}: the shape is unknown. Give it with R.match_cast, or bring the operands "
                "to one shape; dims that meet in a broadcast need a declared lower bound of 2 or "
                "more (attribute tir_var_lower_bound or relax_disc.dims)."
            )


class _FunctionDims(dict[Any, SymbolicExpr]):
    """Looks variables up in one function, making dims at first sight."""

    def __init__(self, reader: ModuleReader, function: str) -> None:
        super().__init__()
        self.reader, self.function = reader, function

    def __contains__(self, key: object) -> bool:
        return isinstance(key, tirx.Var)

    def __getitem__(self, key: Any) -> SymbolicExpr:
        return self.reader.dim_of(self.function, key)


class _SiteDims(_FunctionDims):
    """Looks variables of a callee up at one call site."""

    def __init__(self, reader: ModuleReader, site: str, known: dict[Any, SymbolicExpr]) -> None:
        super().__init__(reader, site)
        self.known = known

    def __getitem__(self, key: Any) -> SymbolicExpr:
        if key not in self.known:
            self.known[key] = self.reader._new_dim(self.function, key, {}, INNER)
        return self.known[key]


def _parameter_variables(func: relax.Function) -> list[Any]:
    """Return the size variables of the parameters, scalars among them."""
    scalars = [param for param in func.params if is_size(param)]
    return [*scalars, *tir_vars_in_type(relax.TupleType([param.ty for param in func.params]))]


def _variables_of(expr: Any) -> list[Any]:
    return list(tirx.analysis.undefined_vars(tirx.Evaluate(expr)))


def _describe(function: str, binding: Any) -> str:
    value = binding.value
    what = type(value).__name__
    if isinstance(binding, relax.MatchCast):
        what = "match_cast"
    elif isinstance(value, relax.Call):
        what = getattr(value.op, "name", None) or getattr(value.op, "name_hint", "call")
    span: Any = getattr(value, "span", None) or getattr(binding, "span", None)
    line = f" ({span.source_name.name}:{span.line})" if hasattr(span, "source_name") else ""
    return f"{function}: {binding.var.name} = {what}(...){line}"


def _with_origin(error: GraphError, origin: str) -> GraphError:
    return error if str(error).startswith(origin) else GraphError(f"{origin}: {error}")
