"""Choices by a random number in a model's code, written so that both ways are computed.

``a if random.random() < p else b`` becomes ::

    chosen(a, b) if by_chance(random.random() < p) else a if decided() else b

and an ``if`` whose two sides only bind names runs both and chooses what each name holds.  Only
values that are free of side effects are written so: names, parts, arithmetic and methods of
tensors.  A layer that is called on one side trains, in eager PyTorch, at its own steps alone.
"""

from __future__ import annotations

import ast
import copy

import torch
from torch.nn import functional

_PURE = (
    *(ast.Constant, ast.Name, ast.Attribute, ast.Subscript, ast.Slice, ast.Tuple, ast.List),
    *(ast.BinOp, ast.UnaryOp, ast.Compare, ast.Call, ast.keyword, ast.IfExp),
    *(ast.expr_context, ast.operator, ast.unaryop, ast.cmpop),
)


def is_choice(node: ast.IfExp | ast.If, local_names: set[str]) -> bool:
    """Whether both sides only compute values, which an ``if`` binds to names of ``local_names``."""
    if isinstance(node, ast.IfExp):
        return _is_pure(node.body) and _is_pure(node.orelse)
    return all(map(_binds, (*node.body, *node.orelse))) and {*_bound(node)} <= local_names


def expression(node: ast.IfExp, names: dict[str, str]) -> ast.expr:
    """Write ``a if test else b``; ``names``: of what the code calls, as in `CHOICES`."""
    plain = ast.IfExp(_call(names["decided"]), node.body, node.orelse)
    both = _call(names["chosen"], copy.deepcopy(node.body), copy.deepcopy(node.orelse))
    return ast.IfExp(_call(names["by_chance"], node.test), both, plain)


def statement(node: ast.If, names: dict[str, str]) -> ast.stmt:
    """Write an ``if``; ``names``: as for `expression`, and of two variables."""
    bound = _bound(node)
    texts = ast.Tuple([ast.Constant(name) for name in bound], ast.Load())

    def held() -> ast.expr:
        return _call(names["bound"], _call("locals"), copy.deepcopy(texts))

    def keep(name: str) -> ast.stmt:
        return ast.Assign([ast.Name(name, ast.Store())], held())

    def rebind(value: ast.expr) -> ast.stmt:
        places: list[ast.expr] = [ast.Name(name, ast.Store()) for name in bound]
        return ast.Assign([ast.Tuple(places, ast.Store())], value)

    before, first = names["before"], names["first"]
    both = [
        keep(before),
        *copy.deepcopy(node.body),
        keep(first),
        rebind(ast.Name(before, ast.Load())),
        *copy.deepcopy(node.orelse),
        rebind(_call(names["either"], ast.Name(first, ast.Load()), held())),
    ]
    plain = ast.If(_call(names["decided"]), node.body, node.orelse)
    return ast.If(_call(names["by_chance"], node.test), both, [plain])


def _bound(node: ast.If) -> list[str]:
    targets = [target for each in (*node.body, *node.orelse) for target in _targets(each)]
    names = [part for target in targets for part in ast.walk(target)]
    return list(dict.fromkeys(part.id for part in names if isinstance(part, ast.Name)))


def _call(name: str, *arguments: ast.expr) -> ast.expr:
    return ast.Call(ast.Name(name, ast.Load()), list(arguments), [])


def _targets(node: ast.stmt) -> list[ast.expr]:
    return node.targets if isinstance(node, ast.Assign) else []


def _binds(node: ast.stmt) -> bool:
    """Whether a statement only binds names to values that are free of side effects."""
    if isinstance(node, ast.Pass):
        return True
    targets = [part for target in _targets(node) for part in ast.walk(target)]
    is_plain = all(isinstance(part, ast.Name | ast.Tuple | ast.Store) for part in targets)
    return isinstance(node, ast.Assign) and is_plain and _is_pure(node.value)


def _is_pure(node: ast.expr) -> bool:
    return all(
        isinstance(part, _PURE) and (not isinstance(part, ast.Call) or _is_pure_call(part))
        for part in ast.walk(node)
    )


def _is_pure_call(call: ast.Call) -> bool:
    """Whether a function is one of torch or a method of tensors, and writes nothing."""
    function = call.func
    if not isinstance(function, ast.Attribute) or function.attr.endswith("_"):
        return False
    root = function.value
    while isinstance(root, ast.Attribute | ast.Subscript):
        root = root.value
    name = root.id if isinstance(root, ast.Name) else ""
    return name != "self" and hasattr(_HOMES.get(name, torch.Tensor), function.attr)


_HOMES = {"torch": torch, "F": functional, "functional": functional}
