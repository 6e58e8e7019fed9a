"""Builds and runs a captured step beside PyTorch, without any other part of the package."""

import copy
import warnings

import numpy as np
import torch
import tvm
from tvm import relax

from relax_disc.frontend import programs_of
from relax_disc.frontend.optimizer.numbers import plain_settings
from tests.frontend.plain_ops import plain_ops


def to_tvm(tensor):
    return tvm.runtime.from_dlpack(tensor.detach().contiguous().clone())


class Runner:
    """One executable of a captured step, run on copies of the model's and optimizer's tensors."""

    def __init__(self, captured):
        self.captured = captured
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            module = plain_ops(captured.module)
            # The code runs for milliseconds; LLVM need not optimise it for seconds.
            target = tvm.target.Target({"kind": "llvm", "opt-level": 0})
            self.executable = relax.build(module, target)
        self.vm = relax.VirtualMachine(self.executable, tvm.cpu())

    def __call__(self, model, optimizer, args=(), kwargs=None, rng=(0, 0)):
        """Return the outputs by kind: a list of (name, tensor) for each kind."""
        captured = self.captured
        leaves = captured.batch.flatten(tuple(args), kwargs or {})
        named = dict(model.named_parameters(remove_duplicate=False))
        named.update(model.named_buffers())
        sizes = self.sizes(leaves)
        values = []
        for spec in captured.inputs:
            if spec.kind == "shape":
                value = tvm.runtime.ShapeTuple([sizes[n] for n in spec.shape])
            elif spec.kind == "batch":
                value = to_tvm(leaves[spec.target])
            elif spec.kind == "rng":
                value = tvm.runtime.tensor(np.asarray(rng, "int64"))
            elif spec.kind == "constant":
                value = to_tvm(captured.outer.inputs[spec.target].tensor)
            elif spec.kind == "hyper":
                value = tvm.runtime.tensor(self.hyper(spec, optimizer, named))
            elif spec.kind == "adding":
                value = tvm.runtime.tensor(np.asarray([0], spec.dtype))
            elif spec.kind == "gradient":
                value = to_tvm(named[spec.target].grad)
            elif spec.kind == "state":
                state = optimizer.state[named[spec.target]].get(spec.state_key)
                zero = torch.zeros_like(named[spec.target])
                value = to_tvm(zero if state is None else state)
            else:
                value = to_tvm(named[spec.target])
            values.append(value)
        found = {}
        for spec, out in zip(captured.outputs, self.vm[captured.function](*values), strict=True):
            found.setdefault(spec.kind, []).append((spec.name, torch.from_dlpack(out).clone()))
        return found

    def hyper(self, spec, optimizer, named):
        group = self.captured.update_groups[spec.group]
        settings = optimizer.param_groups[group.param_group]
        parameter = named[spec.target]
        program = programs_of(optimizer).of(settings, parameter)
        state = optimizer.state.get(parameter, {})
        scalars = program.scalars_now(state, settings)
        values, _, _ = program.host(plain_settings(settings), scalars, program.is_fresh(state))
        return np.asarray([*values, 0], spec.dtype)

    def sizes(self, leaves):
        """Solve `k` from an extent such as `8*k`; only products are met in tests."""
        found = {}
        for spec in self.captured.inputs:
            if spec.kind == "batch":
                for extent, text in zip(leaves[spec.target].shape, spec.shape, strict=True):
                    if isinstance(text, str) and "*" in text:
                        name, factor = sorted(text.replace(" ", "").split("*"))[::-1]
                        found[name] = extent // int(factor)
        return found


def eager(model, args, dtype, loss_fn=None, kwargs=None):
    """Return loss and gradients by name of a copy of the model in another type."""
    model = copy.deepcopy(model).to(dtype)

    def convert(x):
        return x.to(dtype) if isinstance(x, torch.Tensor) and x.is_floating_point() else x

    args = torch.utils._pytree.tree_map(convert, tuple(args))
    kwargs = torch.utils._pytree.tree_map(convert, kwargs or {})
    out = loss_fn(model, *args, **kwargs) if loss_fn else model(*args, **kwargs)
    loss = out if isinstance(out, torch.Tensor) else getattr(out, "loss", None)
    loss = out[0] if loss is None else loss
    loss.backward()
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return loss.item(), grads


def relative(a, b):
    """Relative error in norm over all tensors together."""
    top = sum(float(((a[n].double() - b[n].double()) ** 2).sum()) for n in b)
    below = sum(float((b[n].double() ** 2).sum()) for n in b)
    return (top / max(below, 1e-300)) ** 0.5


def check_gradients(captured, model, batches, loss_fn=None, least=5e-7):
    """Compare loss and gradients with float64 PyTorch for every batch, from one build.

    Gradients may be off twice as far as PyTorch's own in float32, `least` in any case.
    """
    run = Runner(captured)
    for args in batches:
        args, kwargs = (args, {}) if isinstance(args, tuple) else ((), args)
        found = run(model, None, args, kwargs)
        loss64, grads64 = eager(model, args, torch.float64, loss_fn, kwargs)
        _, grads32 = eager(model, args, torch.float32, loss_fn, kwargs)
        loss = found["loss"][0][1].item()
        assert abs(loss - loss64) <= 2e-6 * max(1.0, abs(loss64)), (loss, loss64)
        ours = dict(found["gradient"])
        assert set(ours) == set(grads64)
        theirs = relative(grads32, grads64)
        assert relative(ours, grads64) <= max(2 * theirs, least), (relative(ours, grads64), theirs)
    return run
