"""Make the containers of a batch known to PyTorch's pytrees: dataclasses, and mappings like dict.

torch.export takes a container that it does not know for one opaque value.  Registration lasts as
long as the process and has no effect on the class itself.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch.utils import _pytree as pytree


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
