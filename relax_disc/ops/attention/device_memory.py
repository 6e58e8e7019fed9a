"""Bounds of what attention on CUDA takes from PyTorch's allocator while it runs.

They follow `vm_builtins/libraries/cuda_attention_kernels.py`, which chooses among three kernels,
and PyTorch 2.13's sources of these, all in ``aten/src/ATen/native/transformers/cuda``:

- flash forward, ``flash_attn/flash_api.cpp``, ``mha_fwd``: the result, the log of its sums, and
  where a launch is split along the keys (``set_params_splitkv``) the parts of both.  The split is
  the least with 85 % of the best share of busy multiprocessors, so seven rounds of them at most;
- flash backward, ``mha_bwd`` and ``mha_varlen_bwd``: ``dq_accum`` in float32, several where it must
  be deterministic, ``softmax_d``, and for grouped heads ``dk`` and ``dv`` of each head;
- efficient, ``attention.cu`` and ``attention_backward.cu``: the results, an accumulator of half
  precision, ``delta``, and `workspace_size` of ``mem_eff_attention/kernel_backward.h``, whose keys
  are not split where it must be deterministic;
- math: PyTorch's composite, some arrays as large as the scores.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from relax_disc.ops import registry

_HALF = ("float16", "bfloat16")
_ROWS = 128  # flash rounds lengths up to it, and the efficient kernels' blocks have no more
_FLASH_MOST_DIM = 256
_SPLIT_ROWS, _SPLIT_ROUNDS = 64, 7  # rows of a block of flash forward; rounds of multiprocessors
# Arrays of the composite, measured by the test of this module: as large as the scores, in float32
# or float64, and as the operands with a head of keys for each of the queries'.
_MATH_SCORES = {False: 3, True: 4}
_MATH_OPERANDS = {False: 2, True: 3}
SIGHTED = 1 << 16
"""Bit of a layout: no row is hidden wholly by numbers of the mask."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Extents of a call, numbers or expressions; widths are numbers.

    ``mask``: elements of the mask, its elements without the last axis, and of its first two axes;
    None without a mask. ``is_added``: whether it is of numbers that may hide all of a row.
    """

    batch: Any
    queries: Any
    keys: Any
    heads: Any
    key_heads: Any
    width: int
    value_width: int
    dtype: str
    is_causal: bool
    mask: tuple[Any, Any, Any] | None = None
    is_added: bool = False

    @property
    def _element(self) -> int:
        return registry.itemsize(self.dtype)

    @property
    def _wide(self) -> int:
        return max(4, self._element)

    @property
    def _query(self) -> Any:
        return self.batch * self.queries * self.heads * self.width

    @property
    def _out(self) -> Any:
        return self.batch * self.queries * self.heads * self.value_width

    @property
    def _widened(self) -> Any:
        """Keys and values with a head for each of the queries'."""
        return self.batch * self.keys * self.heads * (self.width + self.value_width)

    @property
    def _is_grouped(self) -> bool:
        return self.heads != self.key_heads

    def _statistics(self) -> Any:
        return self.batch * self.heads * (self.queries + _ROWS) * self._wide

    def bytes(self, is_backward: bool, units: int) -> Any:
        """Bound what the kernels take that may be chosen, on so many multiprocessors."""
        made = []
        takes_flash = (
            self.dtype in _HALF
            and self.mask is None
            and self.width == self.value_width
            and self.width <= _FLASH_MOST_DIM
            and self.width % 8 == 0
        )
        if takes_flash:
            made.append(self._flash(is_backward, units))
        if _is_efficient(self.width, self.value_width, self.dtype):
            made.append(self._efficient(is_backward))
            if self.is_added and is_backward:  # rows that numbers hide stand beside the others
                beside = replace(self, width=2 * self.width)
                copies = 2 * (beside._query + beside._widened) * self._element
                made = [beside._efficient(is_backward) + copies]
            elif self.is_added:
                made = [made[0] + self._query * self._element]
        else:
            made.append(self._math(is_backward))
        total = made[0] if len(made) == 1 else registry.largest(*made)
        return total + self._of_mask()

    def _flash(self, is_backward: bool, units: int) -> Any:
        width = -(-self.width // 32) * 32 if self.width <= 192 else _FLASH_MOST_DIM
        pairs = self.batch * self.heads
        if not is_backward:
            parts = _SPLIT_ROUNDS * units * _SPLIT_ROWS * (width + 1) * 4
            return self._out * self._element + 2 * self._statistics() + parts
        splits = (pairs + (units - 1)) // pairs
        accumulated = splits * pairs * (self.queries + _ROWS) * width * 4
        results = (self._query + self._widened) * self._element
        if self._is_grouped:
            results = results + self._widened * self._element
        return results + accumulated + 2 * self._statistics()

    def _efficient(self, is_backward: bool) -> Any:
        grouped = self._widened * self._element if self._is_grouped else 0
        accumulator = self._out * 4 if self.dtype in _HALF else 0
        if not is_backward:
            return self._out * self._element + grouped + accumulator + 2 * self._statistics()
        columns = self.width + self.value_width + 2 * _ROWS
        rows = (self.keys + _ROWS) * columns + (self.queries + _ROWS) * (self.width + _ROWS)
        scratch = self.batch * self.heads * rows * 4
        made = (self._query + 2 * self._out + self._widened) * self._element
        # Of delta PyTorch may make both factors in float32 first.
        return made + 2 * grouped + 2 * self._out * 4 + scratch + 4 * self._statistics()

    def _math(self, is_backward: bool) -> Any:
        scores = self.batch * self.heads * self.queries * self.keys
        operands = self._query + self._out + self._widened
        return (
            _MATH_SCORES[is_backward] * scores + _MATH_OPERANDS[is_backward] * operands
        ) * self._wide + 2 * self._statistics()

    def _of_mask(self) -> Any:
        """Bound the mask in the form that a kernel takes, and what rows see nothing."""
        if self.mask is None:
            return 0
        elements, rows, planes = self.mask
        seen = planes * self.queries * self.keys if self.is_causal else elements
        as_added = rows * (self.keys + 16) + elements
        if self.is_added:  # minus the greatest of a row
            as_added = as_added + 2 * seen + 2 * elements
        return as_added * self._element + 2 * elements + 2 * seen + self._out * self._element


def _is_efficient(width: int, value_width: int, dtype: str) -> bool:
    """Whether the efficient kernels take heads so wide; the composite does all others."""
    size = registry.itemsize(dtype)
    return dtype != "float64" and width * size % 16 == 0 and value_width * size % 16 == 0


def bound(prefix: str, is_backward: bool, is_masked: bool) -> registry.DeviceBytes:
    """Make the bound of one form of attention; ``prefix``: "packed_" or nothing."""
    query = 1 if is_backward else 0
    starts = (6 if is_backward else 3) if prefix else None

    def device_bytes(views: list[Any], numbers: list[int], units: int) -> Any:
        is_causal, layout = numbers[:2]
        sizes = [_extents(views[at], layout, at) for at in range(query, query + 3)]
        (batch, queries, heads, _), (_, keys, key_heads, _), _ = sizes
        width, _, value_width = (registry.number(each[3]) for each in sizes)
        mask, is_added = None, False
        if is_masked:
            # Behind the operands, of a gradient the log of the sums, and where packed rows lie.
            position = (6 if is_backward else 3) + (4 if prefix else 0)
            shape = views[position].shape
            is_added = views[position].dtype != "bool" and not layout & SIGHTED
            mask = (
                registry.elements(shape),
                registry.elements(shape[:3]),
                registry.elements(shape[:2]),
            )
        dtype = views[query].dtype

        def of(batch: Any, queries: Any, keys: Any) -> Any:
            return Sizes(
                batch, queries, keys, heads, key_heads, width, value_width, dtype,
                bool(is_causal), mask, is_added,
            ).bytes(is_backward, units)  # fmt: skip

        if starts is None:
            return of(batch, queries, keys) + registry.SMALL_BYTES
        count = views[starts].shape[0] - 1
        rows = heads * (3 * width + 3 * value_width) * registry.itemsize(dtype)
        cleared = 2 * (queries + keys) * rows + 64 * (queries + keys)
        if is_masked or not _is_efficient(width, value_width, dtype):
            # In the padded batch, to which everything is spread.
            longest, key_longest = numbers[2:4]
            spread = (count + 1) * (longest + key_longest) * rows
            return of(count, longest, key_longest) + spread + cleared + registry.SMALL_BYTES
        # Flash leaves room for 128 rows of each sequence in what it accumulates.
        found = of(1, queries + _ROWS * count, keys + _ROWS * count)
        return found + cleared + registry.SMALL_BYTES

    return device_bytes


def _extents(view: Any, layout: int, at: int) -> tuple[Any, Any, Any, Any]:
    """Batch, length, heads and width of a tensor; see `vm_builtins/libraries/install.py`."""
    first, second, third, width = view.shape
    if layout >> 8 + at & 1:
        return second, first, third, width
    return (first, second, third, width) if layout >> at & 1 else (first, third, second, width)
