"""Statements of a loop's body that are written otherwise, so that a step can be recorded."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from relax_disc.frontend.capture.loops.syntax import PREFIX, bound_names, named, parts_of

MASKED = f"{PREFIX}masked__"


class HeldLists:
    """Gives names to lists of other objects that a body appends to, and does nothing else with.

    ``seen["weights"].append(x)`` and ``self.weights.append(x)`` append to a name in a loop that is
    run as one step: the name is bound to the list before the step, in which no one may read it from
    the object, and after it the object holds what the name is then.  In any other loop the
    statements are what they were.
    """

    def __init__(self, loop: ast.For) -> None:
        self.names: dict[str, ast.expr] = {}  # with the lists that they stand for
        self._places: list[tuple[ast.Attribute, str]] = []
        nodes = parts_of(loop)
        texts = [ast.unparse(node) for node in nodes if isinstance(node, _HELD)]
        bound = bound_names(nodes)
        own = [part for statement in loop.body for part in _outside_loops(statement)]
        methods = [method for method in map(_append, own) if method is not None]
        grown = [ast.unparse(method.value) for method in methods]
        known: dict[str, str] = {}
        for method, text in zip(methods, grown, strict=True):
            is_alone = texts.count(text) == grown.count(text)
            if not is_alone or not _is_held(method.value, bound):
                continue
            name = known.setdefault(text, f"{PREFIX}list_{loop.lineno}_{len(known)}__")
            self.names[name] = method.value
            self._places.append((method, name))
            method.value = ast.copy_location(ast.Name(name, ast.Load()), method)

    def apart(self, loop: str) -> tuple[list[ast.stmt], ...]:
        """Let the names be for a step alone; what binds them, and what gives them back.

        ``loop``: the variable that says whether it is one.
        """
        for method, name in self._places:
            text = f"{name} if {loop}.is_dynamic else {ast.unparse(self.names[name])}"
            method.value = ast.copy_location(ast.parse(text, mode="eval").body, method)
        before, behind = [], []
        for name, value in self.names.items():
            held = ast.unparse(value)
            before += [f"{name} = {name}before = {held}", f"{held} = {loop}.hidden"]
            behind.append(f"{held} = {name} if {loop}.is_left else {name}before")
        return tuple(
            ast.parse(f"if {loop}.is_dynamic:\n    {'; '.join(part)}").body if part else []
            for part in (before, behind)
        )


_HELD = ast.Subscript | ast.Attribute


def _outside_loops(node: ast.AST) -> Iterator[ast.AST]:
    """Walk a statement, but not what runs another number of times than it."""
    if not isinstance(node, ast.For | ast.While | ast.FunctionDef | ast.Lambda):
        yield node
        for part in ast.iter_child_nodes(node):
            yield from _outside_loops(part)


def _is_held(value: ast.expr, bound: set[str]) -> bool:
    """Whether an expression is ``name["key"]`` or ``name.attribute``; ``bound``: other names."""
    is_entry = isinstance(value, ast.Subscript) and isinstance(value.slice, ast.Constant)
    if not is_entry and not isinstance(value, ast.Attribute):
        return False
    base = named(value.value)  # pyright: ignore[reportAttributeAccessIssue]
    return bool(base) and base not in bound


def _append(node: ast.AST) -> ast.Attribute | None:
    """Return the method of a statement that appends one value."""
    call = node.value if isinstance(node, ast.Expr) else None
    method = call.func if isinstance(call, ast.Call) and len(call.args) == 1 else None
    return method if isinstance(method, ast.Attribute) and method.attr == "append" else None


class MaskWrites(ast.NodeTransformer):
    """Writes ``h[mask] = new[mask]`` in a loop's body as ``h = masked(h, new, mask)``."""

    def __init__(self, loop: ast.For) -> None:
        self.names: dict[str, None] = {}
        nodes = parts_of(loop)
        self._bound = bound_names(nodes)
        made = [node for node in nodes if isinstance(node, ast.Assign) and _is_truth(node.value)]
        self._masks = {named(target) for node in made for target in node.targets} - {""}
        loop.body = [self.visit(statement) for statement in loop.body]

    def visit_Assign(self, node: ast.Assign) -> ast.stmt:
        """Write one."""
        target, value = node.targets[0], node.value
        if len(node.targets) > 1 or not isinstance(target, ast.Subscript):
            return node
        name = named(target.value)
        is_mask = _is_truth(target.slice) or named(target.slice) in self._masks
        is_same = isinstance(value, ast.Subscript) and _is_alike(target.slice, value.slice)
        if not (is_mask and is_same) or not name or name in self._bound:
            return node
        self.names[name] = None
        arguments = [ast.Name(name, ast.Load()), value.value, value.slice]
        made = ast.Call(ast.Name(MASKED, ast.Load()), arguments, [])
        return ast.copy_location(ast.Assign([ast.Name(name, ast.Store())], made), node)

    def visit_For(self, node: ast.For) -> ast.stmt:
        """Leave a loop inside to itself."""
        return node


def _is_truth(node: ast.expr) -> bool:
    """Whether an expression compares, or combines what does: its tensor is a mask."""
    if isinstance(node, ast.UnaryOp):
        return isinstance(node.op, ast.Invert)
    combines = isinstance(node, ast.BinOp) and isinstance(
        node.op, ast.BitAnd | ast.BitOr | ast.BitXor
    )
    return combines or isinstance(node, ast.Compare)


def _is_alike(one: ast.expr, other: ast.expr) -> bool:
    return ast.dump(one) == ast.dump(other)
