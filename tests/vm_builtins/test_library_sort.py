"""Sorting, native and numpy and torch, against PyTorch's stable sort."""

import numpy as np
import pytest
import torch
import tvm_ffi

from relax_disc.vm_builtins.libraries import cuda_library, library_kernels

IS_NATIVE = library_kernels.install()
LIBRARIES = ["native", "twin", "torch"] if IS_NATIVE else ["twin", "torch"]
NAME = "relax_disc.cpu.sort"


def call(library, *arguments):
    if library == "torch":
        function = cuda_library.FUNCTIONS["sort"]
    elif library == "native":
        function = tvm_ffi.get_global_func(NAME)
    else:
        function = library_kernels.TWINS[NAME]
    function(*(tvm_ffi.from_dlpack(x) if isinstance(x, np.ndarray) else x for x in arguments))


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
        call(library, x, descending, values, places)
        wanted = torch.sort(torch.tensor(x), dim=-1, descending=bool(descending), stable=True)
        assert np.array_equal(places, wanted[1][..., :count].numpy())
        np.testing.assert_array_equal(values, wanted[0][..., :count].numpy())
