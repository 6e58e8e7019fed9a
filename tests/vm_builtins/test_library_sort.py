"""Sorting, in C++ and for CUDA, against PyTorch's stable sort."""

import numpy as np
import pytest
import torch

from tests.vm_builtins.library_calls import LIBRARIES, call


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("dtype", ["float32", "float64", "int32", "int64"])
@pytest.mark.parametrize("descending", [0, 1])
def test_equals_pytorch(library, dtype, descending):
    rng = np.random.default_rng(3)
    for shape, count in [((1, 1), 1), ((4, 3, 17), 17), ((2, 300), 5), ((40, 257), 257)]:
        x = rng.integers(-9, 9, shape).astype(dtype)  # with many equal elements
        if dtype.startswith("float"):
            x.flat[:: x.shape[-1] // 2 + 1] = np.nan
        values = np.empty((*shape[:-1], count), dtype)
        places = np.empty(values.shape, "int64")
        call(library, "sort", x, descending, values, places)
        wanted = torch.sort(torch.tensor(x), dim=-1, descending=bool(descending), stable=True)
        assert np.array_equal(places, wanted[1][..., :count].numpy())
        np.testing.assert_array_equal(values, wanted[0][..., :count].numpy())
