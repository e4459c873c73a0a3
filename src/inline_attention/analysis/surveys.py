"""The analyses of single heads and images, carried out over many images: what one model does with a sample of pictures.

Memory grows with the number of images by their figures alone: pictures and weights pass by one batch at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

from torch import Tensor

from inline_attention.analysis.collisions import CollisionRate, measure_collisions
from inline_attention.analysis.confusion import (
    TOLERANCE,
    ConfusedImage,
    ConfusionCount,
    WorstImages,
    confused_image,
    count_confusion,
)
from inline_attention.analysis.key_conditions import KeyCondition, measure_key_condition
from inline_attention.analysis.layer_attention import LayerAttention
from inline_attention.analysis.locality import SIDES, Locality, average, measure_locality
from inline_attention.analysis.masking import MaskingResult, measure_masking, planned_hidings
from inline_attention.analysis.pictures import PictureSample
from inline_attention.analysis.probes import capture_attention, choose_heads, choose_layers
from inline_attention.analysis.subjects import Subject
from inline_attention.data.batch import Batch

OnProgress: TypeAlias = Callable[[float], None]  # called with the share of the work just done; shares sum to one


def survey_injectivity(
    subject: Subject,
    sample: PictureSample,
    *,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    queries: int = 8,
    seed: int = 0,
    on_progress: OnProgress | None = None,
) -> tuple[list[CollisionRate], list[KeyCondition]]:
    """Collisions on the queries and keys of some layers, and the condition of the keys of all layers.

    Args:
        subject: The model.
        sample: The pictures.
        layers: Where to look for collisions, which takes time; the first, the middle and the last by default.
        heads: Numbers of the heads; all by default.
        queries: How many to try per head and image.
        seed: Of their choice.
        on_progress: Told of the work done.
    """
    everything = choose_layers(subject.model, None)
    some = [everything[0], everything[len(everything) // 2], everything[-1]]
    searched = choose_layers(subject.model, layers or some)
    rates: list[CollisionRate] = []
    conditions: list[KeyCondition] = []
    for batch, captured in _captured(subject, sample, None, None):
        for layer in captured:
            for image in range(len(batch)):
                for head in choose_heads(layer, heads):
                    conditions.append(measure_key_condition(layer, image, head))
                    if layer.index in searched:
                        rates += measure_collisions(layer, image, head, queries=queries, seed=seed)
            _advance(on_progress, len(batch) / len(sample) / len(captured))
    return rates, conditions


def survey_confusion(
    subject: Subject,
    sample: PictureSample,
    *,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    tolerance: float = TOLERANCE,
    worst: int = 4,
    on_progress: OnProgress | None = None,
) -> tuple[list[ConfusionCount], list[ConfusedImage]]:
    """Confused pairs of every image, layer and head, and the images with most of them.

    Args:
        subject: The model.
        sample: The pictures.
        layers: Numbers of the layers; all by default.
        heads: Numbers of the heads; all by default.
        tolerance: Of the count.
        worst: How many images to keep.
        on_progress: Told of the work done.
    """
    counts: list[ConfusionCount] = []
    worst_images = WorstImages(worst)
    for batch, captured in _captured(subject, sample, layers, on_progress):
        for image, index in enumerate(batch.indices.tolist()):
            name = sample.source.name(index)
            found, shown = _count_image(captured, image, name, batch.images[image], heads, tolerance)
            counts += found
            worst_images.add(shown)
    return counts, worst_images.sorted()


def survey_locality(
    subject: Subject,
    sample: PictureSample,
    *,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    sides: Sequence[int] = SIDES,
    on_progress: OnProgress | None = None,
) -> list[Locality]:
    """The locality of every layer and head, averaged over images.

    Args:
        subject: The model.
        sample: The pictures.
        layers: Numbers of the layers; all by default.
        heads: Numbers of the heads; all by default.
        sides: Of the neighbourhoods, in tokens.
        on_progress: Told of the work done.
    """
    measured = [
        item
        for batch, captured in _captured(subject, sample, layers, on_progress)
        for layer in captured
        for image in range(len(batch))
        for head in choose_heads(layer, heads)
        for item in measure_locality(layer, image, head, sides=sides)
    ]
    return average(measured)


def survey_masking(
    subject: Subject,
    sample: PictureSample,
    *,
    sides: Sequence[int] = SIDES,
    seed: int = 0,
    on_progress: OnProgress | None = None,
) -> list[MaskingResult]:
    """Accuracy under every hiding, on labelled pictures.

    Args:
        subject: The model.
        sample: The pictures, which are read once per hiding.
        sides: Of the neighbourhoods, in tokens.
        seed: Of the random tokens.
        on_progress: Told of the work done.
    """
    hidings = len(planned_hidings(subject.model, sides))

    def batches() -> Iterator[Batch]:
        for batch in sample.batches(subject, normalized=True):
            yield batch
            _advance(on_progress, len(batch) / len(sample) / hidings)

    return measure_masking(subject.model, batches, sides=sides, seed=seed)


def _captured(
    subject: Subject, sample: PictureSample, layers: Sequence[int] | None, on_progress: OnProgress | None
) -> Iterator[tuple[Batch, list[LayerAttention]]]:
    """Batches of uint8 pictures, with what the attention layers did with them."""
    for batch in sample.batches(subject):
        yield batch, capture_attention(subject.model, subject.normalize(batch.images), layers=layers)
        _advance(on_progress, len(batch) / len(sample))


def _count_image(
    captured: Sequence[LayerAttention],
    image: int,
    name: str,
    pixels: Tensor,
    heads: Sequence[int] | None,
    tolerance: float,
) -> tuple[list[ConfusionCount], ConfusedImage]:
    """The counts of one image of a batch, and the image with the confused tokens of its worst head."""
    counts: list[ConfusionCount] = []
    worst: tuple[int, LayerAttention, int, Tensor] | None = None
    for layer in captured:
        for head in choose_heads(layer, heads):
            count, confused = count_confusion(layer, image, head, name, tolerance=tolerance)
            counts.append(count)
            if worst is None or count.confused_pairs > worst[0]:
                worst = (count.confused_pairs, layer, head, confused)
    assert worst is not None, "a model has a layer, and a layer a head"
    _, layer, head, confused = worst
    pairs = sum(count.confused_pairs for count in counts)
    # A copy: a view of one image would keep the whole batch.
    return counts, confused_image(name, pixels.clone(), pairs, layer, head, confused)


def _advance(on_progress: OnProgress | None, share: float) -> None:
    if on_progress is not None:
        on_progress(share)
