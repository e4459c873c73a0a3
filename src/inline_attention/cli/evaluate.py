"""`inline eval`: evaluate the model of a checkpoint on a dataset."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

from typer import Option

from inline_attention.cli.options import Device, OutsideFiles
from inline_attention.cli.printing import fail, say

if TYPE_CHECKING:
    from inline_attention.tasks.task import MetricTable


def evaluate(
    checkpoint: Annotated[
        Path, Option("--checkpoint", "-c", help="Weights file, checkpoint, run or shipped model.", show_default=False)
    ],
    data_dir: Annotated[Path | None, Option(help="Data folder.", show_default="the run's")] = None,
    dataset: Annotated[
        str | None,
        Option(
            help="folder, digits, cifar10, hfds/NAME or wds/PATTERN (classifiers).", show_default="the run's, or folder"
        ),
    ] = None,
    split: Annotated[str | None, Option(help="Split or subfolder.", show_default="the run's, or validation")] = None,
    repair: Annotated[bool, Option("--repair", help="Repair faults of dense annotations.")] = False,
    allow_outside_files: OutsideFiles = False,
    model: Annotated[str | None, Option(help="Model name.", show_default="the file's")] = None,
    size: Annotated[int | None, Option(min=1, help="Image size in pixels.", show_default="the model's")] = None,
    use_ema: Annotated[bool, Option("--use-ema", help="Use averaged weights (EMA); fail if there are none.")] = False,
    image_folder: Annotated[
        str | None,
        Option(help="Images below --data-dir, such as img/{split} (segmenters).", show_default="by usual names"),
    ] = None,
    map_folder: Annotated[
        str | None,
        Option(help="Label maps below --data-dir, such as ann/{split} (segmenters).", show_default="by usual names"),
    ] = None,
    batch_size: Annotated[
        int | None,
        Option("--batch-size", "-b", min=1, help="Images per batch.", show_default="64 for a classifier, else 4"),
    ] = None,
    workers: Annotated[
        int, Option("--workers", "-j", min=0, help="Processes that read images, at most one per core.")
    ] = 4,
    amp: Annotated[str, Option(help="bf16, fp16 or off.")] = "off",
    device: Device = "auto",
    results_file: Annotated[Path | None, Option(help="Write the metrics to this JSON file.")] = None,
) -> None:
    """Evaluate a checkpoint: top-1 and top-5 of a classifier, AP of a detector, mIoU of a segmenter."""
    if results_file is not None:  # before the work is done, not after
        if results_file.is_dir():
            fail(f"--results-file {results_file} is a folder; name a file, such as {results_file / 'results.json'}")
        results_file.parent.mkdir(parents=True, exist_ok=True)
    from inline_attention.engine.evaluate import data_of_run, describe_weights, evaluate_checkpoint
    from inline_attention.models.reading import find_weights
    from inline_attention.tasks.task import DataSection

    notes: list[str] = []

    def note(text: str) -> None:
        notes.append(text)
        say(text, err=True)

    is_main = int(os.environ.get("RANK", "0")) == 0  # under torchrun the first process prints
    if is_main and (weights := find_weights(checkpoint, averaged=use_ema)).exists():
        say(f"weights: {describe_weights(weights)}", err=True)
    data = data_of_run(checkpoint) if data_dir is None and dataset is None else None
    if data is None:
        data = DataSection(dataset or "folder", None if data_dir is None else str(data_dir))
    elif is_main:
        say(f"data of the run: {data.dir or data.dataset}, split {split or data.val_split}", err=True)
    data = dataclasses.replace(
        data, val_split=split or data.val_split, repair=repair or data.repair,
        image_folder=image_folder or data.image_folder, map_folder=map_folder or data.map_folder,
        allow_outside_files=allow_outside_files, workers=workers,
    )  # fmt: skip
    metrics = evaluate_checkpoint(
        checkpoint, data, model_name=model, size=size, use_ema=use_ema, batch_size=batch_size, amp=amp, device=device,
        on_note=note,
    )  # fmt: skip
    if metrics is None:
        return  # under torchrun the first process prints
    say(metrics)
    for table in metrics.tables:
        say("\n" + "\n".join(_lines(table)))
    if results_file is not None:
        figures = _with_nulls(dataclasses.asdict(cast(Any, metrics)))
        content = {"checkpoint": str(checkpoint), **figures, "repaired": notes}
        try:
            results_file.write_text(json.dumps(content, indent=2) + "\n")
        except OSError as error:
            fail(f"cannot write {results_file}: {error.strerror}; name another file with --results-file")
        say(f"Metrics written to {results_file}")


def _lines(table: MetricTable) -> list[str]:
    """Return a table of equal columns, with a dash for a metric that cannot be measured."""
    columns = list(dict.fromkeys(column for row in table.values() for column in row))
    names = [" ".join(name.split()) for name in table]
    width = max(map(len, names), default=0)
    lines = [" " * width + "".join(f"  {column:>8}" for column in columns)]
    for name, row in zip(names, table.values(), strict=True):
        cells = ("–" if math.isnan(row[column]) else f"{row[column]:.1f}" for column in columns)
        lines.append(f"{name:<{width}}" + "".join(f"  {cell:>8}" for cell in cells))
    return lines


def _with_nulls(value: Any) -> Any:
    """Replace NaN, which JSON does not have, by None."""
    if isinstance(value, dict):
        return {key: _with_nulls(item) for key, item in value.items()}
    return None if isinstance(value, float) and math.isnan(value) else value
