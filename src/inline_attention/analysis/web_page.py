"""Write a folder with a page that runs a classifier in the browser. It loads nothing from elsewhere.

DIR/index.html        the page, opened by a double-click
DIR/data/NAME.js      the runtime, the weights and the graphs: gzip in base64, since such a page may load scripts only
DIR/licenses/         of the runtime

Shapes: `B` batch, `N` tokens, `H` heads, `D` head dim, `K` classes.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import html
import io
import json
import lzma
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn

from inline_attention.analysis.probes import AnyAttention, LayerAttention, capture_attention, observed
from inline_attention.data.images import LARGEST_ASPECT
from inline_attention.layers.grids import Grid
from inline_attention.models.described import create_described_model, describable, model_family
from inline_attention.models.hub import recorded_arguments
from inline_attention.support.figures import DARK, KIND_LABELS, LIGHT
from inline_attention.support.files import replace_folder
from inline_attention.support.text import printable
from inline_attention.tasks.classification.export import (
    Comparer,
    Comparison,
    onnx_notes,
    quantize_onnx,
    trace,
    write_compared_onnx,
    write_onnx,
)
from inline_attention.tasks.classification.prediction import ImageClassifier
from inline_attention.tasks.task import import_extra

SOURCES = files("inline_attention.analysis") / "web"
COLORS = ("paper", "raised", "ink", "muted", "faint", "inline", "softmax", "linear", "more", "less", "link", "bad")
INTERPOLATIONS = ("nearest", "box", "bilinear", "hamming", "bicubic", "lanczos")
CROP_MODES = ("center", "squash")
LARGEST_SIDE = 1024  # pixels, of the size slider
MOST_SOFTMAX_BYTES = 3 << 29  # 1.5 GiB of weights; a page has 4 GiB, and softmax takes them twice
MOST_CLASSES = 10  # with a bar
LARGEST_EXAMPLE = 640  # pixels along a side
SMALL_EXAMPLE = 100  # pixels along a side; shown with sharp pixels and saved without loss
LEAST_SHARED = 1024  # bytes of a constant that is stored outside of its graph
ALIGNMENT = 64  # bytes, of constants in the common file


def export_page(
    classifier: ImageClassifier,
    folder: Path,
    images: Tensor,
    targets: Tensor | None = None,
    examples: Sequence[tuple[str, Image.Image]] = (),
    *,
    int8: bool = False,
    with_speed: bool = True,
) -> list[Comparison]:
    """Write the page of a classifier, which is on a CPU; an existing folder is replaced. On an error there is none.

    Returns the model, the exported graph and the quantized graph, compared on the same images.

    Args:
        classifier: The model.
        folder: Folder to write.
        images: Prepared images `[B, 3, height, width]` to compare on.
        targets: Their classes `[B]`, if known.
        examples: Pictures to choose from in the page, with their names.
        int8: Write linear layers in 8-bit integers.
        with_speed: Add graphs for every image size, of the model and of its softmax twin.

    Raises:
        ExportError: If the graph's scores differ from the model's.
        ValueError: If the page cannot prepare pictures for this model.
    """
    import_extra("onnx", "export")
    import_extra("onnxruntime", "export")
    import_extra("onnxscript", "export")
    preparation = _preparation(classifier)
    runtime = read_runtime()
    model, size = classifier.model, (images.shape[2], images.shape[3])
    layers = global_layers(model, size)
    inline = [layer for layer in layers if layer.kind == "inline"]
    probed = WithFeatures(model, [layer.name for layer in inline])
    compare = Comparer(model, images, targets)
    with TemporaryDirectory() as temporary, replace_folder(folder) as new:
        own = Path(temporary, "model.onnx")
        notes = onnx_notes(classifier, size)
        results = write_compared_onnx(trace(probed, size), own, compare, notes, probed.output_names, int8=int8)
        cost, cost_graphs, cost_note = None, {}, "Left out: this page was written with --no-speed."
        if with_speed:
            cost, cost_graphs, cost_note = _cost(classifier, layers, size, Path(temporary), int8)
        graphs, weights = share_weights([own, *cost_graphs.values()])
        data = {
            "runtime": {
                "runtime.mjs": runtime["ort.wasm.bundle.min.mjs"],
                "runtime.wasm": runtime["ort-wasm-simd-threaded.wasm"],
            },
            "model": {"model": graphs[0], "weights": weights},
        }
        if cost is not None:
            data["cost"] = dict(zip(cost_graphs, graphs[1:], strict=True))
        settings = {
            "class_names": [printable(name) for name in classifier.class_names],
            "size": size,
            "preparation": preparation,
            "most_classes": MOST_CLASSES,
            "layers": [
                asdict(layer) | {"rows": layer.grid(size)[0], "columns": layer.grid(size)[1]} for layer in inline
            ],
            "weights_note": _weights_note(inline),
            "cost": cost,
            "cost_note": cost_note,
            "examples": [_example(name, picture) for name, picture in examples],
        }
        (new / "data").mkdir()
        for name, parts in data.items():
            (new / "data" / f"{name}.js").write_bytes(_deliveries(parts))
        (new / "licenses").mkdir()
        notices = lzma.decompress((SOURCES / "runtime" / "ThirdPartyNotices.txt.xz").read_bytes())
        (new / "licenses" / "onnxruntime-web-ThirdPartyNotices.txt").write_bytes(notices)
        license_text = (SOURCES / "runtime" / "LICENSE").read_bytes()
        (new / "licenses" / "onnxruntime-web-LICENSE.txt").write_bytes(license_text)
        (new / "index.html").write_text(_page(model_title(classifier), settings), encoding="utf-8")
    return [compare.of_model(), *results]


def model_title(classifier: ImageClassifier) -> str:
    """Return the name of the model for people."""
    name = getattr(classifier.model, "pretrained_cfg", {}).get("architecture")
    return printable(name or type(classifier.model).__name__)


def read_runtime() -> dict[str, bytes]:
    """Return the files of onnxruntime-web that come with the package; `ValueError` if one was changed."""
    folder = SOURCES / "runtime"
    contents = {
        "ort.wasm.bundle.min.mjs": (folder / "ort.wasm.bundle.min.mjs").read_bytes(),
        "ort-wasm-simd-threaded.wasm": lzma.decompress((folder / "ort-wasm-simd-threaded.wasm.xz").read_bytes()),
    }
    for name, expected in runtime_facts()["sha256"].items():
        if hashlib.sha256(contents[name]).hexdigest() != expected:
            raise ValueError(f"{folder} has another {name} than its runtime.json says; install the package again")
    return contents


def runtime_facts() -> dict[str, Any]:
    """Return name, version, license and checksums of the runtime."""
    return json.loads((SOURCES / "runtime" / "runtime.json").read_text(encoding="utf-8"))


def _preparation(classifier: ImageClassifier) -> dict[str, Any]:
    """Return how pictures are prepared; raise ValueError for what the page cannot do."""
    config = classifier.preparation
    if (channels := getattr(classifier.model, "in_chans", 3)) != 3:
        raise ValueError(f"the page shows pictures of 3 channels, and this model takes {channels}; use --format onnx")
    for key, known in (("interpolation", INTERPOLATIONS), ("crop_mode", CROP_MODES)):
        if config[key] not in known:
            raise ValueError(
                f"the page knows {', '.join(known)} as {key}, and this model has {config[key]!r}; use --format onnx"
            )
    names = ("mean", "std", "interpolation", "crop_pct", "crop_mode")
    return {key: config[key] for key in names} | {"largest_aspect": LARGEST_ASPECT}


def _weights_note(inline: Sequence[Layer]) -> str:
    if not inline:
        return "This model has no InLine attention over the whole picture, so there are no weights to show."
    return (
        "The weights that InLine attention gives to all tokens for the one that you choose. Purple is above the "
        "uniform weight, green below, also where weights are negative. The 3×3 term is not included."
    )


def _cost(
    classifier: ImageClassifier, layers: Sequence[Layer], size: tuple[int, int], folder: Path, int8: bool
) -> tuple[dict[str, Any] | None, dict[str, Path], str]:
    """Return settings of the size slider, its graphs by name, and the text above it."""
    found = twin(classifier.model)
    if found is None or not layers:
        reason = "not one of this library" if found is None else "without attention over the whole picture"
        return None, {}, f"Left out: this model is {reason}, so there is no softmax twin to compare with."
    other, other_kind = found
    other_layers = global_layers(other, size)
    own_kind = model_title(classifier).partition("_")[0]
    finest = min([*layers, *other_layers], key=lambda layer: layer.stride)
    softmax = layers if own_kind == "softmax" else other_layers
    stops: list[dict[str, Any]] = []
    for side in slider_sizes(size):
        pairs = [layer.heads * layer.num_tokens(side) ** 2 for layer in softmax if layer.kind == "softmax"]
        most = 4 * max(pairs, default=0)  # bytes
        stops.append({"size": side, "tokens": finest.num_tokens(side), "softmax_bytes": most})
    graphs: dict[str, Path] = {}
    kinds: list[dict[str, str]] = []
    for kind, model in ((own_kind, classifier.model), (other_kind, other)):
        path = folder / f"cost-{kind}.onnx"
        exact = folder / "exact.onnx" if int8 else path
        write_onnx(trace(model, size, dynamic=True), exact, {})
        if int8:
            quantize_onnx(exact, path)
        graphs[f"cost-{kind}"] = path
        kinds.append({"kind": kind, "label": KIND_LABELS[kind], "graph": f"cost-{kind}"})
    kinds.sort(key=lambda item: item["kind"] == "softmax")  # the expensive one last
    own, twin_label = KIND_LABELS[own_kind], KIND_LABELS[other_kind]
    note = (
        f"Move the slider: the {own} model runs on the picture at this size, and so does its {twin_label} twin. The "
        "twin has the weights that fit into it, and random ones elsewhere: only its time counts. Softmax compares all "
        "pairs of tokens. Twice the side is 4 times the tokens: 4 times the work in InLine attention, 16 times in "
        "softmax attention."
    )
    cost = {"kinds": kinds, "stops": stops, "most_bytes": MOST_SOFTMAX_BYTES}
    return cost, graphs, note


def slider_sizes(size: tuple[int, int]) -> list[tuple[int, int]]:
    """Return the model's own size, its doubles, and the largest with a side of `LARGEST_SIDE`."""
    sizes = [size]
    while 2 * max(sizes[-1]) <= LARGEST_SIDE:
        height, width = sizes[-1]
        sizes.append((2 * height, 2 * width))
    if max(sizes[-1]) < LARGEST_SIDE:
        scale = LARGEST_SIDE / max(size)
        sizes.append((round(size[0] * scale), round(size[1] * scale)))
    return sizes


def _example(name: str, picture: Image.Image) -> dict[str, Any]:
    """Return a picture for the page."""
    picture = picture.convert("RGB")
    picture.thumbnail((LARGEST_EXAMPLE, LARGEST_EXAMPLE))
    is_small = max(picture.size) <= SMALL_EXAMPLE
    file = io.BytesIO()
    picture.save(file, "PNG" if is_small else "JPEG", quality=90)
    kind = "png" if is_small else "jpeg"
    address = f"data:image/{kind};base64,{base64.b64encode(file.getvalue()).decode()}"
    return {"name": printable(name), "address": address, "is_small": is_small}


def _deliveries(parts: Mapping[str, bytes]) -> bytes:
    """Return a script that hands data to the page."""
    packed = {name: base64.b64encode(gzip.compress(part, compresslevel=6, mtime=0)) for name, part in parts.items()}
    return b"".join(b'deliver("%s", "%s");\n' % (name.encode(), content) for name, content in packed.items())


def _page(title: str, settings: Mapping[str, Any]) -> str:
    """Return `index.html`. No text from outside can end the script that it is in."""

    def source(name: str) -> str:
        return (SOURCES / name).read_text(encoding="utf-8")

    def variables(colors: Mapping[str, str]) -> str:
        return " ".join(f"--{name}: {colors[name]};" for name in COLORS)

    facts = runtime_facts()
    values = {
        "TITLE": html.escape(title),
        "COLORS": f":root {{ color-scheme: light dark; {variables(LIGHT)} }}\n"
        f"@media (prefers-color-scheme: dark) {{ :root {{ {variables(DARK)} }} }}\n"
        + " ".join(f".k-{kind} {{ --c: var(--{kind}); }}" for kind in ("inline", "softmax", "linear")),
        "STYLE": source("page.css").strip(),
        "RUNTIME": html.escape(f"{facts['name']} {facts['version']}"),
        "SETTINGS": json.dumps(settings).replace("<", "\\u003c"),
        "WORKER": source("worker.js").strip(),
        "SCRIPT": source("prepare.js") + source("page.js").strip(),
    }
    # In one pass: a value may contain what looks like a place.
    return re.sub("@([A-Z]+)@", lambda place: values[place[1]], source("page.html"))


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
    from onnx.external_data_helper import set_external_data

    places: dict[bytes, int] = {}
    weights = bytearray()
    graphs: list[bytes] = []
    for path in paths:
        content = onnx.load(path)
        for tensor in content.graph.initializer:
            array = onnx.numpy_helper.to_array(tensor)
            values = array.tobytes()
            if len(values) < LEAST_SHARED:
                continue
            digest = hashlib.sha256(values).digest()
            if digest not in places:
                weights += bytes(-len(weights) % ALIGNMENT)
                places[digest] = len(weights)
                weights += values
            tensor.CopyFrom(onnx.numpy_helper.from_array(array, tensor.name))
            set_external_data(tensor, "weights", places[digest], len(values))
            tensor.ClearField("raw_data")
        graphs.append(content.SerializeToString())
    return graphs, bytes(weights)
