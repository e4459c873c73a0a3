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

from inline_attention.ops import composed
from inline_attention.ops.call import AttentionCall
from inline_attention.ops.tracing import is_plain_execution

# (call, keep_state) to (out, state). `out` is `[B, N, H, Dv]`, contiguous, in the dtype of v; if the call has
# overwrite_q, it may take the memory of q. `state` is a vector, see `split_state`; it may be None without keep_state.
# The call's feature map is a name, and the last dimension of its q, k and v has unit stride.
Forward: TypeAlias = Callable[[AttentionCall, bool], tuple[Tensor, Tensor | None]]
# (call, grad_out, state, (grad_q, grad_k, grad_v)) to the gradient of local_weight, or None without one. Fills the
# three gradients, which are uninitialized and may be views of one packed gradient. The last dimension of every token
# tensor has unit stride. If the state is None, the function computes it again; only backends with
# `can_make_state_again` get None.
Backward: TypeAlias = Callable[
    [AttentionCall, Tensor, Tensor | None, tuple[Tensor, Tensor, Tensor]],
    Tensor | None,
]

# The largest part of the inputs' memory that a state may take and still be saved by a compiled graph.
LARGEST_SAVED_STATE = 0.05

_NAMESPACE = "inline_attention"
_LIBRARY = torch.library.Library(_NAMESPACE, "FRAGMENT")
_OPTIONAL_SCHEMA = "Tensor? key_padding_mask, Tensor? local_weight"
_SETTINGS_SCHEMA = (
    "float scale, str feature_map, str normalization, SymInt grid_height, SymInt grid_width, SymInt num_prefix_tokens"
)


def empty_state(q: Tensor, v: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """An uninitialized state for queries `[B, N, H, D]` and values `[B, M, H, Dv]`."""
    return q.new_empty(q.shape[0] * _sample_state_size(q, v), dtype=dtype)


def split_state(state: Tensor, q: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """scale · Cov(phi(k), v) `[B, H, D, Dv]`, the means of phi(k) `[B, H, D]` and of v `[B, H, Dv]`, as views."""
    (B, _, H, D), Dv = q.shape, v.shape[3]
    covariance, key_mean, value_mean = torch.split(state, [B * H * D * Dv, B * H * D, B * H * Dv])
    return covariance.view(B, H, D, Dv), key_mean.view(B, H, D), value_mean.view(B, H, Dv)


def _sample_state_size(q: Tensor, v: Tensor) -> int:
    (_, _, H, D), Dv = q.shape, v.shape[3]
    return H * (D * Dv + D + Dv)


class Kernels(NamedTuple):
    """The two functions of one backend; `can_make_state_again` if the second accepts None for the state."""

    forward: Forward
    backward: Backward
    can_make_state_again: bool

    def should_save_state(self, call: AttentionCall) -> bool:
        """True if a compiled graph saves the state of a call. Does not depend on the batch size."""
        if not self.can_make_state_again:
            return True
        q, k, v = call.q, call.k, call.v
        inputs = sum(tensor.shape[1] * tensor.shape[2] * tensor.shape[3] for tensor in (q, k, v)) * q.element_size()
        return 4 * _sample_state_size(q, v) <= LARGEST_SAVED_STATE * inputs


_HERE = nullcontext()


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context in which kernels are launched on the device, at no cost where it is the current one."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return _HERE
    return torch.cuda.device(device)


def register(
    name: str, forward: Forward, backward: Backward, *, largest_head_dim: int, can_make_state_again: bool
) -> Callable[[AttentionCall], Tensor]:
    """Define the ops `inline_attention::{name}[_packed]_{forward,backward,inference}`; return a function for calls.

    A callable feature map may widen heads beyond `largest_head_dim` of the kernels. Such calls are composed from
    PyTorch operations.
    """
    kernels = Kernels(forward, backward, can_make_state_again)
    separate_ops = _define_ops(name, kernels, ("q", "k", "v"))
    packed_ops = _define_ops(f"{name}_packed", kernels, ("qkv",))

    def run(call: AttentionCall) -> Tensor:
        if not isinstance(call.feature_map, str):
            mapped = composed.mapped(call, torch.float32)  # values too: the kernels take one dtype
            out = run(mapped) if mapped.q.shape[3] <= largest_head_dim else composed.attend(mapped)
            return out.to(call.v.dtype)
        if is_plain_execution(*_inputs(call)):
            return run_plain(kernels, call)
        # A compiler, a dispatch mode or a tensor subclass must see one operation.
        training_op, inference_op = separate_ops if call.qkv is None else packed_ops
        arguments = *_inputs(call), call.key_padding_mask, call.local_weight, *_settings(call)
        return training_op(*arguments)[0] if _needs_gradient(call) else inference_op(*arguments)

    return run


def run_plain(kernels: Kernels, call: AttentionCall) -> Tensor:
    """Run kernels on plain eager tensors."""
    if not _needs_gradient(call):
        return _forward(kernels, call, keep_state=False)[0]
    tensors = call.key_padding_mask, call.local_weight, *_inputs(call)
    return cast(Tensor, _FusedAttention.apply(kernels, _settings(call), *tensors))


def _inputs(call: AttentionCall) -> tuple[Tensor, ...]:
    return (call.q, call.k, call.v) if call.qkv is None else (call.qkv,)


def _settings(call: AttentionCall) -> tuple[Any, ...]:
    """The arguments of a call that are not tensors, as ops take them. The grid is 0 × 0 without a local term."""
    grid_size = call.grid_size or (0, 0)
    return float(call.scale), call.feature_map, call.normalization, *grid_size, call.num_prefix_tokens


def _make_call(
    inputs: Sequence[Tensor], key_padding_mask: Tensor | None, local_weight: Tensor | None, settings: Sequence[Any]
) -> AttentionCall:
    """The call that `_inputs` and `_settings` came from, without the permission to overwrite q."""
    scale, feature_map, normalization, height, width, num_prefix_tokens = settings
    return AttentionCall(
        *_separate(inputs), inputs[0] if len(inputs) == 1 else None, scale, feature_map, normalization,
        key_padding_mask, local_weight, None if local_weight is None else (height, width), num_prefix_tokens,
    )  # fmt: skip


def _separate(inputs: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """(q, k, v) from (q, k, v), or as views of one packed `[B, N, 3, H, D]`."""
    q, k, v = inputs[0].unbind(2) if len(inputs) == 1 else inputs
    return q, k, v


def _needs_gradient(call: AttentionCall) -> bool:
    if not torch.is_grad_enabled():
        return False
    for tensor in _inputs(call):  # not `any`, whose generator takes longer than the question
        if tensor.requires_grad:
            return True
    return call.local_weight is not None and call.local_weight.requires_grad


def _forward(kernels: Kernels, call: AttentionCall, *, keep_state: bool) -> tuple[Tensor, Tensor | None]:
    if call.q.shape[0] == 0:
        return _empty_results(call)
    with on_device(call.q.device):
        return kernels.forward(with_unit_strides(call), keep_state)


def _backward(
    kernels: Kernels, call: AttentionCall, grad_out: Tensor, state: Tensor | None
) -> tuple[list[Tensor], Tensor | None]:
    """Gradients of the inputs, contiguous, and of `local_weight`."""
    grads = [torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device) for tensor in _inputs(call)]
    if call.q.shape[0] == 0:
        return grads, None if call.local_weight is None else torch.empty_like(call.local_weight)
    with on_device(call.q.device):
        call, grad_out = with_unit_strides(call), _with_unit_stride(grad_out)
        return grads, kernels.backward(call, grad_out, state, _separate(grads))


def _differentiable_backward(call: AttentionCall, grad_out: Tensor) -> tuple[list[Tensor | None], Tensor | None]:
    """As `_backward`, but by differentiable functions, for `create_graph=True`."""
    # Views, so that a tensor passed twice (q is k) counts as two inputs.
    inputs = [tensor.view_as(tensor) for tensor in _inputs(call)]
    local_weight = None if call.local_weight is None else call.local_weight.view_as(call.local_weight)
    call = _make_call(inputs, call.key_padding_mask, local_weight, _settings(call))
    dtype = call.v.dtype
    out = composed.attend(composed.mapped(call, torch.promote_types(dtype, torch.float32))).to(dtype)
    views = [*inputs, local_weight]
    wanted = [view for view in views if view is not None and view.requires_grad]
    found = iter(torch.autograd.grad(out, wanted, grad_out, create_graph=True))
    *grads, grad_local = [next(found) if view is not None and view.requires_grad else None for view in views]
    return grads, grad_local


class _FusedAttention(torch.autograd.Function):
    """The kernels on plain eager tensors."""

    @staticmethod
    def forward(
        ctx: Any, kernels: Kernels, settings: tuple[Any, ...], mask: Any, local_weight: Any, *inputs: Tensor
    ) -> Tensor:
        out, state = _forward(kernels, _make_call(inputs, mask, local_weight, settings), keep_state=True)
        ctx.save_for_backward(mask, local_weight, state, *inputs)
        ctx.kernels, ctx.settings = kernels, settings
        return out

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        call, state = _saved_call(ctx)
        if torch.is_grad_enabled():
            grads, grad_local = _differentiable_backward(call, grad_outputs[0])
        else:
            grads, grad_local = _backward(ctx.kernels, call, grad_outputs[0], state)
        return None, None, None, grad_local, *grads


def _saved_call(ctx: Any) -> tuple[AttentionCall, Tensor]:
    mask, local_weight, state, *inputs = ctx.saved_tensors
    return _make_call(inputs, mask, local_weight, ctx.settings), state


def _define_ops(
    name: str, kernels: Kernels, input_names: tuple[str, ...]
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Define the ops `{name}_{forward,backward,inference}`; return the first, which is differentiable, and the last.

    A custom op cannot return None: a state that is not saved, or the gradient of no local weight, is an empty tensor.
    """
    count = len(input_names)
    inputs_schema = ", ".join(f"Tensor {name}" for name in input_names)
    forward_schema = f"({inputs_schema}, {_OPTIONAL_SCHEMA}, {_SETTINGS_SCHEMA})"

    def as_call(arguments: Sequence[Any]) -> AttentionCall:
        inputs, (mask, local_weight, *settings) = arguments[:count], arguments[count:]
        return _make_call(inputs, mask, local_weight, settings)

    def forward(*arguments: Any) -> tuple[Tensor, ...]:
        call = as_call(arguments)
        saves = kernels.should_save_state(call)
        out, state = _forward(kernels, call, keep_state=saves)
        return out, state if saves and state is not None else out.new_empty(0, dtype=torch.float32)

    def fake_forward(*arguments: Any) -> tuple[Tensor, ...]:
        call = as_call(arguments)
        out, state = _empty_results(call)
        return out, state if kernels.should_save_state(call) else out.new_empty(0, dtype=torch.float32)

    def backward(grad_out: Tensor, state: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
        call = as_call(arguments)
        grads, grad_local = _backward(kernels, call, grad_out, state if kernels.should_save_state(call) else None)
        return *grads, grad_out.new_empty(0) if grad_local is None else grad_local

    def fake_backward(grad_out: Tensor, state: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
        del state
        local_weight = arguments[count + 1]
        grads = [tensor.new_empty(tensor.shape) for tensor in arguments[:count]]
        return *grads, grad_out.new_empty(0) if local_weight is None else local_weight.new_empty(local_weight.shape)

    def infer(*arguments: Any) -> Tensor:
        return _forward(kernels, as_call(arguments), keep_state=False)[0]

    def fake_infer(*arguments: Any) -> Tensor:
        return _empty_results(as_call(arguments))[0]

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        tensors, (mask, local_weight, *settings) = inputs[:count], inputs[count:]
        state = output[1]
        ctx.mark_non_differentiable(state)
        ctx.save_for_backward(mask, local_weight, state, *tensors)
        ctx.settings = settings

    def derivative(ctx: Any, grad_out: Tensor, *_: Any) -> tuple[Any, ...]:
        call, state = _saved_call(ctx)
        if torch.is_grad_enabled():
            grads, grad_local = _differentiable_backward(call, grad_out)
        else:
            tensors = *_inputs(call), call.key_padding_mask, call.local_weight
            *grads, grad_local = backward_op(grad_out, state, *tensors, *ctx.settings)
        return *grads, None, None if call.local_weight is None else grad_local, *[None] * len(ctx.settings)

    qualified = f"{_NAMESPACE}::{name}"
    forward_op = torch.library.custom_op(
        f"{qualified}_forward", forward, mutates_args=(), schema=f"{forward_schema} -> (Tensor, Tensor)"
    )
    gradients = ", ".join(["Tensor"] * (count + 1))
    backward_op = torch.library.custom_op(
        f"{qualified}_backward",
        backward,
        mutates_args=(),
        schema=f"(Tensor grad_out, Tensor state, {forward_schema[1:]} -> ({gradients})",
    )
    forward_op.register_fake(fake_forward)  # pyright: ignore[reportUnknownMemberType]
    backward_op.register_fake(fake_backward)  # pyright: ignore[reportUnknownMemberType]
    forward_op.register_autograd(derivative, setup_context=setup_context)  # pyright: ignore[reportUnknownMemberType]
    # Not a `custom_op`: that wraps every call for autograd and dynamo, in Python, which takes as long as all the rest.
    _LIBRARY.define(f"{name}_inference{forward_schema} -> Tensor")  # pyright: ignore[reportUnknownMemberType]
    _LIBRARY.impl(f"{name}_inference", infer, "CompositeExplicitAutograd")  # pyright: ignore[reportUnknownMemberType]
    torch.library.register_fake(f"{qualified}_inference", fake_infer, lib=_LIBRARY)  # pyright: ignore[reportUnknownMemberType]
    ops = getattr(torch.ops, _NAMESPACE)
    return getattr(ops, f"{name}_forward").default, getattr(ops, f"{name}_inference").default


def _empty_results(call: AttentionCall) -> tuple[Tensor, Tensor]:
    """Return uninitialized output and state, with the shapes and dtypes of the forward op's results."""
    return call.v.new_empty(*call.q.shape[:3], call.v.shape[3]), empty_state(call.q, call.v)


def with_unit_strides(call: AttentionCall) -> AttentionCall:
    """Return the call with a last dimension of unit stride in q, k and v, as kernels need it."""
    q, k, v = call.q, call.k, call.v
    if q.stride(-1) == k.stride(-1) == v.stride(-1) == 1:
        return call
    return call._replace(q=_with_unit_stride(q), k=_with_unit_stride(k), v=_with_unit_stride(v))


def _with_unit_stride(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()
