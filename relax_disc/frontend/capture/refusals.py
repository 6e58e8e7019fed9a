"""Refuse by name models that one compiled program on one device cannot train as PyTorch would."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator

import torch
from torch import nn

from relax_disc.errors import InputMismatchError, UnsupportedOperatorError
from relax_disc.frontend.capture.source_lines import parse_stack

_WRAPPERS = (
    ("torch.nn.parallel", "DistributedDataParallel", "the gradients' exchange between processes"),
    ("torch.nn.parallel", "DataParallel", "the copies on several devices"),
    ("torch.distributed.fsdp", "FullyShardedDataParallel", "parameters kept in shards"),
    ("torch.distributed.fsdp", "FSDPModule", "parameters kept in shards"),
    ("torch.distributed.pipelining", "PipelineStage", "the exchange between stages"),
)
_QUANTISED = ("torch.ao.nn.quantized", "torch.ao.nn.qat", "bitsandbytes.", "torchao.quantization")
_ADVICE = "remove them; a torch.autograd.Function in the model can change or note its gradient"
_TYPES = (torch.Tensor, nn.Parameter, nn.Buffer)


def refusal(name: str, why: str) -> UnsupportedOperatorError:
    """Make the error for a call that cannot be exported; names the model's line."""
    line = parse_stack("".join(traceback.format_stack()))
    return UnsupportedOperatorError(f"{line}: {name}: {why}.", ((name, str(line)),))


def refuse_sparse(tensor: torch.Tensor, where: str) -> None:
    """Refuse a sparse tensor; ``where``: a name or a line, and what reads it.

    Raises `UnsupportedOperatorError`: it is one.
    """
    if tensor.layout is not torch.strided:
        raise UnsupportedOperatorError(
            f"{where}: a tensor of layout {tensor.layout} cannot be compiled; give it dense, or "
            "add up by its places: "
            "torch.zeros(n, width).index_add(0, rows, values[:, None] * x[columns]).",
            ((str(tensor.layout), where),),
        )


def refuse_complex(dtype: torch.dtype, kind: str, name: str) -> None:
    """Refuse complex numbers that go into a step.

    Raises `UnsupportedOperatorError`: the type is of such.
    """
    if dtype.is_complex:
        raise UnsupportedOperatorError(
            f"The {kind} {name} is of type {dtype}; complex numbers may be computed in a step, but "
            "not go in: keep torch.view_as_real(...) of it there, and read it by "
            "torch.view_as_complex(...).",
            ((str(dtype), name),),
        )


def refuse_model(model: nn.Module, trained: bool, scaled: bool = False) -> None:
    """Look at a model before anything is traced; ``scaled``: with loss scaling.

    Raises `UnsupportedOperatorError`: the model is wrapped for several processes or devices, lies
    on several devices or on none, is quantised, has parameters in float16 or computes in it without
    loss scaling, or has hooks on its gradients.
    """
    if not isinstance(model, nn.Module):
        raise InputMismatchError(f"model must be a torch.nn.Module, got {model!r}.")
    for name, module in model.named_modules():
        where = name or "the model"
        _refuse_wrapper(module, where)
        if isinstance(module, torch.jit.ScriptModule):
            raise _refusal(
                module, where, "is compiled by torch.jit", "pass the module it was made of"
            )
        if type(module).__module__.startswith(_QUANTISED):
            raise _refusal(module, where, "is quantised", "train the model before it is quantised")
        if trained and (module._backward_hooks or module._backward_pre_hooks):
            raise _refusal(module, where, "calls backward hooks", _ADVICE)
    devices: dict[torch.device, str] = {}
    for name, tensor in _tensors(model):
        _refuse_tensor(name, tensor, trained)
        refuse_sparse(tensor, name)
        devices.setdefault(tensor.device, name)
    if len(devices) > 1:
        places = ", ".join(f"{name} on {device}" for device, name in devices.items())
        raise UnsupportedOperatorError(
            f"The model lies on several devices ({places}); one compiled step runs on one. Move it "
            "with .to(device).",
            (("several devices", "the model"),),
        )
    for device, name in devices.items():
        if device.type == "meta":
            raise UnsupportedOperatorError(
                f"{name} is on the meta device and has no values; load the model first.",
                (("meta device", name),),
            )
    if trained and not scaled:
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                refuse_autocast(torch.get_autocast_dtype(kind), "the caller of compile")


def refuse_autocast(dtype: torch.dtype, where: str) -> None:
    """Refuse a region in float16.

    Raises `UnsupportedOperatorError`: the type is float16.
    """
    if dtype == torch.float16:
        raise UnsupportedOperatorError(
            f"{where}: autocast to float16 needs loss scaling, or small gradients become 0: give "
            "relax_disc.compile an enabled scaler=torch.amp.GradScaler(device), or use "
            "torch.autocast with bfloat16.",
            (("autocast float16", where),),
        )


def _tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _refuse_wrapper(module: nn.Module, where: str) -> None:
    for home, name, what in _WRAPPERS:
        # A module that was never imported wraps nothing.
        wrapper = getattr(sys.modules.get(home), name, None)
        if wrapper is not None and isinstance(module, wrapper):
            advice = "compile the module inside it"
            raise _refusal(module, where, f"adds {what} ({name})", advice)


def _refuse_tensor(name: str, tensor: torch.Tensor, trained: bool) -> None:
    if type(tensor) not in _TYPES:
        raise UnsupportedOperatorError(
            f"{name} is a {type(tensor).__module__}.{type(tensor).__qualname__}, a tensor with "
            "rules of its own (quantised, sharded, or not made yet); only plain tensors can be "
            "compiled.",
            ((type(tensor).__qualname__, name),),
        )
    if tensor.is_quantized:
        raise UnsupportedOperatorError(
            f"{name} is quantised ({tensor.dtype}); train the model before it is quantised.",
            ((str(tensor.dtype), name),),
        )
    if trained and tensor.requires_grad:
        refuse_complex(tensor.dtype, "parameter", name)
    if trained and (tensor._backward_hooks or tensor._post_accumulate_grad_hooks):
        raise UnsupportedOperatorError(
            f"{name} has hooks on its gradient, which one compiled step does not call; {_ADVICE}.",
            (("register_hook", name),),
        )
    if trained and tensor.requires_grad and tensor.dtype == torch.float16:
        raise UnsupportedOperatorError(
            f"{name} is trained in float16: small gradients and updates become 0, and eager "
            "PyTorch's GradScaler says 'Attempting to unscale FP16 gradients.' Keep the parameters "
            "in float32 under torch.autocast with float16 and scaler=torch.amp.GradScaler(device), "
            "or use .to(torch.bfloat16).",
            (("float16", name),),
        )


def _refusal(module: nn.Module, where: str, what: str, advice: str) -> UnsupportedOperatorError:
    kind = type(module).__qualname__
    return UnsupportedOperatorError(
        f"{where} ({kind}) {what}, which one compiled step cannot do; {advice}.", ((kind, where),)
    )
