"""The ONNX graphs of the page that runs a classifier in a browser: for its own size, and for every size.

Shapes: `B` batch, `N` tokens, `H` heads, `D` head dim, `K` classes.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from inline_attention.analysis.probes import AnyAttention, LayerAttention, capture_attention, observed
from inline_attention.layers.grids import Grid
from inline_attention.models.described import create_described_model, describable, model_family
from inline_attention.models.hub import recorded_arguments

LEAST_SHARED = 1024  # bytes of a constant that is stored outside of its graph
ALIGNMENT = 64  # bytes, of constants in the common file


@dataclass(frozen=True)
class Layer:
    """An attention over the whole picture."""

    name: str  # path in its model, such as "blocks.3.attn"
    kind: str  # "inline", "softmax", "linear" or "magnitude"
    heads: int
    prefix: int  # tokens before the grid
    stride: int  # pixels of the picture along a side of a token

    def grid(self, size: tuple[int, int]) -> tuple[int, int]:
        """Return rows and columns of tokens for pictures of (height, width)."""
        return Grid(*size).coarser(self.stride).size

    def num_tokens(self, size: tuple[int, int]) -> int:
        """Return N for pictures of (height, width)."""
        return self.prefix + math.prod(self.grid(size))


class WithFeatures(nn.Module):
    """A classifier that also returns what the weights of its InLine attention are computed from.

    The outputs are the scores `[B, K]`, then for each of the layers scale · phi(q) and phi(k), `[B, N, H, D]` both.
    """

    def __init__(self, model: nn.Module, names: Sequence[str]) -> None:
        """Wrap a model; `names` are paths of its InLine layers."""
        super().__init__()
        self.model, self.in_chans = model, getattr(model, "in_chans", 3)
        self.names = list(names)

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        """Run the model on images `[B, in_chans, height, width]`."""
        features: dict[str, tuple[Tensor, Tensor]] = {}

        def keep(layer: LayerAttention) -> None:
            rule, dtype = layer.rule, layer.q.dtype
            features[layer.name] = rule.scale * rule.features(layer.q, dtype), rule.features(layer.k, dtype)

        with observed(self.model, keep):
            scores = self.model(images)
        return scores, *(tensor for name in self.names for tensor in features[name])

    @property
    def output_names(self) -> list[str]:
        """Names of the outputs in a graph."""
        return ["scores", *(f"{part}{number}" for number in range(len(self.names)) for part in ("queries", "keys"))]


def global_layers(model: nn.Module, size: tuple[int, int]) -> list[Layer]:
    """Return the layers that attend to the whole picture, in order, found by a run on a picture of (height, width)."""
    if not any(isinstance(module, AnyAttention) for module in model.modules()):
        return []
    found: list[Layer] = []
    for layer in capture_attention(model, torch.zeros(1, getattr(model, "in_chans", 3), *size)):
        strides = (stride for stride in range(1, 1 + min(size)) if Grid(*size).coarser(stride).size == layer.grid_size)
        if layer.groups is None and (stride := next(strides, None)) is not None:
            found.append(Layer(layer.name, layer.rule.kind, layer.num_heads, layer.num_prefix_tokens, stride))
    return found


def twin(model: nn.Module) -> tuple[nn.Module, str] | None:
    """Return a model with another attention and the weights that both have, and the attention's name.

    It is softmax attention, or InLine attention for a softmax model. None for a model that is not of this library.
    """
    name: str = getattr(model, "pretrained_cfg", {}).get("architecture") or ""
    if model_family(name) is None:
        return None
    own, _, rest = name.partition("_")
    kind = "inline" if own == "softmax" else "softmax"
    arguments = recorded_arguments(model)
    options: dict[str, Any] = dict(arguments.pop("attention_options", None) or {})
    kept = {key: value for key, value in options.items() if key not in ("feature_map", "normalization")}
    if kept:
        arguments["attention_options"] = kept
    twin_name = f"{kind}_{rest}"
    other = create_described_model(twin_name, describable(twin_name, arguments))
    own_weights, weights = model.state_dict(), other.state_dict()
    common = own_weights.keys() & weights.keys()
    weights |= {key: own_weights[key] for key in common if own_weights[key].shape == weights[key].shape}
    other.load_state_dict(weights)
    return other.eval(), kind


def share_weights(paths: Sequence[Path]) -> tuple[list[bytes], bytes]:
    """Return ONNX files without their large constants, and these constants, each once, as the file "weights"."""
    import onnx

    places: dict[bytes, int] = {}
    weights = bytearray()
    graphs: list[bytes] = []
    for path in paths:
        content = onnx.load(path)
        for tensor in content.graph.initializer:
            values = onnx.numpy_helper.to_array(tensor).tobytes()
            if len(values) < LEAST_SHARED:
                continue
            digest = hashlib.sha256(values).digest()
            if digest not in places:
                weights += bytes(-len(weights) % ALIGNMENT)
                places[digest] = len(weights)
                weights += values
            outside = onnx.TensorProto(
                name=tensor.name, data_type=tensor.data_type, dims=tensor.dims, data_location=onnx.TensorProto.EXTERNAL
            )
            for key, value in (("location", "weights"), ("offset", places[digest]), ("length", len(values))):
                outside.external_data.add(key=key, value=str(value))
            tensor.CopyFrom(outside)
        graphs.append(content.SerializeToString())
    return graphs, bytes(weights)
