"""Softmax attention of timm and transformers, taken apart, and our layers around its parts.

Projections keep their names, so that a model's weights can be loaded before and after a conversion. The modules that
replace them are called as the original ones are: with timm's or transformers' arguments, on tokens or on maps.

Shapes: `B` batch, `N` tokens, `C` channels, `H` heads, `D` = C / H.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from inline_attention.layers.attention import (
    InLineAttention,
    LinearAttention,
    Projected,
    SoftmaxAttention,
    TokenAttention,
)
from inline_attention.ops.tracing import as_autocast, is_exporting, unrecorded

_SEPARATE = ("q_proj", "k_proj", "v_proj")
_OUTPUTS = ("proj", "o_proj", "out_proj")
_BIASES = ("q_bias", "k_bias", "v_bias")
_KNOWN = ("qkv.", *(f"{name}." for name in (*_SEPARATE, *_OUTPUTS, "q_norm", "k_norm", "norm", "gate")), *_BIASES)
# Parts of parameter names, and arguments, that add a term to the scores of every pair of tokens.
_POSITION_BIASES = ("relative_position_bias_table", "rel_pos")
_BIAS_ARGUMENTS = {"shared_rel_pos_bias", "shared_rel_pos"}
_BIAS_SETTINGS = ("use_relative_position_bias", "use_shared_relative_position_bias")  # of transformers' BEiT
_ARGUMENTS = {
    "timm": {"x", "attn_mask", "is_causal", "rope"} | _BIAS_ARGUMENTS,
    "transformers": {"hidden_states", "attention_mask", "position_embeddings", "kwargs", "output_attentions"},
}
# Arguments that our layers take under the same names.
_OUR_ARGUMENTS = {"x", "attn_mask", "is_causal", "rope"}


def looks_like_attention(module: nn.Module) -> bool:
    """True if a module has the projections of an attention, in one or in three parts."""
    has_queries = hasattr(module, "qkv") or all(hasattr(module, name) for name in _SEPARATE)
    return has_queries and any(hasattr(module, name) for name in _OUTPUTS)


@dataclass(frozen=True)
class Parts:
    """What a softmax attention of another library is made of."""

    name: str  # of its class
    style: Literal["timm", "transformers"]  # whose arguments it takes
    arguments: frozenset[str]
    num_heads: int
    num_kv_heads: int
    is_fused: bool  # one projection `qkv`, not three
    has_own_biases: bool  # q_bias and v_bias beside `qkv`
    output: str  # name of the output projection
    dim: int
    position_biases: tuple[str, ...]  # parameters and arguments that add to the scores

    @property
    def is_ours(self) -> bool:
        """True if our own layer can hold the parts and take the arguments."""
        has_our_parts = self.is_fused and not self.has_own_biases and self.output == "proj"
        return has_our_parts and not self.position_biases and self.arguments <= _OUR_ARGUMENTS


def take_apart(attention: nn.Module) -> Parts:
    """Return the parts of an attention, by their names.

    Raises:
        ValueError: If it has other parts, or learns or takes what our layers have no place for.
    """
    name = type(attention).__name__
    num_heads: Any = getattr(attention, "num_heads", getattr(attention, "num_attention_heads", None))
    output = next((part for part in _OUTPUTS if isinstance(getattr(attention, part, None), nn.Linear)), None)
    inputs = [getattr(attention, part, None) for part in ("qkv", *_SEPARATE)]
    inputs = [layer for layer in inputs if isinstance(layer, nn.Linear)]
    is_fused = len(inputs) == 1
    if output is None or len(inputs) not in (1, 3) or not isinstance(num_heads, int):
        raise ValueError(
            f"cannot convert {name}: expected a module with `qkv` and `proj` linear layers and `num_heads`, as timm's "
            "Attention, or q_proj, k_proj, v_proj and o_proj, as in transformers; build InLineAttention(dim, "
            "num_heads) and copy the weights yourself"
        )
    num_kv_heads = getattr(attention, "num_kv_heads", num_heads)
    dim, proj = inputs[0].in_features, getattr(attention, output)
    widths = [3 * dim] if is_fused else [dim, *[dim * num_kv_heads // num_heads] * 2]
    if [layer.out_features for layer in inputs] != widths or (proj.in_features, proj.out_features) != (dim, dim):
        got = " and ".join(f"{layer.in_features}→{layer.out_features}" for layer in (*inputs, proj))
        raise ValueError(
            f"cannot convert {name}: expected projections of {dim} channels to {' and '.join(map(str, widths))} and "
            f"back, got {got}; heads of another width than dim / num_heads are not supported"
        )
    learned = [key for key in attention.state_dict() if not key.startswith(_KNOWN)]
    arguments = frozenset(inspect.signature(attention.forward).parameters)
    style = "transformers" if "hidden_states" in arguments else "timm"
    foreign = sorted(arguments - _ARGUMENTS[style])
    position_biases = [key for key in learned if any(part in key for part in _POSITION_BIASES)]
    if set(learned) == set(position_biases) and not foreign:
        learned = []  # the caller may want to drop them
    for what, rest in (("it also learns", learned), ("its forward also takes", foreign)):
        if rest:
            raise ValueError(
                f"cannot convert {name}: {what} {', '.join(rest)}, which InLine attention has no place for"
            )
    config = getattr(attention, "config", None)
    if style == "transformers" and config is not None and not hasattr(config, "patch_size"):
        raise ValueError(f"cannot convert {name}: its tokens are not patches of an image, but text or sound")
    if any(getattr(config, flag, False) for flag in _BIAS_SETTINGS):
        raise ValueError(
            f"cannot convert {name}: the model adds relative positions to its scores, and linear-time attention has no "
            "scores per pair of tokens; timm's BEiT can be converted without them (drop_position_bias=True)"
        )
    position_biases += sorted(arguments & _BIAS_ARGUMENTS)
    return Parts(
        name=name,
        style=style,
        arguments=arguments,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        is_fused=is_fused,
        has_own_biases=getattr(attention, "q_bias", None) is not None,
        output=output,
        dim=dim,
        position_biases=tuple(position_biases),
    )


class AdaptedAttention(TokenAttention):
    """An attention with the parts of another library's, under their names, and called as that one is called."""

    parts: Parts
    q_proj: nn.Linear | None
    k_proj: nn.Linear | None
    v_proj: nn.Linear | None
    q_bias: Tensor | None
    k_bias: Tensor | None
    v_bias: Tensor | None

    @property
    def proj(self) -> nn.Linear:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The output projection, whatever its name."""
        layer = self._modules[self.parts.output if "parts" in self.__dict__ else "proj"]
        assert isinstance(layer, nn.Linear)
        return layer

    def take_over(self, attention: nn.Module, parts: Parts) -> None:
        """Replace the layer's own projections by those of `attention`."""
        self.parts = parts
        del self._modules["proj"], self.qkv
        for name in ("qkv", *_SEPARATE, parts.output):
            setattr(self, name, getattr(attention, name, None))
        for name in _BIASES:
            value = getattr(attention, name, None)
            if isinstance(value, nn.Parameter):
                self.register_parameter(name, value)
            else:  # timm's keys have a buffer of zeros, which files do not hold
                self.register_buffer(name, value, persistent=False)

    def query_weights(self) -> list[Tensor]:
        """Return what the queries are linear in; timm's BEiT and EVA have their biases beside `qkv`."""
        if self.qkv is None:
            assert self.q_proj is not None
            return list(self.q_proj.parameters(recurse=False))
        own = [] if self.q_bias is None else [self.q_bias]
        return [part[: self.dim] for part in (*self.qkv.parameters(recurse=False), *own)]

    def translate(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return the arguments of a call as those of `TokenAttention.forward`."""
        if self.parts.style == "transformers":
            return _translate_transformers(*args, **kwargs)
        return _translate_timm(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Mix the tokens; arguments and result as those of the attention that was replaced.

        timm's are tokens `[B, N, C]`, or maps `[B, h, w, C]`. transformers' results are tuples whose second entry, the
        weights, is None.
        """
        call = self.translate(*args, **kwargs)
        x: Tensor = call["x"]
        call["x"], call["grid_size"] = _as_tokens(x)
        out = super().forward(**call)
        return (out, None) if self.parts.style == "transformers" else out.view(x.shape)

    def _queries_keys_values(self, x: Tensor) -> Projected:
        if self.qkv is not None:
            bias = None
            if self.q_bias is not None and self.v_bias is not None:
                keys = torch.zeros_like(self.q_bias) if self.k_bias is None else self.k_bias
                bias = torch.cat([self.q_bias, keys, self.v_bias])
            qkv = F.linear(x, self.qkv.weight, bias) if bias is not None else self.qkv(x)
            qkv = torch.unflatten(qkv, -1, (3, self.num_heads, self.head_dim))
            q, k, v = qkv.unbind(2)
            return Projected(q, k, v, qkv)
        assert self.q_proj is not None
        assert self.k_proj is not None
        assert self.v_proj is not None
        x = as_autocast(x)  # once, not for each of the three
        layers = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (torch.unflatten(layer(x), -1, (-1, self.head_dim)) for layer in layers)
        if (groups := self.num_heads // self.parts.num_kv_heads) > 1:
            k, v = (heads.repeat_interleave(groups, dim=2) for heads in (k, v))
        return Projected(q, k, v)


def call_arguments(attention: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return what a hook sees of a call of an attention of this library as arguments of `TokenAttention.forward`."""
    if isinstance(attention, AdaptedAttention):
        call = attention.translate(*args, **kwargs)
        call["x"], call["grid_size"] = _as_tokens(call["x"])
        return call
    return inspect.signature(attention.forward).bind(*args, **kwargs).arguments


@torch.fx.wrap
def _as_tokens(x: Tensor) -> tuple[Tensor, tuple[int, int] | None]:
    """Return maps `[B, h, w, C]` as tokens, and their grid; return tokens as they are."""
    return (x.flatten(1, 2), (x.shape[1], x.shape[2])) if x.dim() == 4 else (x, None)


def _translate_timm(
    x: Tensor,
    *,
    rope: Tensor | None = None,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    shared_rel_pos_bias: Tensor | None = None,
    shared_rel_pos: Tensor | None = None,
) -> dict[str, Any]:
    del shared_rel_pos_bias, shared_rel_pos  # only conversions that drop such biases let them come here
    return {"x": x, "rope": rope, "attn_mask": attn_mask, "is_causal": is_causal}


def _translate_transformers(
    hidden_states: Tensor,
    attention_mask: Tensor | None = None,
    position_embeddings: tuple[Tensor, Tensor] | None = None,
    is_causal: bool = False,
    **_: Any,
) -> dict[str, Any]:
    rope = None if position_embeddings is None else torch.cat([position_embeddings[1], position_embeddings[0]], -1)
    mask = None if attention_mask is None else as_key_mask(attention_mask)
    return {"x": hidden_states, "rope": rope, "attn_mask": mask, "is_causal": is_causal}


def as_key_mask(mask: Tensor) -> Tensor:
    """Return a mask `[B, 1, N, N]` of transformers, bool or added to scores, as a key padding mask `[B, 1, 1, N]`.

    Raises:
        ValueError: If it hides a token from some queries only.
    """
    if mask.dim() != 4 or mask.shape[1] != 1:
        raise ValueError(
            f"attention_mask must be [B, 1, N, N], the same for all heads, got {tuple(mask.shape)}; relative positions "
            "of each head cannot be kept: linear-time attention has no scores to add them to"
        )
    first = mask[:, :, :1]
    if mask.shape[2] > 1 and mask.stride(2) != 0 and not is_exporting():  # values cannot be read there
        with unrecorded():
            if not bool((mask == first).all()):
                raise ValueError(
                    "attention_mask hides tokens from some queries only, and linear-time attention cannot do that; "
                    "it takes masks of padding, which hide a token from all"
                )
    return first


class AdaptedInLineAttention(AdaptedAttention, InLineAttention):  # pyright: ignore[reportIncompatibleVariableOverride]
    """InLine attention with the parts of another library's attention."""


class AdaptedLinearAttention(AdaptedAttention, LinearAttention):  # pyright: ignore[reportIncompatibleVariableOverride]
    """Linear attention with the parts of another library's attention."""


class AdaptedSoftmaxAttention(AdaptedAttention, SoftmaxAttention):  # pyright: ignore[reportIncompatibleVariableOverride]
    """Softmax attention with the parts of another library's attention: it gives the same outputs as that one."""


ADAPTED: dict[type[TokenAttention], type[AdaptedAttention]] = {
    InLineAttention: AdaptedInLineAttention,
    LinearAttention: AdaptedLinearAttention,
    SoftmaxAttention: AdaptedSoftmaxAttention,
}
