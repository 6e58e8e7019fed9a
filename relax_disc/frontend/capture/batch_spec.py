"""How the arguments of a call are laid out: which go where, which are tensors.

torch.export takes a container that PyTorch's pytrees do not know for one opaque value, so that
dataclasses and mappings like dict are registered.  That lasts as long as the process and has no
effect on the class itself.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch.utils import _pytree as pytree

from relax_disc.errors import InputMismatchError


@dataclass(frozen=True, slots=True)
class BatchSpec:
    """The structure of a batch: its arguments, which leaves are tensors, and what the others were.

    ``structure``: of ``(args, kwargs)``. ``fixed``: leaves that are no tensors, by index; a batch
    must repeat them. ``parameters``: names of the positional parameters, so that an argument may
    be given either way; empty where the function takes ``*args``.
    """

    structure: pytree.TreeSpec
    fixed: Mapping[int, Any]
    parameters: tuple[str, ...] = ()

    def flatten(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
        """List the leaves of a batch in the order in which ``InputSpec.target`` counts.

        Raises `InputMismatchError`: arguments are missing or too many, the structure of one
        differs from the example's, or a leaf that is no tensor changed.
        """
        batch = self._arranged(tuple(args), kwargs)
        leaves, structure = pytree.tree_flatten(batch)
        if structure != self.structure:
            batch = _in_order(batch, self.structure)
            leaves, structure = pytree.tree_flatten(batch)
        if structure != self.structure:
            self._refuse_structure(batch)
        for index, value in self.fixed.items():
            given = leaves[index]
            if isinstance(given, torch.Tensor) or given != value:
                self._refuse_value(batch, index, given)
        return leaves

    def plain_arguments(self) -> tuple[int, tuple[str, ...]] | None:
        """Count the arguments by place and name the others, if every one is a leaf that may change.

        A list of arguments, all tensors, then is the list of leaves.
        """
        parts = [part for side in self.structure.children() for part in side.children()]
        if self.fixed or not all(part.is_leaf() for part in parts):
            return None
        return self._count, tuple(self._keywords)

    @property
    def _count(self) -> int:
        """How many arguments the example gave by place."""
        return self.structure.children()[0].num_children

    @property
    def _keywords(self) -> list[str]:
        return list(self.structure.children()[1].context or [])

    @property
    def _names(self) -> list[str]:
        """A name for every argument of the example."""
        known = self.parameters[: self._count]
        unnamed = (f"argument {place}" for place in range(len(known), self._count))
        return [*known, *unnamed, *self._keywords]

    def _arranged(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Give each argument the place, or the keyword, that it had in the example."""
        count, keywords = self._count, self._keywords
        if count == 0 and len(args) == 1 and not kwargs and isinstance(args[0], Mapping):
            args, kwargs = (), args[0]  # whole, as the example was given
        if len(args) == count and set(kwargs) == set(keywords):
            return args, {key: kwargs[key] for key in keywords}
        order = [*self._names[:count], *self.parameters[count:]]
        if len(args) > len(order):
            raise InputMismatchError(
                f"The batch has {len(args)} arguments; {self._compiled_for()}."
            )
        given = dict(zip(order, args, strict=False))
        if twice := [name for name in kwargs if name in given]:
            raise InputMismatchError(f"The batch gives {_listed(twice)} twice.")
        given.update(kwargs)
        if missing := [name for name in self._names if name not in given]:
            raise InputMismatchError(f"The batch lacks {_listed(missing)}; {self._compiled_for()}.")
        if unknown := [name for name in given if name not in self._names]:
            raise InputMismatchError(
                f"The batch has {_listed(unknown)} too; {self._compiled_for()}. Give it in "
                "example_inputs and compile again."
            )
        placed = tuple(given[name] for name in self._names[:count])
        return placed, {key: given[key] for key in keywords}

    def _compiled_for(self) -> str:
        return f"the step was compiled for {_listed(self._names)}"

    def _refuse_value(
        self, batch: tuple[tuple[Any, ...], dict[str, Any]], index: int, given: Any
    ) -> NoReturn:
        """Name a leaf that is no tensor, or was none, and is not what it was."""
        (side, argument, *rest), _ = pytree.tree_flatten_with_path(batch)[0][index]
        place = self._keywords.index(argument.key) + self._count if side.idx else argument.idx
        is_tensor = isinstance(given, torch.Tensor)
        found = f"a tensor of shape {tuple(given.shape)}" if is_tensor else repr(given)
        was = self.fixed[index]
        advice = "only tensors may change, compile again for another value"
        if isinstance(was, int | float):
            advice = "give what changes as a tensor, in example_inputs too, or compile again"
        raise InputMismatchError(
            f"batch argument {self._names[place]}{pytree.keystr(tuple(rest))} is {found}, but it "
            f"was {was!r} when the step was compiled; {advice}."
        )

    def _refuse_structure(self, batch: tuple[tuple[Any, ...], dict[str, Any]]) -> None:
        """Name the first argument whose structure is not the example's."""
        values = [*batch[0], *batch[1].values()]
        expected = [part for side in self.structure.children() for part in side.children()]
        for name, value, wanted in zip(self._names, values, expected, strict=True):
            found = pytree.tree_structure(value)
            if found != wanted:
                raise InputMismatchError(
                    f"batch argument {name} must be {_described(wanted)}, as in example_inputs; "
                    f"got {_described(found)}."
                )


def _in_order(value: Any, structure: pytree.TreeSpec) -> Any:
    """Give the mappings in a value the order of keys that those of the example had."""
    node = pytree.SUPPORTED_NODES.get(structure.type)
    if node is None or type(value) is not structure.type:
        return value
    if isinstance(value, collections.defaultdict):
        return value
    parts, context = node.flatten_fn(value)
    if isinstance(value, Mapping):
        if set(context) != set(structure.context):
            return value
        parts = [value[key] for key in structure.context]
    children = structure.children()
    if len(parts) != len(children):
        return value
    parts = [_in_order(part, child) for part, child in zip(parts, children, strict=True)]
    return node.unflatten_fn(parts, structure.context)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names) or "no arguments"


def _described(structure: pytree.TreeSpec) -> str:
    """Say what a value is, containers as Python writes them, ``*`` for a leaf."""
    if structure.is_leaf():
        return "a tensor or a plain value"
    text = str(pytree.tree_unflatten(["*"] * structure.num_leaves, structure)).replace("'*'", "*")
    shown = text if len(text) <= 80 else text[:77] + "..."
    return f"{getattr(structure.type, '__name__', structure.type)} {shown}"


def register_containers(tree: Any) -> None:
    """Register the classes of all dataclasses and mappings in a tree that pytrees do not know."""
    while True:
        unknown = {type(leaf) for leaf in pytree.tree_leaves(tree) if _is_container(leaf)}
        if not unknown:
            return
        for kind in sorted(unknown, key=_name):
            _register(kind)


def shapes_as_lists(shapes: Any, tree: Any) -> Any:
    """Write shapes the way torch.export wants them: lists in the place of registered containers.

    A dataclass may be described by an instance, by a mapping from names of fields, or by a list.
    """
    if shapes is None or isinstance(tree, torch.Tensor):
        return shapes
    if dataclasses.is_dataclass(tree):
        if isinstance(shapes, list | tuple):
            return shapes
        return [
            shapes_as_lists(_field(shapes, field.name), getattr(tree, field.name))
            for field in dataclasses.fields(tree)
        ]
    if isinstance(tree, Mapping) and isinstance(shapes, Mapping):
        by_key = {key: shapes_as_lists(shapes[key], tree.get(key)) for key in shapes}
        known = type(tree) in (dict, collections.OrderedDict, collections.defaultdict)
        return by_key if known else [by_key.get(key) for key in tree]
    if type(tree) in (list, tuple) and type(shapes) in (list, tuple) and len(tree) == len(shapes):
        return type(shapes)(shapes_as_lists(s, t) for s, t in zip(shapes, tree, strict=True))
    return shapes


def _field(shapes: Any, name: str) -> Any:
    return shapes.get(name) if isinstance(shapes, Mapping) else getattr(shapes, name, None)


def _is_container(leaf: Any) -> bool:
    return isinstance(leaf, Mapping) or (dataclasses.is_dataclass(leaf) and type(leaf) is not type)


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _register(kind: type[Any]) -> None:
    """Register all fields, those that are None too: a batch keeps its layout whatever it holds."""
    is_mapping = not dataclasses.is_dataclass(kind)

    def parts(value: Any) -> dict[str, Any]:
        if is_mapping:
            return {key: value[key] for key in value}
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(kind)}

    def with_keys(value: Any) -> tuple[list[Any], list[str]]:
        key_of: Any = pytree.MappingKey if is_mapping else pytree.GetAttrKey
        return [(key_of(name), part) for name, part in parts(value).items()], list(parts(value))

    def made(values: Any, names: Any) -> Any:
        named = dict(zip(names, values, strict=True))
        if is_mapping:
            return kind(named)
        # Without its constructor, which may want values of other kinds.
        value = object.__new__(kind)
        for name, part in named.items():
            object.__setattr__(value, name, part)
        return value

    pytree.register_pytree_node(
        kind,
        lambda value: (list(parts(value).values()), list(parts(value))),
        made,
        serialized_type_name=_name(kind),
        flatten_with_keys_fn=with_keys,
    )
