"""Call torch.export, and tell in the words of this package why it refuses a model."""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch._dynamo.exc import UserError, UserErrorType
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)
from torch.export import ExportedProgram
from torch.fx.experimental import _config as symbolic_config
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from relax_disc.errors import (
    InputMismatchError,
    RelaxDiscError,
    ShapeRangeError,
    UnsupportedOperatorError,
)
from relax_disc.frontend.capture.exported.torch_errors import (
    contradiction,
    data_dependent,
    first_part,
    is_of_torch,
    traceback_text,
    translated,
    untraceable,
)
from relax_disc.frontend.capture.loops.recorded import LoopRefusal, RecordedLoops, recorded_loops
from relax_disc.frontend.capture.replaced.chances import noted_chances
from relax_disc.frontend.capture.replaced.data_places import copies_unwritten
from relax_disc.frontend.capture.replaced.export_mode import ExportMode
from relax_disc.frontend.capture.replaced.model_patches import (
    cumulative_averages,
    extremes_of_tensors,
    hooks_as_before,
    inlined_checkpoints,
    masks_unread,
    modules_unconverted,
    own_attributes,
)
from relax_disc.frontend.capture.replaced.packed_sequences import packed_batches
from relax_disc.frontend.capture.sizes.branches import SizeBranches, layouts_by_stride
from relax_disc.frontend.capture.sizes.stand_ins import stand_ins
from relax_disc.frontend.capture.source_lines import SourceLine, parse_stack
from relax_disc.frontend.capture.state.randomness import no_foreign_randomness


def call_export(
    wrapped: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    dynamic_shapes: Any,
    lines: Sequence[SourceLine],
    branches: SizeBranches,
    loops: RecordedLoops,
) -> ExportedProgram:
    """Export; where torch cannot prove what it relies on, once more with assertions to check."""

    def attempt(deferred: bool) -> ExportedProgram:
        # nn.LSTM and its like keep their weights in a list beside the parameters.
        warnings.filterwarnings("ignore", message="The tensor attributes .* were assigned")
        with (
            own_attributes(wrapped),  # each time: what is read is compared with what is there later
            copies_unwritten(),
            noted_chances() as chances,
            ExportMode(branches.squeezes, chances),
            recorded_loops(loops),
            stand_ins(),
            no_foreign_randomness(wrapped.outer.moving),
            hooks_as_before(wrapped),
            modules_unconverted(),
        ):
            return torch.export.export(
                wrapped,
                args,
                kwargs,
                dynamic_shapes=dynamic_shapes,
                strict=False,
                prefer_deferred_runtime_asserts_over_guards=deferred,
            )

    try:
        with (
            warnings.catch_warnings(),
            inlined_checkpoints(),
            masks_unread(),
            cumulative_averages(),
            extremes_of_tensors(),
            packed_batches(),
            layouts_by_stride(),
        ):
            for deferred in () if branches.ones_are_general else (False, True):
                try:
                    return attempt(deferred)
                except UserError as error:
                    is_of_sizes = error.error_type is UserErrorType.CONSTRAINT_VIOLATION
                    if not is_of_sizes or branches.ways.are_unseen:
                        raise
                except AssertionError as error:  # while torch words what it asks of the dims
                    if not is_of_torch(error):
                        raise
            # Sizes such as ``length - 1`` may be 1 without being treated apart, as dims may.
            branches.ones_are_general = True
            with symbolic_config.patch(backed_size_oblivious=True):
                return attempt(deferred=True)
    except (
        GuardOnDataDependentSymNode,
        DataDependentOutputException,
        DynamicOutputShapeException,
    ) as error:
        raise data_dependent(error) from error
    except UnsupportedOperatorException as error:
        raise untraceable(error) from error
    except UserError as error:
        raise translated(error, lines, list(branches.numbers.items())) from error
    except (RelaxDiscError, LoopRefusal):
        raise
    except (RuntimeError, AttributeError) as error:
        if isinstance(error, AttributeError) and not is_of_torch(error):
            raise  # the model's own
        line = parse_stack(traceback_text(error))
        reason = first_part(error)
        outside = re.match(r"(\d+) not in range \[(\d+), (\d+)\]", reason)
        if outside:
            raise ShapeRangeError(
                "example_inputs have an axis of {} positions, outside its declared range of {} to "
                "{}.".format(*outside.groups())
            ) from error
        if ".numpy() is not supported" in reason:
            reason = (
                "it reads the values of a tensor with NumPy, which one compiled program cannot "
                "follow; compute that in your loop, and give it as a tensor of the batch"
            )
        if "Batching rule not implemented for relax_disc::inner_gradient" in reason:
            reason = (
                "gradients of each sample (torch.func.grad inside vmap) are not compiled; take the "
                "gradient of a sum by torch.autograd.grad, or compute them beside the step, on the "
                "model itself"
            )
        raise UnsupportedOperatorError(
            f"{line}: PyTorch cannot trace the model: {reason}",
            (("what torch.export cannot trace", str(line)),),
        ) from error
    except TypeError as error:
        line = parse_stack(traceback_text(error))
        if "unhashable type: non-nested SymInt" in str(error):
            raise UnsupportedOperatorError(
                f"{line}: a size that differs between batches is the key of a dict or a member of "
                "a set; compute what is kept there each time, or keep it for the greatest size and "
                "slice that.",
                (("a size as a key", str(line)),),
            ) from error
        if not re.search(r"\bSym(Int|Float|Bool)\b", str(error)):
            raise  # the model's own
        raise UnsupportedOperatorError(
            f"{line}: a number or a condition made of sizes that differ between batches goes where "
            f"only plain ones can ({first_part(error)}); compute it with tensors, or choose by an "
            "if.",
            (("a number made of sizes", str(line)),),
        ) from error
    except ValueError as error:
        trace = traceback_text(error)
        if re.search(r"\bs\d+\b", str(error)):  # PyTorch asks for a number, and got a symbol
            line = parse_stack(trace)
            raise UnsupportedOperatorError(
                f"{line}: PyTorch cannot trace the model with symbolic sizes: {first_part(error)}",
                (("what torch.export cannot trace", str(line)),),
            ) from error
        if isinstance(error, fx.proxy.TraceError) and branches.numbers:
            line = next(iter(branches.numbers.values()))
            raise UnsupportedOperatorError(
                f"{line}: a Python number is made of sizes that differ between batches; compute it "
                "with tensors or with torch.sym_int, torch.sym_float and torch.sym_sqrt.",
                (("a number made of sizes", str(line)),),
            ) from error
        if ", in make_fake_inputs" not in trace:  # the model's own
            raise
        raise InputMismatchError(f"example_inputs cannot be exported: {error}") from error
    except AssertionError as error:
        # torch's own, made while it words what the model asks of the dims; the model's stay.
        if not is_of_torch(error):
            raise
        if "requires_grad" in str(error):
            raise UnsupportedOperatorError(
                "The model or loss_fn writes a value that has a gradient into a tensor that lies "
                "outside of it, such as an attribute: write its detach(), or assign a new tensor.",
                (("a write that has a gradient", ""),),
            ) from error
        reason = (
            f"it branches on a size in a way that torch.export cannot put into words ({error}), "
            "such as `if length % 5`; pad or cut outside the model"
        )
        raise contradiction(reason, lines) from error
