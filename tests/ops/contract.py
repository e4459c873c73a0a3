"""What every backend must do, as data and two functions; test_contract.py runs it.

The error budget is derived, not chosen. Inside, every backend computes in float32 at least (float64 for float64), so
its result may differ from the exact one by about what a few roundings of the *inputs* in that compute dtype change,
plus one rounding of the result to its own dtype. The first part is measured: the float64 reference is evaluated at
inputs moved at random by a small relative step, and the largest change gives the sensitivity to a rounding.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch

from inline_attention import inline_attention, inline_attention_qkvpacked
from inline_attention.ops.feature_maps import apply_feature_map

ROUNDINGS = 8
PERTURBATIONS = 4
PERTURBATION = 2.0**-24  # small enough to be linear, large enough to be seen in float64


@dataclass(frozen=True)
class Shape:
    """Sizes of one call; `grid` makes N = M = prefix + h·w."""

    name: str
    batch: int = 2
    queries: int = 6
    keys: int = 6
    heads: int = 2
    head_dim: int = 4
    value_dim: int | None = None
    grid: tuple[int, int] | None = None
    prefix: int = 0

    @property
    def tokens(self) -> tuple[int, int]:
        if self.grid is None:
            return self.queries, self.keys
        tokens = self.prefix + self.grid[0] * self.grid[1]
        return tokens, tokens


SHAPES = [
    Shape("single_token", queries=1, keys=1),
    Shape("one_key", queries=5, keys=1),
    Shape("one_query", queries=1, keys=7),
    Shape("cross", queries=5, keys=9),
    Shape("value_dim", queries=5, keys=9, head_dim=3, value_dim=7),
    Shape("odd_head_dim", queries=17, keys=17, head_dim=5),
    Shape("head_dim_one", queries=6, keys=6, head_dim=1),
    Shape("wide_head", batch=1, queries=9, keys=9, heads=1, head_dim=96),
    Shape("grid_1x1", grid=(1, 1)),
    Shape("grid_1xn", grid=(1, 9)),
    Shape("grid_nx1", grid=(9, 1)),
    Shape("grid_2x2", grid=(2, 2)),
    Shape("grid_7x13", grid=(7, 13), head_dim=8),
    Shape("grid_prefix", grid=(4, 3), prefix=1),
    Shape("grid_registers", grid=(3, 5), prefix=5, heads=3),
    Shape("grid_14x14", batch=1, grid=(14, 14), heads=3, head_dim=16),
]


@dataclass(frozen=True)
class Option:
    """One combination of keyword arguments, and whether to pad some keys."""

    name: str
    keywords: dict[str, Any] = field(default_factory=dict)
    masked: bool = False


def _square_plus_half(x: torch.Tensor) -> torch.Tensor:
    """A callable feature map that changes the head dim."""
    return torch.cat([x.square() + 0.5, x.abs() + 0.5], dim=-1)


OPTIONS = [
    Option("inline"),
    Option("inline_masked", masked=True),
    Option("inline_scaled", {"scale": 0.7}),
    Option("inline_relu", {"feature_map": "relu"}),
    Option("inline_leaky_relu", {"feature_map": "leaky_relu"}),
    Option("inline_exp_masked", {"feature_map": "exp"}, masked=True),
    Option("linear_exp", {"feature_map": "exp", "normalization": "divide"}),
    Option("linear_elu_masked", {"feature_map": "elu_plus_one", "normalization": "divide"}, masked=True),
    Option("linear_callable", {"feature_map": _square_plus_half, "normalization": "divide"}),
    Option("mala_elu", {"feature_map": "elu_plus_one", "normalization": "magnitude"}),
    Option("mala_exp_masked", {"feature_map": "exp", "normalization": "magnitude"}, masked=True),
]


def check_call(
    shape: Shape,
    option: Option,
    dtype: torch.dtype,
    *,
    backend: str,
    packed: bool,
    seed: int = 0,
    device: str = "cpu",
    oracle: str = "reference",
) -> None:
    """Hold outputs and gradients of one call against the float64 reference, within the derived budget.

    Where the reference's N×M weights do not fit, the oracle is "eager" in float64, itself held against the reference.
    """
    generator = torch.Generator().manual_seed(seed)
    tensors = {name: tensor.to(device) for name, tensor in _draw(shape, dtype, generator).items()}
    keywords = dict(option.keywords)
    if option.masked:
        mask = torch.rand(shape.batch, shape.tokens[1], generator=generator) > 0.4
        mask[:, 0] = True
        keywords["key_padding_mask"] = mask.to(device)
    if shape.grid is not None:
        keywords |= {"grid_size": shape.grid, "num_prefix_tokens": shape.prefix}
    grad = torch.randn(shape.batch, shape.tokens[0], shape.heads, tensors["v"].shape[-1], generator=generator)
    grad = grad.to(device, dtype)

    actual = evaluate(tensors, grad, keywords, backend, packed)
    exact_inputs = {name: tensor.double() for name, tensor in tensors.items()}
    exact = evaluate(exact_inputs, grad.double(), keywords, oracle, packed=False)
    compute_roundoff = torch.finfo(torch.promote_types(dtype, torch.float32)).eps / 2
    budgets = dict.fromkeys(exact, 0.0)
    for _ in range(PERTURBATIONS):
        moved_inputs = {name: _perturb(tensor, generator) for name, tensor in exact_inputs.items()}
        moved = evaluate(moved_inputs, grad.double(), keywords, oracle, packed=False)
        for name in exact:
            sensitivity = _largest(moved[name] - exact[name]) / PERTURBATION
            budgets[name] = max(budgets[name], ROUNDINGS * compute_roundoff * sensitivity)

    # The reference, which subtracts a mean score from scores, is itself no more exact than float64 rounds those.
    scores = _largest_score(exact_inputs, keywords) if oracle == "reference" else 0.0
    floor = ROUNDINGS * math.sqrt(shape.tokens[1]) * max(compute_roundoff, torch.finfo(torch.float64).eps * scores)
    terms = _largest_terms(exact_inputs, grad.double(), keywords)
    for name, expected in exact.items():
        got = actual[name]
        assert got.dtype == dtype, f"{name}: dtype {got.dtype}, expected {dtype}"
        assert got.shape == expected.shape
        assert not got.isnan().any(), f"{name} has NaN"
        # Half a unit in the last place of the result; below the smallest normal number the spacing is constant.
        rounding = expected.abs() * torch.finfo(dtype).eps / 2 + torch.finfo(dtype).smallest_normal
        excess = (got.double() - expected).abs() - rounding - budgets[name]
        # What is zero in theory (the gradient of a single key, say) has no scale of its own: it is a difference of
        # equal terms, and as exact as those.
        cancelled = terms.get(name, 0.0)
        is_zero = _largest(expected) <= torch.finfo(torch.float64).eps * cancelled
        assert _largest(excess.clamp(min=0)) <= floor * (max(1.0, cancelled) if is_zero else 1.0), (
            f"{name}: error {_largest(got.double() - expected):.2e}, budget {budgets[name]:.2e}"
        )


def evaluate(
    tensors: dict[str, torch.Tensor], grad: torch.Tensor, keywords: dict[str, Any], backend: str, packed: bool
) -> dict[str, torch.Tensor]:
    """Output and gradients by name."""
    leaves = {name: tensor.detach().clone().requires_grad_() for name, tensor in tensors.items()}
    local_weight = leaves.get("local_weight")
    if packed:
        qkv = torch.stack([leaves["q"], leaves["k"], leaves["v"]], dim=2).detach().requires_grad_()
        out = inline_attention_qkvpacked(qkv, local_weight=local_weight, backend=backend, **keywords)
        out.backward(grad)
        assert qkv.grad is not None
        gradients = dict(zip(("q", "k", "v"), qkv.grad.unbind(2), strict=True))
    else:
        out = inline_attention(
            leaves["q"], leaves["k"], leaves["v"], local_weight=local_weight, backend=backend, **keywords
        )
        out.backward(grad)
        gradients = {name: leaves[name].grad for name in ("q", "k", "v")}
    if local_weight is not None:
        gradients["local_weight"] = local_weight.grad
    return {"out": out.detach(), **{f"grad_{name}": value for name, value in gradients.items()}}


def _largest_score(tensors: dict[str, torch.Tensor], keywords: dict[str, Any]) -> float:
    q, k = (
        apply_feature_map(keywords.get("feature_map", "identity"), tensors[name], torch.float64) for name in ("q", "k")
    )
    return keywords.get("scale", tensors["q"].shape[-1] ** -0.5) * _largest(torch.einsum("bnhd,bmhd->bhnm", q, k))


def _largest_terms(tensors: dict[str, torch.Tensor], grad: torch.Tensor, keywords: dict[str, Any]) -> dict[str, float]:
    """Bounds of the terms whose sum over tokens is the gradient of a query or a key, by its name."""
    q, k = (
        apply_feature_map(keywords.get("feature_map", "identity"), tensors[name], torch.float64) for name in ("q", "k")
    )
    # |g · v|, by Cauchy and Schwarz
    of_weights = _largest(grad.norm(dim=-1)) * _largest(tensors["v"].norm(dim=-1))
    factor = keywords.get("scale", tensors["q"].shape[-1] ** -0.5) * of_weights
    return {"grad_q": factor * _largest(k), "grad_k": factor * _largest(q)}


def _draw(shape: Shape, dtype: torch.dtype, generator: torch.Generator) -> dict[str, torch.Tensor]:
    queries, keys = shape.tokens
    value_dim = shape.head_dim if shape.value_dim is None else shape.value_dim
    sizes = {
        "q": (shape.batch, queries, shape.heads, shape.head_dim),
        "k": (shape.batch, keys, shape.heads, shape.head_dim),
        "v": (shape.batch, keys, shape.heads, value_dim),
    }
    if shape.grid is not None:
        sizes["local_weight"] = (shape.batch, shape.heads, value_dim, 3, 3)
    tensors = {name: torch.randn(size, generator=generator) for name, size in sizes.items()}
    tensors["k"] = tensors["k"] + 0.5  # a mean that matters
    tensors["v"] = tensors["v"] - 1.0
    return {name: tensor.to(dtype) for name, tensor in tensors.items()}


def _perturb(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    signs = torch.randint(0, 2, tensor.shape, generator=generator) * 2 - 1
    return tensor * (1 + PERTURBATION * signs.to(tensor.device))


def _largest(tensor: torch.Tensor) -> float:
    return tensor.abs().max().item() if tensor.numel() else 0.0
