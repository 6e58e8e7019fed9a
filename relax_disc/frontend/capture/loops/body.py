"""What the body of a loop does with the names of its function."""

from __future__ import annotations

import ast
from typing import Any

from relax_disc.frontend.capture.loops.syntax import called, named

_MUTATORS = frozenset({"append", "extend", "insert", "pop", "update", "clear", "remove", "add"})


class Body(ast.NodeVisitor):
    """What the body of a loop binds and stores, and why it cannot be run as one step."""

    def __init__(self, loop: ast.For, outer_names: set[str]) -> None:
        self.bound: dict[str, None] = {}
        self.stored: dict[str, None] = {}
        self.why_not = ""
        self._depth = 0
        plain = ast.Name | ast.Tuple | ast.Store
        if not all(isinstance(each, plain) for each in ast.walk(loop.target)):
            self.why_not = "its target is no name"
        if loop.orelse:
            self.why_not = "it has an `else`"
        self.continued: dict[str, None] = {}  # lists whose last element is read
        self.prepended: dict[str, None] = {}  # lists that grow in front
        self.read: set[str] = set()  # names
        self._appended: set[str] = set()
        self._own: set[str] = set()  # containers that each step makes anew
        self.rebound: dict[str, None] = {}  # names that each step binds before it reads them
        self.attributed: dict[str, None] = {}  # names of objects whose attributes it sets
        for statement in loop.body:
            self._note_made(statement)
            self._note_rebound(statement)
            self.visit(statement)
        self.read |= self.continued.keys() - self._appended
        grown = (self._appended | self.prepended.keys()) - self._own
        for name in sorted((self._appended & self.prepended.keys()) - self._own):
            self._refuse(f"it puts values in front of {name} and behind")
        for name in sorted(grown & self.read):
            self._refuse(f"it reads {name}, which it appends to; keep the value in a variable")
        if outer := outer_names & {*self.bound}:
            self.why_not = f"it binds {sorted(outer)[0]}, which is global or of an outer function"

    def _refuse(self, why: str) -> None:
        self.why_not = self.why_not or why

    def _note_made(self, statement: ast.stmt) -> None:
        """Note a container that a step makes before it reads or changes one of that name."""
        if not isinstance(statement, ast.Assign | ast.AnnAssign):
            return
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        value = statement.value
        is_made = isinstance(value, ast.List | ast.ListComp | ast.Dict | ast.Set)
        is_made |= isinstance(value, ast.Call) and called(value) in ("list", "dict", "set")
        for target in targets if is_made else ():
            if isinstance(target, ast.Name) and target.id not in self.read | self._appended:
                self._own.add(target.id)

    def _note_rebound(self, statement: ast.stmt) -> None:
        if not isinstance(statement, ast.Assign):
            return
        used = {n.id for n in ast.walk(statement.value) if isinstance(n, ast.Name)} | self.read
        used |= self.bound.keys() | self.stored.keys() | self.continued.keys()
        for target in statement.targets:
            parts = target.elts if isinstance(target, ast.Tuple) else [target]
            self.rebound.update((n, None) for n in map(named, parts) if n and n not in used)

    def visit_Name(self, node: ast.Name) -> None:
        """Note a name that is bound."""
        if isinstance(node.ctx, ast.Store):
            self.bound[node.id] = None
        if isinstance(node.ctx, ast.Load):
            self.read.add(node.id)
        if isinstance(node.ctx, ast.Del):
            self._refuse(f"it deletes {node.id}")

    def visit_Attribute(self, node: ast.Attribute) -> None:
        """Note an object whose attribute is set, which must have a name."""
        if isinstance(node.ctx, ast.Store):
            self.attributed[named(node.value)] = None
            if not isinstance(node.value, ast.Name):
                self._refuse(f"it sets the attribute {node.attr}")
        self.generic_visit(node)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        """Note a name that an element is stored into, or whose last element is read."""
        if isinstance(node.ctx, ast.Load) and isinstance(node.value, ast.Name):
            if isinstance(node.slice, ast.UnaryOp) and ast.unparse(node.slice) == "-1":
                self.continued[node.value.id] = None
                return
        if isinstance(node.ctx, ast.Store):
            base = node.value
            while isinstance(base, ast.Subscript):
                base = base.value
            if isinstance(base, ast.Name):
                self.stored[base.id] = None
            else:
                self._refuse("it stores into something that is no local name")
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        """Note that ``outs += [value]`` appends."""
        is_list = isinstance(node.value, ast.List) and isinstance(node.op, ast.Add)
        if is_list and isinstance(node.target, ast.Name):
            self.stored[node.target.id] = None
            self._appended.add(node.target.id)
            self.visit(node.value)
            return
        self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> None:
        """Note a name that grows by an element, behind or in front."""
        call = node.value
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute):
            base, method = call.func.value, call.func.attr
            if method in _MUTATORS:
                in_front = method == "insert" and [*map(ast.unparse, call.args[:1])] == ["0"]
                if isinstance(base, ast.Name) and (method == "append" or in_front):
                    self.stored[base.id] = None
                    if in_front:
                        self.prepended[base.id] = None
                    else:
                        self._appended.add(base.id)
                    for argument in call.args:
                        self.visit(argument)
                    return
                if not isinstance(base, ast.Name) or base.id not in self._own:
                    self._refuse(f"it calls {ast.unparse(call.func)}()")
        self.generic_visit(node)

    def visit_For(self, node: ast.For) -> None:
        """Look into a loop inside: its ``break`` is its own."""
        self._depth += 1
        self.generic_visit(node)
        self._depth -= 1

    visit_While = visit_For  # pyright: ignore[reportAssignmentType]

    def visit_Break(self, node: ast.Break) -> None:
        """Refuse to leave early."""
        if not self._depth:
            self._refuse("it ends early by `break`")

    def visit_Continue(self, node: ast.Continue) -> None:
        """Refuse to leave early."""
        if not self._depth:
            self._refuse("it goes on early by `continue`")

    def visit_Return(self, node: ast.Return) -> None:
        """Refuse to leave early."""
        self._refuse("it returns from inside")

    def visit_Yield(self, node: ast.AST) -> None:
        """Refuse generators."""
        self._refuse("it yields from inside")

    visit_YieldFrom = visit_Await = visit_Yield

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        """Note the name; what is inside is the function's own."""
        self.bound[node.name] = None
        self.read |= {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}

    def visit_Lambda(self, node: ast.Lambda) -> None:
        """Note what is read inside."""
        self.read |= {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}

    def visit_ListComp(self, node: Any) -> None:
        """Leave alone the names that a comprehension binds."""
        self.read |= {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
        for inner in ast.walk(node):
            if isinstance(inner, ast.NamedExpr):
                self.visit(inner.target)

    visit_SetComp = visit_GeneratorExp = visit_DictComp = visit_ListComp
