"""Prepare a model's own loops so that one over a dynamic length is run as one step.

``for t in range(x.shape[1]): BODY`` becomes, in the function's code and while it is exported ::

    loop = steps(range(x.shape[1]), ...)
    for t in loop:
        if loop.is_dynamic:
            h, outs = loop.enter(locals())
        BODY
        if loop.is_dynamic:
            h, outs, t = loop.leave(locals())

and ``[BODY for row in x]`` becomes ``mapped(x, lambda row: BODY)``.  A length that is a number runs
as ever.  For another the body runs once, on values that stand for those of any step
(:mod:`.steps`).

Functions that name ``range`` are prepared, and those that draw a number to choose by
(:mod:`.choice_source`); where an export meets a loop over a tensor, those with any loop are (they
are ten times as many, which takes seconds).
"""

from __future__ import annotations
import __future__

import ast
import contextlib
import copy
import dis
import functools
import inspect
import linecache
from collections.abc import Iterator, Sequence
from types import CodeType, FunctionType
from typing import Any

from torch import nn

from relax_disc.frontend.capture.loops import choice_source
from relax_disc.frontend.capture.loops.body import Body
from relax_disc.frontend.capture.loops.calls import (
    CALLS,
    ITERATORS,
    displayed,
    mapped,
    masked,
    placed,
    read,
    transposed,
)
from relax_disc.frontend.capture.loops.choices import CHOICES
from relax_disc.frontend.capture.loops.recorded import are_all_prepared, note_unread, set_modules
from relax_disc.frontend.capture.loops.rewrites import MASKED, HeldLists, MaskWrites
from relax_disc.frontend.capture.loops.steps import steps
from relax_disc.frontend.capture.loops.syntax import PREFIX, called, named

_STEPS, _MAPPED, _DISPLAYED, _TRANSPOSED, _PLACED, _READ, _SLICE = (
    f"{PREFIX}{name}__"
    for name in ("steps", "mapped", "displayed", "transposed", "placed", "read", "slice")
)
_HELPERS: dict[str, Any] = {
    **{f"{PREFIX}{name}__": function for name, function in {**CALLS, **ITERATORS}.items()},
    _STEPS: steps,
    _MAPPED: mapped,
    MASKED: masked,
    _DISPLAYED: displayed,
    _TRANSPOSED: transposed,
    _PLACED: placed,
    _READ: read,
    _SLICE: slice,
}
_CHOICES = {
    name: f"{PREFIX}{name}__"
    for name in ("by_chance", "decided", "chosen", "bound", "either", "before", "first")
}
_HELPERS |= {_CHOICES[function.__name__]: function for function in CHOICES}
_DRAWS = frozenset({"random", "rand", "uniform"})  # functions that return a random number
_FUTURE = __future__.annotations.compiler_flag
_BUILT_IN = frozenset({*CALLS, *ITERATORS})
_known: dict[CodeType, CodeType | None] = {}
_unread: set[CodeType] = set()  # of those what has no source


@contextlib.contextmanager
def loops_as_steps(model: nn.Module, functions: Sequence[FunctionType]) -> Iterator[None]:
    """Give the functions that a model runs their prepared code for a while."""
    changed: list[tuple[FunctionType, CodeType]] = []
    spaces: dict[int, dict[str, Any]] = {}
    for function in functions:
        code = _prepared(function)
        if code is not None:
            changed.append((function, function.__code__))
            function.__code__ = code
            spaces[id(function.__globals__)] = function.__globals__
        elif function.__code__ in _unread:
            note_unread(function.__qualname__)
    set_modules(list(model.modules()))
    for space in spaces.values():
        space.update(_HELPERS)
    try:
        yield
    finally:
        for function, code in changed:
            function.__code__ = code
        for space in spaces.values():
            for name in _HELPERS:
                del space[name]


def _names(code: CodeType) -> set[str]:
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= _names(constant)
    return names


def _locals(code: CodeType) -> set[str]:
    names = {*code.co_varnames, *code.co_cellvars}
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= _locals(constant)
    return names


def _prepared(function: FunctionType) -> CodeType | None:
    code = function.__code__
    is_wanted = not _names(code).isdisjoint({"range", *_DRAWS})
    is_wanted = is_wanted or (are_all_prepared() and _has_loop(code))
    if not is_wanted or "range" in function.__globals__:
        return None
    if code not in _known:
        _known[code] = _compiled(function)
    return _known[code]


def _has_loop(code: CodeType) -> bool:
    """Whether a function has a loop, or makes a list of what it is given."""
    if any(op == _FOR for op in code.co_code[::2]) or CALLS.keys() & {*code.co_names}:
        return True
    return any(_has_loop(each) for each in code.co_consts if isinstance(each, CodeType))


_FOR = dis.opmap["FOR_ITER"]


def _compiled(function: FunctionType) -> CodeType | None:
    """Compile a function's source with its loops prepared; None where there are none."""
    code = function.__code__
    try:
        node, first = _lambda_of(code) if code.co_name == "<lambda>" else _definition_of(code)
    except (OSError, SyntaxError, TypeError):
        is_pythons = code.co_filename.startswith("<frozen ")
        if not is_pythons and "range" in _names(code):
            _unread.add(code)
        return None
    if node is None:
        return None
    taken = {*_locals(code), *code.co_freevars, *function.__globals__}
    prepare = _Prepare(node, first - 1, _locals(code), _BUILT_IN - taken)
    prepare.generic_visit(node)
    if not prepare.is_changed:
        return None
    outer = ast.parse("def outer():\n    pass")
    body: list[ast.stmt] = [
        ast.Assign([ast.Name(name, ast.Store())], ast.Constant(None)) for name in code.co_freevars
    ]
    made_of = ast.Return(node) if isinstance(node, ast.Lambda) else node
    outer.body[0].body = [*body, made_of]  # pyright: ignore[reportAttributeAccessIssue]
    ast.increment_lineno(node, first - 1)
    ast.fix_missing_locations(outer)
    flags = code.co_flags & _FUTURE
    made: Any = compile(outer, code.co_filename, "exec", flags, dont_inherit=True)
    for name in ("outer", code.co_name):
        made = next(c for c in made.co_consts if isinstance(c, CodeType) and c.co_name == name)
    if (
        made.co_freevars != code.co_freevars
        or not _names(code) - _names(made) <= _BUILT_IN  # names such as `__own` of a class
        or made.co_varnames[: code.co_argcount] != (code.co_varnames[: code.co_argcount])
    ):
        return None
    return made.replace(co_qualname=code.co_qualname)


def _definition_of(code: CodeType) -> tuple[Any, int]:
    """Return the ``def`` of a function, or None, and the line of the file that is its line 1."""
    lines, first = inspect.getsourcelines(code)
    # Columns stay as they are in the file, where others look for what a position asks.
    tree: Any = ast.parse("".join(["if True:\n", *lines] if lines[0][0].isspace() else lines))
    node = tree.body[0]
    if isinstance(node, ast.If):
        node, first = node.body[0], first - 1
    if not isinstance(node, ast.FunctionDef) or node.name != code.co_name:
        return None, first
    node.decorator_list = []
    return node, first


def _lambda_of(code: CodeType) -> tuple[Any, int]:
    """Return the expression of a lambda, or None where several begin in its line; and 1."""
    lines = linecache.getlines(code.co_filename)
    if not lines:
        raise OSError("no source")
    arguments = [*code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]]
    found = [
        node
        for node in _lambdas("".join(lines))
        if node.lineno == code.co_firstlineno
        and [a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
        == arguments
    ]
    return (copy.deepcopy(found[0]) if len(found) == 1 else None), 1


@functools.lru_cache(maxsize=16)
def _lambdas(text: str) -> list[ast.Lambda]:
    return [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Lambda)]


class _Prepare(ast.NodeTransformer):
    """Rewrites the loops of one function and of those written in it."""

    def __init__(
        self, function: ast.AST, shift: int, local_names: set[str], built_in: frozenset[str]
    ) -> None:
        self.is_changed = False
        self.count = 0
        self._shift = shift
        self._local_names = local_names
        self._built_in = built_in
        self._lists: set[str] = set()  # names of lists of numbers
        self._outer_names = {
            name
            for node in ast.walk(function)
            if isinstance(node, ast.Global | ast.Nonlocal)
            for name in node.names
        }

    def visit_Call(self, node: ast.Call) -> Any:
        """Let what Python makes of a list keep its length symbolic."""
        self.generic_visit(node)
        name = called(node)
        if name == "zip" and name in self._built_in and not node.keywords:
            only = node.args[0] if len(node.args) == 1 else None
            if isinstance(only, ast.Starred):
                node.func = ast.copy_location(ast.Name(_TRANSPOSED, ast.Load()), node.func)
                node.args, self.is_changed = [only.value], True
            return node
        if name not in CALLS or name not in self._built_in:
            return node
        if node.args and isinstance(node.args[0], ast.GeneratorExp) and name != "range":
            node.args[0] = self._mapped(node.args[0])
        if not node.keywords or name == "sum":
            self._rename(node)
        return node

    def visit_ListComp(self, node: ast.ListComp) -> Any:
        """Prepare ``[BODY for target in values]``."""
        self.generic_visit(node)
        return self._mapped(node)

    def visit_List(self, node: ast.List | ast.Tuple) -> Any:
        """Prepare ``[*values, ...]``."""
        self.generic_visit(node)
        stars = [isinstance(each, ast.Starred) for each in node.elts]
        if not any(stars) or not isinstance(node.ctx, ast.Load):
            return node
        kind = "list" if isinstance(node, ast.List) else "tuple"
        if kind not in self._built_in:
            return node
        parts: list[ast.expr] = [
            ast.Tuple(
                [ast.Constant(star), each.value if isinstance(each, ast.Starred) else each],
                ast.Load(),
            )
            for star, each in zip(stars, node.elts, strict=True)
        ]
        made = ast.Call(ast.Name(_DISPLAYED, ast.Load()), [ast.Name(kind, ast.Load()), *parts], [])
        self.is_changed = True
        return ast.copy_location(made, node)

    visit_Tuple = visit_List

    def visit_Assign(self, node: ast.Assign) -> Any:
        """Note a name of a list of numbers."""
        for target in node.targets:
            both = isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple)
            targets, values = (target.elts, node.value.elts) if both else ([target], [node.value])
            pairs = zip(targets, values, strict=False)
            self._lists |= {named(name) for name, value in pairs if _is_range(value)} - {""}
        return self.generic_visit(node)

    def visit_Subscript(self, node: ast.Subscript) -> Any:
        """Prepare ``x[range(n), y]``: PyTorch asks such a list for its length."""
        items = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        has_lists = any(_is_range(i) or named(i) in self._lists for i in items)
        has_stars = any(isinstance(i, ast.Starred) for i in items)
        self.generic_visit(node)
        is_read = isinstance(node.ctx, ast.Load)
        base = node.value if is_read or isinstance(node.value, ast.Name) else None
        if not has_lists or has_stars or base is None or not {"range", "list"} <= self._built_in:
            return node
        self.is_changed = True
        plain = [_slice_call(i) if isinstance(i, ast.Slice) else i for i in items]
        index = ast.Tuple(plain, ast.Load()) if isinstance(node.slice, ast.Tuple) else plain[0]
        if is_read:
            made: Any = ast.Call(ast.Name(_READ, ast.Load()), [base, index], [])
            return ast.copy_location(made, node)
        again = ast.Name(named(base), ast.Load())
        node.slice = ast.Call(ast.Name(_PLACED, ast.Load()), [again, index], [])
        return node

    def visit_IfExp(self, node: Any) -> Any:
        """Prepare what may choose by a random number."""
        is_choice = choice_source.is_choice(node, self._local_names - self._outer_names)
        self.generic_visit(node)
        if not is_choice:
            return node
        self.is_changed = True
        write: Any = choice_source.expression
        if isinstance(node, ast.If):
            write = choice_source.statement
        return ast.copy_location(write(node, _CHOICES), node)

    visit_If = visit_IfExp

    def _rename(self, call: ast.Call) -> None:
        name = f"{PREFIX}{called(call)}__"
        call.func = ast.copy_location(ast.Name(name, ast.Load()), call.func)
        self.is_changed = True

    def _iterated(self, values: ast.expr) -> None:
        """Prepare what a loop runs over."""
        if not isinstance(values, ast.Call) or called(values) not in ITERATORS:
            return
        if called(values) not in self._built_in:
            return
        if any(isinstance(each, ast.Starred) for each in values.args):
            return
        for argument in values.args:
            self._iterated(argument)
        self._rename(values)

    def _mapped(self, node: ast.ListComp | ast.GeneratorExp) -> ast.expr:
        """Write a comprehension as a call, whose function has the same variables."""
        only = node.generators[0]
        inner = [each for each in ast.walk(node) if each is not node]
        refused = ast.NamedExpr | ast.Await | ast.Yield | ast.YieldFrom
        if len(node.generators) > 1 or only.ifs or only.is_async:
            return node
        if any(isinstance(each, refused) for each in inner):
            return node
        self._iterated(only.iter)
        value = ast.Name(f"{PREFIX}value__", ast.Load())
        one = ast.comprehension(only.target, ast.Tuple([value], ast.Load()), [], 0)
        body = ast.Subscript(ast.ListComp(node.elt, [one]), ast.Constant(0), ast.Load())
        arguments = ast.arguments([], [ast.arg(value.id)], None, [], [], None, [])
        function = ast.Lambda(arguments, body)
        line = ast.Constant(node.lineno + self._shift)
        made = ast.Call(ast.Name(_MAPPED, ast.Load()), [only.iter, function, line], [])
        self.is_changed = True
        return ast.copy_location(made, node)

    def visit_For(self, node: ast.For) -> Any:
        """Prepare a loop."""
        masked, held = MaskWrites(node).names, HeldLists(node)
        self._local_names |= held.names.keys()
        found = Body(node, self._outer_names)
        self.generic_visit(node)
        self._iterated(node.iter)
        self.is_changed = True
        name = f"__relax_disc_loop_{self.count}__"
        self.count += 1
        foreign = {*found.stored, *found.attributed} - self._local_names
        if foreign and not found.why_not:
            found.why_not = f"it stores into {sorted(foreign)[0]}, which is no local name"
        targets = {n.id for n in ast.walk(node.target) if isinstance(n, ast.Name)}
        bound = [n for n in found.bound if n not in targets]
        stored = [n for n in found.stored if n not in bound and n not in targets]
        names = {
            "bound": bound,
            "stored": stored,
            "continued": [n for n in found.continued if n in stored],
            "prepended": [n for n in found.prepended if n in stored],
            "rebound": [n for n in found.rebound if n in bound],
            "masked": [n for n in masked if n in bound],
            "attributed": [*found.attributed],
            "read": sorted(found.read),
        }
        arguments: list[ast.expr] = [
            node.iter,
            ast.Constant(found.why_not),
            _target(node.target),
            ast.Dict([ast.Constant(role) for role in names], [*map(_text, names.values())]),
            ast.Constant(node.lineno + self._shift),
        ]
        make = ast.Assign(
            [ast.Name(name, ast.Store())], ast.Call(ast.Name(_STEPS, ast.Load()), arguments, [])
        )
        node.iter = ast.Name(name, ast.Load())
        take, give_back = held.apart(name)
        if not found.why_not:
            own = [*bound, *stored]
            node.body = [
                *take,
                *_exchange(name, "enter", own),
                *node.body,
                *_exchange(name, "leave", [*own, ast.unparse(node.target)]),
                *give_back,
            ]
        return [ast.copy_location(make, node), node]


def _text(names: list[str]) -> ast.expr:
    return ast.Tuple([ast.Constant(name) for name in names], ast.Load())


def _target(target: ast.expr) -> ast.expr:
    """Write the variables of a loop as names in tuples."""
    if isinstance(target, ast.Tuple):
        return ast.Tuple([_target(each) for each in target.elts], ast.Load())
    return ast.Constant(target.id if isinstance(target, ast.Name) else "")


def _is_range(node: ast.AST) -> bool:
    """Whether an expression is ``range(...)``, ``list(range(...))`` or ``tuple(range(...))``."""
    if not isinstance(node, ast.Call):
        return False
    inner = node.args[0] if len(node.args) == 1 else node
    is_copy = called(node) in ("list", "tuple")
    return called(node) == "range" or (is_copy and inner is not node and _is_range(inner))


def _slice_call(node: ast.Slice) -> ast.expr:
    bounds = (node.lower, node.upper, node.step)
    arguments = [ast.Constant(None) if each is None else each for each in bounds]
    return ast.Call(ast.Name(_SLICE, ast.Load()), arguments, [])


def _exchange(loop: str, method: str, names: list[str]) -> list[ast.stmt]:
    """Write ``if loop.is_dynamic: a, b = loop.method(locals())``."""
    places = ", ".join(names) + "," if names else f"{PREFIX}nothing__"
    return ast.parse(f"if {loop}.is_dynamic:\n    {places} = {loop}.{method}(locals())").body
