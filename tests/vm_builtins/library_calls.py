"""Library functions by name, on numpy arrays: the C++ ones, and those for CUDA.

The functions for CUDA run on any device of PyTorch, so that they are tested without a GPU.
"""

import numpy as np
import tvm_ffi

from relax_disc.vm_builtins.libraries import cuda_library
from relax_disc.vm_builtins.libraries.install import install

install("llvm")
LIBRARIES = ["native", "torch"]


def call(library, name, *arguments):
    if library == "torch":
        function = cuda_library.FUNCTIONS[name]
    else:
        function = tvm_ffi.get_global_func(f"relax_disc.cpu.{name}")
    function(*(tvm_ffi.from_dlpack(x) if isinstance(x, np.ndarray) else x for x in arguments))
