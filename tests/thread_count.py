"""Run something on another number of threads."""

from contextlib import contextmanager

import torch


@contextmanager
def threads(count):
    """Give PyTorch's pool, which is also ours, so many threads inside."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
