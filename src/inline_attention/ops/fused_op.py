"""From a pair of fused kernels to a backend: custom ops, their fakes, and derivatives of any order.

A kernel library supplies two plain functions, `Forward` and `Backward`. `register` makes custom ops of them, so that
compilers, dispatch modes and tensor subclasses see one node. A plain eager call (`run_plain`) reaches the functions
without the dispatcher, because a custom op's wrappers cost more host time than the launches inside.

Backward needs the inputs and the state. A compiled graph saves the state only if it is small beside the inputs. A plain
call always saves it: an extra launch costs more than the memory is worth. Second derivatives go through `composed`.

Shapes: `B` batch, `N` queries, `M` keys, `H` heads, `D` head dim of queries and keys, `Dv` head dim of values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, TypeAlias, cast

import torch
from torch import Tensor
from torch.autograd import forward_ad

from inline_attention.ops import composed
from inline_attention.ops.call import AttentionCall, Normalization
from inline_attention.ops.tracing import is_exporting, is_plain_execution


class Problem(NamedTuple):
    """The arguments of a kernel that are not tensors. The grid is 0 × 0 without a local term."""

    scale: float
    feature_map: str
    normalization: Normalization
    grid_height: int
    grid_width: int
    num_prefix_tokens: int

    @property
    def grid_size(self) -> tuple[int, int]:
        """(height, width)."""
        return self.grid_height, self.grid_width


# (q, k, v, key_padding_mask, local_weight, problem, keep_state, overwrite_q) to (out, state). `out` is `[B, N, H, Dv]`,
# contiguous, in the dtype of v; with overwrite_q it may take the memory of q. `state` is a vector, see `split_state`;
# it may be None without keep_state. The last dimension of q, k and v has unit stride.
Forward: TypeAlias = Callable[
    [Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Problem, bool, bool],
    tuple[Tensor, Tensor | None],
]
# (grad_out, q, k, v, key_padding_mask, local_weight, state, problem, grad_q, grad_k, grad_v) to the gradient of
# local_weight, or None without one. Fills grad_q, grad_k and grad_v, which are uninitialized and may be views of one
# packed gradient. The last dimension of every token tensor has unit stride. If the state is None, the function computes
# it again; only backends with `can_make_state_again` get None.
Backward: TypeAlias = Callable[..., Tensor | None]

# The largest part of the inputs' memory that a state may take and still be saved by a compiled graph.
LARGEST_SAVED_STATE = 0.05

_NAMESPACE = "inline_attention"
_LIBRARY = torch.library.Library(_NAMESPACE, "FRAGMENT")
_OPTIONAL_SCHEMA = "Tensor? key_padding_mask, Tensor? local_weight"
_PROBLEM_SCHEMA = (
    "float scale, str feature_map, str normalization, SymInt grid_height, SymInt grid_width, SymInt num_prefix_tokens"
)


def empty_state(q: Tensor, v: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """An uninitialized state for queries `[B, N, H, D]` and values `[B, M, H, Dv]`."""
    return torch.empty(_state_size(q, v), dtype=dtype, device=q.device)


def split_state(state: Tensor, q: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """scale · Cov(phi(k), v) `[B, H, D, Dv]`, the means of phi(k) `[B, H, D]` and of v `[B, H, Dv]`, as views."""
    (B, _, H, D), Dv = q.shape, v.shape[3]
    covariance, key_mean, value_mean = torch.split(state, [B * H * D * Dv, B * H * D, B * H * Dv])
    return covariance.view(B, H, D, Dv), key_mean.view(B, H, D), value_mean.view(B, H, Dv)


def _state_size(q: Tensor, v: Tensor, batch: int | None = None) -> int:
    (B, _, H, D), Dv = q.shape, v.shape[3]
    return (B if batch is None else batch) * H * (D * Dv + D + Dv)


class Kernels(NamedTuple):
    """The two functions of one backend; `can_make_state_again` if the second accepts None for the state."""

    forward: Forward
    backward: Backward
    can_make_state_again: bool

    def should_save_state(self, tensors: Sequence[Tensor]) -> bool:
        """True if a compiled graph saves the state of these inputs. Does not depend on the batch size."""
        if not self.can_make_state_again:
            return True
        q, k, v = _separate(tensors)
        inputs = sum(tensor.shape[1] * tensor.shape[2] * tensor.shape[3] for tensor in (q, k, v)) * q.element_size()
        return 4 * _state_size(q, v, batch=1) <= LARGEST_SAVED_STATE * inputs


_HERE = nullcontext()


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context in which kernels are launched on the device, at no cost where it is the current one."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return _HERE
    return torch.cuda.device(device)


def transform_reason() -> str | None:
    """Return why no fused kernel can run under the active transform, or None."""
    if is_exporting() or torch.jit.is_tracing():  # pyright: ignore[reportPrivateImportUsage]
        return "exported and recorded graphs consist of PyTorch's own operations"
    if (
        torch._C._are_functorch_transforms_active()  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
        or forward_ad._current_level >= 0  # pyright: ignore[reportPrivateUsage, reportUnknownMemberType]
    ):
        return "has no batching rule and no forward-mode derivative, which the active torch.func transform needs"
    return None


def register(
    name: str, forward: Forward, backward: Backward, *, largest_head_dim: int, can_make_state_again: bool
) -> Callable[[AttentionCall], Tensor]:
    """Define the ops `inline_attention::{name}[_packed]_{forward,backward,inference}`; return a function for calls.

    A callable feature map may widen heads beyond `largest_head_dim` of the kernels. Such calls are composed from
    PyTorch operations.
    """
    kernels = Kernels(forward, backward, can_make_state_again)
    separate_form, packed_form = (name, kernels, ("q", "k", "v")), (f"{name}_packed", kernels, ("qkv",))
    training_op, packed_training_op = _define_ops(*separate_form), _define_ops(*packed_form)
    inference_op, packed_inference_op = _define_inference_op(*separate_form), _define_inference_op(*packed_form)

    def run(call: AttentionCall) -> Tensor:
        if not isinstance(call.feature_map, str):
            return run_mapped(call)
        mask, local_weight, is_packed = call.key_padding_mask, call.local_weight, call.qkv is not None
        tensors = (call.q, call.k, call.v) if call.qkv is None else (call.qkv,)
        if is_plain_execution(*tensors):
            return run_plain(kernels, call)
        # A compiler, a dispatch mode or a tensor subclass must see one operation.
        problem = _problem(call)
        if torch.is_grad_enabled() and _any_requires_grad(tensors, local_weight):
            op = packed_training_op if is_packed else training_op
            return op(*tensors, mask, local_weight, *problem)[0]
        op = packed_inference_op if is_packed else inference_op
        return op(*tensors, mask, local_weight, *problem)

    def run_mapped(call: AttentionCall) -> Tensor:
        mapped = composed.mapped(call, torch.float32)  # values too: the kernels take one dtype
        out = run(mapped) if mapped.q.shape[3] <= largest_head_dim else composed.attend(mapped)
        return out.to(call.v.dtype)

    return run


def run_plain(kernels: Kernels, call: AttentionCall) -> Tensor:
    """Run kernels on plain eager tensors."""
    mask, local_weight, problem = call.key_padding_mask, call.local_weight, _problem(call)
    tensors = (call.q, call.k, call.v) if call.qkv is None else (call.qkv,)
    if torch.is_grad_enabled() and _any_requires_grad(tensors, local_weight):
        return cast(Tensor, _FusedAttention.apply(kernels, problem, mask, local_weight, *tensors))
    separate = (call.q, call.k, call.v)
    return _forward(kernels, separate, mask, local_weight, problem, overwrite_q=call.overwrite_q)[0]


def _problem(call: AttentionCall) -> Problem:
    height, width = (0, 0) if call.local_weight is None or call.grid_size is None else call.grid_size
    feature_map = cast(str, call.feature_map)
    return Problem(float(call.scale), feature_map, call.normalization, height, width, call.num_prefix_tokens)


def _any_requires_grad(tensors: Sequence[Tensor], local_weight: Tensor | None) -> bool:
    for tensor in tensors:  # not `any`, whose generator takes longer than the question
        if tensor.requires_grad:
            return True
    return local_weight is not None and local_weight.requires_grad


def _forward(
    kernels: Kernels,
    tensors: Sequence[Tensor],
    key_padding_mask: Tensor | None,
    local_weight: Tensor | None,
    problem: Problem,
    *,
    keep_state: bool = False,
    overwrite_q: bool = False,
) -> tuple[Tensor, Tensor | None]:
    if tensors[0].shape[0] == 0:
        return _empty_results(tensors)
    q, k, v = _separate([_with_unit_stride(tensor) for tensor in tensors])
    with on_device(q.device):
        return kernels.forward(q, k, v, key_padding_mask, local_weight, problem, keep_state, overwrite_q)


def _backward(
    kernels: Kernels,
    grad_out: Tensor,
    tensors: Sequence[Tensor],
    key_padding_mask: Tensor | None,
    local_weight: Tensor | None,
    state: Tensor | None,
    problem: Problem,
) -> tuple[list[Tensor], Tensor | None]:
    """Gradients of `tensors`, contiguous, and of `local_weight`."""
    grads = [torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device) for tensor in tensors]
    if tensors[0].shape[0] == 0:
        return grads, None if local_weight is None else torch.empty_like(local_weight)
    q, k, v = _separate([_with_unit_stride(tensor) for tensor in tensors])
    with on_device(q.device):
        grad_local_weight = kernels.backward(
            _with_unit_stride(grad_out), q, k, v, key_padding_mask, local_weight, state, problem, *_separate(grads)
        )
    return grads, grad_local_weight


class _FusedAttention(torch.autograd.Function):
    """The kernels on plain eager tensors."""

    @staticmethod
    def forward(ctx: Any, kernels: Kernels, problem: Problem, mask: Any, local_weight: Any, *tensors: Tensor) -> Tensor:
        out, state = _forward(kernels, tensors, mask, local_weight, problem, keep_state=True)
        ctx.save_for_backward(mask, local_weight, state, *tensors)
        ctx.kernels, ctx.problem = kernels, problem
        return out

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        mask, local_weight, state, *tensors = ctx.saved_tensors
        if torch.is_grad_enabled():
            grads = _differentiable_backward(grad_outputs[0], tensors, mask, local_weight, ctx.problem)
            return None, None, None, *grads
        grads, grad_local = _backward(ctx.kernels, grad_outputs[0], tensors, mask, local_weight, state, ctx.problem)
        return None, None, None, grad_local, *grads


def _differentiable_backward(
    grad_out: Tensor, tensors: Sequence[Tensor], mask: Tensor | None, local_weight: Tensor | None, problem: Problem
) -> list[Tensor | None]:
    """Gradients of local_weight and of `tensors` as differentiable functions, for `create_graph=True`."""
    # Views, so that a tensor passed twice (q is k) counts as two inputs.
    views = [None if tensor is None else tensor.view_as(tensor) for tensor in (local_weight, *tensors)]
    q, k, v = _separate(cast(Sequence[Tensor], views[1:]))
    call = AttentionCall(
        q, k, v, None, problem.scale, problem.feature_map, problem.normalization,
        mask, views[0], problem.grid_size, problem.num_prefix_tokens,
    )  # fmt: skip
    out = composed.attend(composed.mapped(call, torch.promote_types(v.dtype, torch.float32))).to(v.dtype)
    wanted = [view for view in views if view is not None and view.requires_grad]
    grads = iter(torch.autograd.grad(out, wanted, grad_out, create_graph=True))
    return [next(grads) if view is not None and view.requires_grad else None for view in views]


def _define_ops(name: str, kernels: Kernels, tensor_names: tuple[str, ...]) -> Callable[..., Any]:
    """Define `{name}_forward` and `{name}_backward` on the named tensors; return the differentiable forward op.

    A custom op cannot return None: a state that is not saved, or the gradient of no local weight, is an empty tensor.
    """
    count = len(tensor_names)
    inputs = ", ".join(f"Tensor {name}" for name in tensor_names)

    def forward(*arguments: Any) -> tuple[Tensor, ...]:
        tensors, (mask, local_weight, *problem) = arguments[:count], arguments[count:]
        saves = kernels.should_save_state(tensors)
        out, state = _forward(kernels, tensors, mask, local_weight, Problem(*problem), keep_state=saves)
        return out, state if saves and state is not None else out.new_empty(0, dtype=torch.float32)

    def fake_forward(*arguments: Any) -> tuple[Tensor, ...]:
        tensors = arguments[:count]
        out, state = _empty_results(tensors)
        return out, state if kernels.should_save_state(tensors) else out.new_empty(0, dtype=torch.float32)

    def backward(grad_out: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
        tensors, (mask, local_weight, *rest) = arguments[:count], arguments[count:]
        state = rest[0] if kernels.should_save_state(tensors) else None
        grads, grad_local = _backward(kernels, grad_out, tensors, mask, local_weight, state, Problem(*rest[1:]))
        return *grads, grad_out.new_empty(0) if grad_local is None else grad_local

    def fake_backward(grad_out: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
        tensors, local_weight = arguments[:count], arguments[count + 1]
        grads = [tensor.new_empty(tensor.shape) for tensor in tensors]
        grad_local = grad_out.new_empty(0) if local_weight is None else local_weight.new_empty(local_weight.shape)
        return *grads, grad_local

    forward_op = torch.library.custom_op(
        f"{_NAMESPACE}::{name}_forward",
        forward,
        mutates_args=(),
        schema=f"({inputs}, {_OPTIONAL_SCHEMA}, {_PROBLEM_SCHEMA}) -> (Tensor, Tensor)",
    )
    backward_op = torch.library.custom_op(
        f"{_NAMESPACE}::{name}_backward",
        backward,
        mutates_args=(),
        schema=f"(Tensor grad_out, {inputs}, {_OPTIONAL_SCHEMA}, Tensor state, {_PROBLEM_SCHEMA}) -> "
        f"({', '.join(['Tensor'] * (count + 1))})",
    )
    forward_op.register_fake(fake_forward)  # pyright: ignore[reportUnknownMemberType]
    backward_op.register_fake(fake_backward)  # pyright: ignore[reportUnknownMemberType]

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        tensors, (mask, local_weight, *problem) = inputs[:count], inputs[count:]
        state = output[1]
        ctx.mark_non_differentiable(state)
        ctx.save_for_backward(mask, local_weight, state, *tensors)
        ctx.problem = Problem(*problem)

    def derivative(ctx: Any, grad_out: Tensor, *_: Any) -> tuple[Any, ...]:
        mask, local_weight, state, *tensors = ctx.saved_tensors
        if torch.is_grad_enabled():
            grad_local, *grads = _differentiable_backward(grad_out, tensors, mask, local_weight, ctx.problem)
        else:
            *grads, grad_local = backward_op(grad_out, *tensors, mask, local_weight, state, *ctx.problem)
        return *grads, None, None if local_weight is None else grad_local, *([None] * len(Problem._fields))

    forward_op.register_autograd(derivative, setup_context=setup_context)  # pyright: ignore[reportUnknownMemberType]
    return getattr(getattr(torch.ops, _NAMESPACE), f"{name}_forward").default


def _define_inference_op(name: str, kernels: Kernels, tensor_names: tuple[str, ...]) -> Callable[..., Tensor]:
    """Define `{name}_inference`, which returns the output alone and has no derivative.

    Not a `custom_op`: that wraps every call for autograd and dynamo, in Python, which takes as long as all the rest.
    """
    count = len(tensor_names)
    inputs = ", ".join(f"Tensor {name}" for name in tensor_names)

    def infer(*arguments: Any) -> Tensor:
        tensors, (mask, local_weight, *problem) = arguments[:count], arguments[count:]
        return _forward(kernels, tensors, mask, local_weight, Problem(*problem))[0]

    def fake_infer(*arguments: Any) -> Tensor:
        return _empty_results(arguments[:count])[0]

    schema = f"{name}_inference({inputs}, {_OPTIONAL_SCHEMA}, {_PROBLEM_SCHEMA}) -> Tensor"
    _LIBRARY.define(schema)  # pyright: ignore[reportUnknownMemberType]
    _LIBRARY.impl(f"{name}_inference", infer, "CompositeExplicitAutograd")  # pyright: ignore[reportUnknownMemberType]
    torch.library.register_fake(f"{_NAMESPACE}::{name}_inference", fake_infer, lib=_LIBRARY)  # pyright: ignore[reportUnknownMemberType]
    return getattr(getattr(torch.ops, _NAMESPACE), f"{name}_inference").default


def _empty_results(tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return uninitialized output and state, with the shapes and dtypes of the forward op's results."""
    q, _, v = _separate(tensors)
    state = q.new_empty(_state_size(q, v), dtype=torch.float32)
    return v.new_empty(*q.shape[:3], v.shape[3]), state


def _with_unit_stride(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _separate(tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """(q, k, v) from (q, k, v), or as views of one packed `[B, N, 3, H, D]`."""
    q, k, v = tensors[0].unbind(2) if len(tensors) == 1 else tensors
    return q, k, v
