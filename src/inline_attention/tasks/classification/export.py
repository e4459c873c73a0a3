"""Export a classifier to a file that runs without this library, and compare it with the model.

A graph for one image size is small: windows are plain reshapes. A graph for every size gathers windows by index, takes
longer to export and runs slower. onnxscript's optimizer is left out: it tries hundreds of thousands of patterns, and
takes longer than all the rest. onnxruntime simplifies the graph instead.

Shapes: `B` batch, `K` classes, `H`, `W` height and width in pixels.
"""

from __future__ import annotations

import json
import logging
import timeit
import warnings
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from inline_attention.support.files import replace_atomically
from inline_attention.tasks.classification.prediction import ImageClassifier

LARGEST_STRIDE = 32  # of models that do not say theirs
LARGEST_DIFFERENCE = 1e-3  # of scores, in proportion to the largest
TIMED_RUNS = 9

Runner = Callable[[Tensor], Tensor]  # images [B, 3, H, W] → scores [B, K]


class ExportError(RuntimeError):
    """An exported file does not agree with the model."""


@dataclass(frozen=True)
class Comparison:
    """One form of the model on the same images."""

    name: str
    size: int  # bytes of the file or of the weights
    milliseconds: float  # median time of one image
    difference: float  # largest difference of a score from the model's, in proportion to the largest score
    agreement: float  # share of images with the model's class
    accuracy: float | None  # share of images with the right class; None without labels


def trace(model: nn.Module, size: tuple[int, int], *, dynamic: bool = False) -> torch.export.ExportedProgram:
    """Return the graph of a model for every batch size, and for one image size (H, W) or every one."""
    sizes: dict[int, Any] = {0: torch.export.Dim("batch")}
    if dynamic:
        if getattr(getattr(model, "patch_embed", None), "strict_img_size", False):
            raise ValueError(
                f"{type(model).__name__} takes images of one size, so there is no export for every size; give --size "
                "in pixels, or train it with --set model.arguments.dynamic_img_size=true"
            )
        # Exporters specialize on a size of one: the coarsest grid must have two tokens per side.
        smallest = getattr(model, "largest_stride", LARGEST_STRIDE) + 1
        sizes |= {2: torch.export.Dim("height", min=smallest), 3: torch.export.Dim("width", min=smallest)}
        size = max(size[0], 64), max(size[0], 64) + 32  # two sides that differ, so that they stay two
    images = torch.zeros(2, getattr(model, "in_chans", 3), *size)
    with torch.no_grad(), warnings.catch_warnings():
        try:
            model.eval()(images)
        except Exception as error:  # most of timm's models take their own size only
            reason = f"{size[0]}×{size[1]}: {str(error).rstrip('.')}"
            raise ExportError(f"the model does not take images of {reason}. Leave --size out") from error
        warnings.simplefilter("ignore")
        program = torch.export.export(model, (images,), dynamic_shapes=(sizes,))
    _simplify(program.graph_module)
    return program


def _simplify(graph_module: torch.fx.GraphModule) -> None:
    """Remove operations that do nothing, and compute equal ones once (indices of windows): conversion takes long."""
    graph, aten = graph_module.graph, torch.ops.aten
    for node in list(graph.nodes):
        if node.target is aten._assert_tensor_metadata.default:
            graph.erase_node(node)
        elif (node.target is aten.dropout.default and not node.args[2]) or (
            node.target is aten.to.dtype and len(node.args) == 2 and node.args[0].meta["val"].dtype == node.args[1]
        ):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
    outputs = graph.output_node()
    first: dict[Any, torch.fx.Node] = {}
    for node in list(graph.nodes):
        if node.op != "call_function" or node.is_impure():
            continue
        key = (node.target, _hashable(node.args), _hashable(node.kwargs))
        if (same := first.setdefault(key, node)) is not node and node not in outputs.all_input_nodes:
            node.replace_all_uses_with(same)
            graph.erase_node(node)
    graph_module.recompile()


def _hashable(value: Any) -> Any:
    """Return arguments of an operation as a key; True and 1 differ."""
    if isinstance(value, (list, tuple)):
        return tuple(map(_hashable, value))
    if isinstance(value, dict):
        return tuple((name, _hashable(item)) for name, item in value.items())
    return type(value), value


def write_onnx(
    program: torch.export.ExportedProgram, path: Path, notes: dict[str, str], outputs: Sequence[str] = ("scores",)
) -> None:
    """Write a graph as ONNX, simplified by onnxruntime, with notes in its metadata and names of its outputs."""
    import onnx
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC  # standard operators only
    options.log_severity_level = 3
    with TemporaryDirectory() as folder, warnings.catch_warnings(), redirect_stdout(StringIO()):
        warnings.simplefilter("ignore")
        raw, simple = Path(folder, "raw.onnx"), Path(folder, "simple.onnx")
        exported = torch.onnx.export(
            program, (), dynamo=True, optimize=False, verbose=False, input_names=["images"], output_names=outputs
        )
        assert exported is not None
        exported.save(raw)
        options.optimized_model_filepath = str(simple)
        onnxruntime.InferenceSession(raw, options, providers=["CPUExecutionProvider"])
        content = onnx.load(simple)
        del content.graph.value_info[:]  # the quantizer transposes weights and does not correct their shapes here
        used = {node.domain for node in content.graph.node}
        for opset in [opset for opset in content.opset_import if opset.domain not in used]:
            content.opset_import.remove(opset)
        onnx.helper.set_model_props(content, notes)
        onnx.save(content, path)


def quantize_onnx(source: Path, target: Path, images: Tensor | None = None) -> None:
    """Write a file of `write_onnx` again, with linear layers in 8-bit integers.

    Images `[B, 3, H, W]` fix the ranges of activations. Without them, the ranges are found anew for every input, which
    is closer to the model.
    """
    import onnx
    from onnxruntime import quantization

    graph = onnx.load(source).graph
    matrices = {weight.name for weight in graph.initializer if len(weight.dims) == 2}
    options: dict[str, Any] = {
        "weight_type": quantization.QuantType.QInt8,
        "per_channel": True,
        "op_types_to_quantize": ["MatMul", "Gemm"],
        # Products of two activations stay as they are, and those of several matrices at once (the predictor of the
        # local residual), for which onnxruntime has no kernel.
        "nodes_to_exclude": [node.name for node in graph.node if len(node.input) > 1 and node.input[1] not in matrices],
    }
    logging.getLogger().addFilter(_is_not_advice)
    try:
        if images is None:
            quantization.quantize_dynamic(source, target, **options)
        else:
            batches = ({"images": batch.numpy()} for batch in images.split(8))
            reader: Any = SimpleNamespace(get_next=lambda: next(batches, None))
            quantization.quantize_static(source, target, reader, quant_format=quantization.QuantFormat.QDQ, **options)
    finally:
        logging.getLogger().removeFilter(_is_not_advice)


def _is_not_advice(record: logging.LogRecord) -> bool:
    return "pre-processing" not in record.getMessage()  # `write_onnx` has done it


def onnx_runner(path: Path) -> Runner:
    """Return a function that runs an ONNX file by onnxruntime on a CPU."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return lambda images: torch.from_numpy(session.run(None, {"images": images.numpy()})[0])


def export_classifier(
    classifier: ImageClassifier,
    path: Path,
    file_format: str,
    images: Tensor,
    targets: Tensor | None = None,
    *,
    dynamic: bool = False,
    int8: bool = False,
) -> list[Comparison]:
    """Write a classifier on a CPU to a file, "onnx" or "torch-export". On an error there is no file.

    Returns how the model, the exported file and the quantized file do on prepared images `[B, 3, H, W]` and, if known,
    their classes `[B]`. `dynamic` exports for every image size, not only for that of the images; `int8` writes linear
    layers in 8-bit integers (ONNX).

    Raises:
        ExportError: If the file's scores differ from the model's.
    """
    size = images.shape[2], images.shape[3]
    program = trace(classifier.model, size, dynamic=dynamic)
    compare = Comparer(classifier.model, images, targets)
    with replace_atomically(path) as temporary:
        if file_format == "torch-export":
            torch.export.save(program, temporary)
            results = [compare("torch.export", temporary.stat().st_size, program.module())]
            check_agreement(results[0])
        else:
            notes = onnx_notes(classifier, None if dynamic else size)
            results = write_compared_onnx(program, temporary, compare, notes, int8=int8)
    return [compare.of_model(), *results]


def write_compared_onnx(
    program: torch.export.ExportedProgram,
    path: Path,
    compare: Comparer,
    notes: dict[str, str],
    outputs: Sequence[str] = ("scores",),
    *,
    int8: bool = False,
) -> list[Comparison]:
    """Write a graph as ONNX, in 8-bit integers on request, and return the float32 form and the quantized one.

    Raises:
        ExportError: If the float32 form differs from the model.
    """
    with TemporaryDirectory() as folder:
        exact = Path(folder, "exact.onnx") if int8 else path
        write_onnx(program, exact, notes, outputs)
        results = [compare("ONNX", exact.stat().st_size, onnx_runner(exact))]
        check_agreement(results[0])
        if int8:
            quantize_onnx(exact, path)
            results.append(compare("ONNX int8", path.stat().st_size, onnx_runner(path)))
    return results


def check_agreement(result: Comparison) -> None:
    """Raise ExportError if the scores of an exported graph differ from the model's."""
    if not result.difference <= LARGEST_DIFFERENCE:
        raise ExportError(
            f"the exported graph's scores differ from the model's by {result.difference:.1e} of the largest, "
            f"expected {LARGEST_DIFFERENCE:.0e} at most; nothing is written"
        )


def onnx_notes(classifier: ImageClassifier, size: tuple[int, int] | None) -> dict[str, str]:
    """Return what a program needs to prepare images for an ONNX file, and to name its classes."""
    config = classifier.preparation
    notes: dict[str, Any] = {key: config[key] for key in ("mean", "std", "interpolation", "crop_pct")}
    notes |= {"class_names": classifier.class_names, "size": size}
    return {key: json.dumps(value) for key, value in notes.items()}


class Comparer:
    """Runs forms of a model on the same images."""

    def __init__(self, model: nn.Module, images: Tensor, targets: Tensor | None):
        self._model, self._images, self._targets = model, images, targets
        self._expected = _scores(model, images)

    def of_model(self) -> Comparison:
        """Run the model itself, whose size is that of its weights."""
        size = sum(tensor.nbytes for tensor in self._model.state_dict().values())
        return self("PyTorch", size, self._model, self._expected)

    def __call__(self, name: str, size: int, runner: Runner | nn.Module, scores: Tensor | None = None) -> Comparison:
        """Run one form of the model, whose file or weights have `size` bytes, unless its scores are known."""
        scores = _scores(runner, self._images) if scores is None else scores
        classes, expected = scores.argmax(1), self._expected.argmax(1)
        largest = self._expected.abs().max().clamp(min=1.0)
        return Comparison(
            name,
            size,
            _milliseconds(runner, self._images[:1]),
            float((scores - self._expected).abs().max() / largest),
            float((classes == expected).float().mean()),
            None if self._targets is None else float((classes == self._targets).float().mean()),
        )


@torch.no_grad()
def _scores(runner: Runner | nn.Module, images: Tensor) -> Tensor:
    parts: Sequence[Tensor] = images.split(8)
    return torch.cat([runner(part) for part in parts]).float()


@torch.no_grad()
def _milliseconds(runner: Runner | nn.Module, image: Tensor) -> float:
    runner(image)
    return 1e3 * median(timeit.repeat(lambda: runner(image), number=1, repeat=TIMED_RUNS))
