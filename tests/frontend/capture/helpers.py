"""Functions in a file of their own, without PyTorch in it, that models of tests call."""

import functools
import math


def weighed(x):
    """Divide by the number of rows."""
    return x / len(x)


def doubled(function):
    """Call a function and double what it returns."""

    @functools.wraps(function)
    def call(*args):
        return 2 * function(*args)

    return call


@doubled
def half_of(size):
    """Round half of a size up."""
    return math.ceil(size / 2)


class Scale:
    """Takes a root by its method; another method would do something else."""

    def __init__(self, factor):
        self.factor = factor

    def of(self, size):
        """Scale the root of a size."""
        return self.factor * math.sqrt(size)
