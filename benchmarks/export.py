"""Export on a CPU: time and size of graphs, and three ways to 8-bit integers.

    python benchmarks/export.py [--names inline_deit_tiny] [--dynamic/--no-dynamic] [--epochs 30]

1. For the tiny model of each family: seconds to trace and to convert to ONNX, for 224² and for every image size, with
   the graph's operations and file. Processor time is given beside wall time: other programs may run on the machine.
2. InLine-DeiT-T at 224² (random weights) and a small InLine-DeiT trained on digits: size, latency, agreement and
   accuracy of ONNX in float32 and of onnxruntime's dynamic and static and torchao's quantization.

Results: benchmarks/results/export.{json,md}.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from inline_attention import create_model
from inline_attention.benchmark.environment import describe_environment
from inline_attention.benchmark.results import markdown_table, write_json, write_markdown
from inline_attention.data.datasets import digits
from inline_attention.engine.config import with_overrides
from inline_attention.engine.train import train
from inline_attention.models.reading import find_weights
from inline_attention.recipes import get_recipe
from inline_attention.tasks.classification.export import (
    Comparer,
    Comparison,
    onnx_runner,
    quantize_onnx,
    trace,
    write_onnx,
)
from inline_attention.tasks.classification.prediction import ImageClassifier

RESULTS = Path(__file__).parent / "results"
NAMES = ["inline_deit_tiny", "inline_pvt_tiny", "inline_swin_tiny", "inline_cswin_tiny"]


def timed(work: Callable[[], Any]) -> tuple[Any, float, float]:
    """Return a result, and wall and processor time in seconds."""
    wall, processor = time.perf_counter(), time.process_time()
    result = work()
    return result, time.perf_counter() - wall, time.process_time() - processor


def measure_export(name: str, dynamic: bool) -> dict[str, Any]:
    model = create_model(name).eval()
    with TemporaryDirectory() as folder:
        path = Path(folder, "model.onnx")
        program, trace_wall, trace_cpu = timed(lambda: trace(model, (224, 224), dynamic=dynamic))
        _, onnx_wall, onnx_cpu = timed(lambda: write_onnx(program, path, {}))
        runner, open_wall, _ = timed(lambda: onnx_runner(path))
        images = torch.randn(3, 3, 160, 224) if dynamic else torch.randn(3, 3, 224, 224)
        with torch.no_grad():
            expected = model(images)
        error = float((runner(images) - expected).abs().max() / expected.abs().max())
        assert error < 1e-4, f"{name} is exported wrongly: {error}"  # before any figure is reported
        return {
            "model": name, "sizes": "every" if dynamic else "224²", "operations": len(program.graph.nodes),
            "trace_seconds": trace_wall, "trace_cpu_seconds": trace_cpu, "onnx_seconds": onnx_wall,
            "onnx_cpu_seconds": onnx_cpu, "open_seconds": open_wall, "mib": path.stat().st_size / 2**20,
            "relative_error": error,
        }  # fmt: skip


def measure_quantizers(label: str, classifier: ImageClassifier, images: Tensor, targets: Tensor | None) -> list[Any]:
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_

    model = classifier.model
    compare = Comparer(model, images, targets)
    results = [compare.of_model()]
    with TemporaryDirectory() as folder:
        exact, small = Path(folder, "exact.onnx"), Path(folder, "small.onnx")
        write_onnx(trace(model, (images.shape[2], images.shape[3])), exact, {})
        results.append(compare("ONNX", exact.stat().st_size, onnx_runner(exact)))
        for name, calibration in (("ONNX int8, dynamic", None), ("ONNX int8, static", images[:32])):
            quantize_onnx(exact, small, calibration)
            results.append(compare(name, small.stat().st_size, onnx_runner(small)))
        quantized = copy.deepcopy(model)
        quantize_(quantized, Int8DynamicActivationInt8WeightConfig())
        torch.save(quantized.state_dict(), Path(folder, "ao.pt"))
        results.append(compare("torchao int8, dynamic", Path(folder, "ao.pt").stat().st_size, quantized))
    return [{"subject": label, **vars(result)} for result in results]


def digits_classifier(folder: Path, epochs: int) -> tuple[ImageClassifier, Tensor, Tensor]:
    overrides = [f"run.output={folder}", "run.experiment=digits", f"training.epochs={epochs}"]
    train(with_overrides(get_recipe("digits").config, overrides))
    classifier = ImageClassifier.from_checkpoint(find_weights(folder / "digits"), device="cpu")
    source = digits("validation").with_classes(classifier.class_names)
    images = torch.stack([classifier.prepare_image(source.load(index)) for index in range(len(source))])
    return classifier, images, torch.from_numpy(source.targets)


def deit_classifier() -> tuple[ImageClassifier, Tensor]:
    torch.manual_seed(0)
    classifier = ImageClassifier(create_model("inline_deit_tiny"), [str(index) for index in range(1000)], device="cpu")
    source = digits("validation")
    return classifier, torch.stack([classifier.prepare_image(source.load(index)) for index in range(0, 320, 10)])


def export_table(rows: list[Any]) -> str:
    header = [
        "model",
        "image size",
        "operations",
        "trace (s)",
        "ONNX (s)",
        "together (s)",
        "processor (s)",
        "open (s)",
        "MiB",
    ]
    cells = [
        [
            row["model"], row["sizes"], str(row["operations"]),
            f"{row['trace_seconds']:.1f}", f"{row['onnx_seconds']:.1f}",
            f"{row['trace_seconds'] + row['onnx_seconds']:.1f}",
            f"{row['trace_cpu_seconds'] + row['onnx_cpu_seconds']:.1f}", f"{row['open_seconds']:.1f}",
            f"{row['mib']:.1f}",
        ]
        for row in rows
    ]  # fmt: skip
    return markdown_table(header, cells)


def quantizer_table(rows: list[Any]) -> str:
    header = ["model", "form", "MiB", "ms", "largest difference", "agreement", "accuracy"]
    cells = []
    for row in rows:
        result = Comparison(**{key: value for key, value in row.items() if key != "subject"})
        accuracy = "–" if result.accuracy is None else f"{result.accuracy:.1%}"
        cells.append([
            row["subject"], result.name, f"{result.size / 2**20:.2f}", f"{result.milliseconds:.1f}",
            f"{result.difference:.1e}", f"{result.agreement:.1%}", accuracy,
        ])  # fmt: skip
    return markdown_table(header, cells)


def main(
    names: Annotated[list[str] | None, typer.Option(help="Models to export; repeatable.")] = None,
    dynamic: Annotated[bool, typer.Option(help="Export for every image size, too.")] = True,
    epochs: Annotated[int, typer.Option(min=1, help="Epochs on digits.")] = 30,
    output: Annotated[Path, typer.Option(help="Folder for the results.")] = RESULTS,
) -> None:
    exports: list[Any] = []
    quantizers: list[Any] = []
    environment = {**describe_environment(), "threads": str(torch.get_num_threads())}

    def write() -> None:
        write_json(output / "export.json", {"environment": environment, "exports": exports, "quantizers": quantizers})
        body = ["## Export", export_table(exports), "## 8-bit integers", quantizer_table(quantizers)]
        write_markdown(output / "export.md", "Export on a CPU", environment, "\n\n".join(body))

    for is_dynamic in [False, True][: 1 + dynamic]:
        for name in names or NAMES:
            exports.append(measure_export(name, is_dynamic))
            print(exports[-1], flush=True)
            write()
        if not is_dynamic:
            quantizers += measure_quantizers("InLine-DeiT-T, 224²", *deit_classifier(), None)
            with TemporaryDirectory() as folder:
                quantizers += measure_quantizers("digits, 8²", *digits_classifier(Path(folder), epochs))
            write()
    print(output / "export.md")


if __name__ == "__main__":
    typer.run(main)
