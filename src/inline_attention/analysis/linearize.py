"""Which blocks of a softmax network can go linear for free.

For each block: the share of softmax's output beyond the mean value that InLine and linear attention explain on the same
queries, keys and values; and what the final tokens lose if this block alone is converted, and if it is converted
together with all that lose less. Nothing is trained; InLine is calibrated on the first pictures, as `inline linearize`
does it.

Shapes: `B` batch, `N` tokens, `H` heads, `D` head dim, `C` channels.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from inline_attention.analysis.probes import LayerAttention, attention_layers, observed
from inline_attention.analysis.subjects import (
    OnProgress,
    PictureSample,
    Subject,
    as_probed_softmax,
    open_pictures,
    trained_subject,
)
from inline_attention.engine.config import TrainConfig
from inline_attention.layers.calibration import beyond_mean, fitted_gains
from inline_attention.models.described import conversion_of
from inline_attention.models.reading import find_weights, open_checkpoint
from inline_attention.ops.api import inline_attention
from inline_attention.support.figures import Axes, Chart, LegendEntry, Panel, Style, draw_line, whole_numbers
from inline_attention.tasks.classification.distillation import Variance, run_with_tokens

FREE = 10.0  # percent of the final tokens' variance that may be lost
RULES = ("inline", "linear")
LINEAR: dict[str, Any] = {"normalization": "divide", "feature_map": "relu"}


@dataclass(frozen=True)
class BlockResult:
    """What converting one block costs. Shares are of variances, in percent; top-1 is None without labels."""

    block: int  # number for --keep-softmax
    name: str  # of the attention in the model
    inline_r2: float  # of softmax's output beyond the mean value, explained by InLine
    linear_r2: float  # the same by linear attention
    lost_alone: float  # of the final tokens, if only this block is converted to InLine
    top1_alone: float | None
    order: int  # place in the order of loss, from 1
    lost_together: float  # of the final tokens, if it and all blocks before it in that order are converted
    top1_together: float | None


@dataclass(frozen=True)
class LinearizeSurvey:
    """The blocks of a model, in its own order."""

    blocks: tuple[BlockResult, ...]
    top1: float | None  # with softmax in all blocks; None without labels
    images: int

    def keep_softmax(self, free: float = FREE) -> list[int]:
        """Return the fewest blocks to keep so that converting the others loses at most `free` percent, untrained."""
        by_order = sorted(self.blocks, key=lambda block: block.order)
        fitting = [block.order for block in by_order if block.lost_together <= free]
        return sorted(block.block for block in by_order[max(fitting, default=0) :])

    def lose_most(self, count: int) -> list[int]:
        """Return the blocks that lose most when they alone are converted."""
        worst = sorted(self.blocks, key=lambda block: block.lost_alone, reverse=True)[:count]
        return sorted(block.block for block in worst)


def softmax_subject(path: Path, *, model_name: str | None = None, **options: Any) -> Subject:
    """Load a softmax model with its weights; see `trained_subject` for the options.

    Raises `CheckpointError` if there are no weights, or they do not fit; `ValueError` without softmax over tokens.
    """
    file = open_checkpoint(find_weights(path))
    if conversion_of(file) is not None:
        raise ValueError(f"{file.path} has converted attention already; give the softmax model it was made from")
    subject = trained_subject(file, model_name=model_name, **options)
    as_probed_softmax(subject.model)
    return subject


def survey_linearize(
    subject: Subject, sample: PictureSample, *, on_progress: OnProgress = lambda _: None
) -> LinearizeSurvey:
    """Measure every block alone, then together in the order of loss. Pictures are read for each of these passes."""
    passes = 2 * len(attention_layers(subject.model)) + 1
    labelled = knows_classes(subject, sample)

    def batches() -> Iterator[tuple[Tensor, Tensor | None]]:
        for batch in sample.batches(subject, normalized=labelled, passes=passes, on_progress=on_progress):
            yield (batch.images, batch.targets) if labelled else (subject.normalize(batch.images), None)

    return measure_blocks(subject.model, batches)


def knows_classes(subject: Subject, sample: PictureSample) -> bool:
    """True if the model classifies, and the pictures have its classes."""
    names = sample.source.class_names
    if subject.class_names is not None:
        return set(names) <= set(subject.class_names)
    return len(names) > 1 and getattr(subject.model, "num_classes", 0) == len(names)


@torch.no_grad()
def measure_blocks(model: nn.Module, batches: Callable[[], Iterator[tuple[Tensor, Tensor | None]]]) -> LinearizeSurvey:
    """Measure a model with observable softmax attention on images and labels (or None), read anew for every pass."""
    names = list(attention_layers(model))
    shares = {rule: [Variance() for _ in names] for rule in RULES}
    reference: list[tuple[Tensor, Tensor]] = []  # output and tokens of each batch, on the CPU
    correct = images = 0
    labelled = False

    def beyond(layer: LayerAttention, gains: dict[int, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the outputs of softmax and calibrated InLine, minus the mean value; fit missing gains of layers."""
        softmax, second = beyond_mean(layer.q, layer.k, layer.v, layer.rule.scale)
        if layer.index not in gains:
            grid = slice(layer.num_prefix_tokens, None)
            by_head = getattr(model.get_submodule(layer.name), "q_norm", None) is None
            gains[layer.index] = fitted_gains(softmax[:, grid], second[:, grid], by_head=by_head)
        return softmax, second * gains[layer.index][:, None]

    observed_gains: dict[int, Tensor] = {}

    def compare(layer: LayerAttention) -> None:
        softmax, inline = beyond(layer, observed_gains)
        linear = inline_attention(layer.q, layer.k, layer.v, scale=layer.rule.scale, **LINEAR)
        shares["inline"][layer.index].add_beyond(inline, softmax)
        shares["linear"][layer.index].add_beyond(linear - layer.v.mean(1, keepdim=True), softmax)

    with observed(model, compare):
        for pixels, labels in batches():
            output, tokens = run_with_tokens(model, pixels)
            reference.append((output.cpu(), tokens.cpu()))
            images, labelled = images + len(pixels), labels is not None
            correct += 0 if labels is None else int((output.argmax(1) == labels).sum())
    if not images:
        raise ValueError("there is no picture to look at; check --data-dir and --split")

    def loss(blocks: Collection[int]) -> tuple[float, float | None]:
        lost, right = Variance(), 0
        gains: dict[int, Tensor] = {}

        def converted(layer: LayerAttention) -> Tensor:
            """Return what the layer mixes, `[B, N, C]`: InLine, and softmax for class and register tokens."""
            softmax, inline = beyond(layer, gains)
            prefix = layer.num_prefix_tokens
            mixed = torch.cat([softmax[:, :prefix], inline[:, prefix:]], dim=1)
            return (mixed + layer.v.mean(1, keepdim=True)).flatten(2)

        with observed(model, converted, layers=list(blocks)):
            for (pixels, labels), (_, expected) in zip(batches(), reference, strict=True):
                output, tokens = run_with_tokens(model, pixels)
                lost.add(tokens.cpu(), expected)
                right += 0 if labels is None else int((output.argmax(1) == labels).sum())
        return 100 * (1 - lost.explained), 100 * right / images if labelled else None

    alone = [loss([block]) for block in range(len(names))]
    order = sorted(range(len(names)), key=lambda block: alone[block][0])
    together = {block: loss(order[: place + 1]) for place, block in enumerate(order)}
    blocks = tuple(
        BlockResult(
            block, name, 100 * shares["inline"][block].explained, 100 * shares["linear"][block].explained,
            *alone[block], order.index(block) + 1, *together[block],
        )
        for block, name in enumerate(names)
    )  # fmt: skip
    return LinearizeSurvey(blocks, 100 * correct / images if labelled else None, images)


def blocks_that_lose_most(config: TrainConfig, count: int, *, images: int) -> list[int]:
    """Return the numbers of the blocks of a run's teacher that lose most when converted, on some of its pictures."""
    data, settings = config.data, config.distillation
    source = settings.teacher or config.model.initial_checkpoint
    assert source is not None
    # The teacher as the distillation builds it: bare weights do not say how.
    size = settings.teacher_size or config.model.img_size
    pixels = None if size is None else (size, size) if isinstance(size, int) else size
    model = replace(config.model, img_size=size, drop_path=None)
    options: dict[str, Any] = {"size": pixels, "device": config.run.device, **model.model_arguments()}
    subject = softmax_subject(Path(source), model_name=model.name, **options)
    if count >= (blocks := len(attention_layers(subject.model))):
        raise ValueError(
            f"--keep-softmax {count} keeps the {count} blocks that lose most, and there are {blocks}; give less, or "
            f"name blocks from 0 to {blocks - 1}, such as --keep-softmax {blocks - 1},"
        )
    dataset = "folder" if data.dataset == "pictures" else data.dataset
    pictures = open_pictures(dataset, None if data.dir is None else Path(data.dir), data.train_split)
    sample = PictureSample(pictures, images=images, seed=config.training.seed, batch_size=8)
    return survey_linearize(subject, sample).lose_most(count)


def draw_linearize(
    surveys: Mapping[str, LinearizeSurvey], note: str, folder: Path, *, free: float = FREE
) -> list[Path]:
    """Write `linearize.png` and `.svg`: the share of softmax explained by block, and the loss alone and together."""

    def explained(axes: Axes) -> None:
        for number, survey in enumerate(surveys.values()):
            for rule in RULES:
                points = [(block.block, max(-100.0, getattr(block, f"{rule}_r2"))) for block in survey.blocks]
                draw_line(axes, Style(rule, number), points)
        axes.set(ylabel="R², %", ylim=(-105, 105))
        whole_numbers(axes, "block")

    def lost(axes: Axes, *, together: bool) -> None:
        for number, survey in enumerate(surveys.values()):
            alone = [(item.block, item.lost_alone) for item in survey.blocks]
            in_order = sorted((item.order, item.lost_together) for item in survey.blocks)
            draw_line(axes, Style("inline", number), [(0, 0.0), *in_order] if together else alone)
        if together:
            axes.axhline(free, color=Style("uniform").color, linewidth=1, linestyle=Style("uniform").dashes)
        axes.set(ylabel="% of the final tokens", ylim=(0, 1.07 * max(1.0, axes.dataLim.ymax)))
        whole_numbers(axes, "converted blocks, least loss first" if together else "block")

    panels = [
        Panel("Softmax explained, beyond the mean value", explained),
        Panel("Lost if this block alone is converted", partial(lost, together=False)),
        Panel("Lost as more blocks are converted", partial(lost, together=True)),
    ]
    legend = [
        LegendEntry(f"{name}, {label}" if len(surveys) > 1 else name, Style(rule, number))
        for number, label in enumerate(surveys)
        for rule, name in (("inline", "InLine"), ("linear", "linear"))
    ]
    images = max(survey.images for survey in surveys.values())
    small_print = (
        f"{note} {images} images, nothing is trained. R²: 100 % is softmax's output, 0 % the mean value; lower values "
        "than -100 % are drawn there. Lost: squared change of the final tokens over their variance; dashed: "
        f"{free:g} %."
    )
    chart = Chart(panels, legend)
    return chart.save(folder, "linearize", title="Which blocks go linear", small_print=small_print)
