"""What a report measures of one run: confusion, locality, masking and answers, on pictures the run did not learn from.

Everything comes back as plain data, so that it can be kept in a file. What cannot be measured raises one of `TROUBLE`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import fmean
from typing import Any

import torch

from inline_attention.analysis.attention_maps import interesting_tokens, measure_attention_maps
from inline_attention.analysis.confusion import TOLERANCE
from inline_attention.analysis.locality import SIDES
from inline_attention.analysis.pictures import PictureSample
from inline_attention.analysis.probes import capture_attention
from inline_attention.analysis.result_files import flat_row
from inline_attention.analysis.subjects import Subject
from inline_attention.analysis.surveys import survey_confusion, survey_locality, survey_masking
from inline_attention.data.broken import BrokenImagesError
from inline_attention.data.loading import DataWorkerError
from inline_attention.data.sources import ImageSource
from inline_attention.report.pictures import picture_address

Measurement = Callable[[Subject, ImageSource, "SampleSizes"], Any]
SHOWN_ANSWERS = 6
SMALL = 100  # tokens up to which a model takes no time worth sharing among cores
MASKED_SIDES = 2  # of the smallest; every one takes four passes over the pictures of a model with a local term
TROUBLE = (ValueError, BrokenImagesError, DataWorkerError, OSError)


class SampleSizes:
    """How many pictures each measurement takes: for three models about a minute on a CPU, or on a GPU."""

    def __init__(self, tokens: int, device: torch.device):
        """Fewer where attention matrices are large.

        Args:
            tokens: Of the layer that has most.
            device: A GPU takes more in the same time.
        """
        small, medium = tokens <= SMALL, tokens <= 400
        factor = 1 if device.type == "cpu" else 8
        self.attention = factor * (120 if small else 12 if medium else 2)
        self.masking = factor * (360 if small else 48 if medium else 8)
        self.answers = factor * (360 if small else 128 if medium else 32)

    def described(self) -> dict[str, int]:
        """For the key of a kept measurement."""
        return dict(vars(self))


@contextmanager
def suitable_threads(tokens: int) -> Iterator[None]:
    """One thread while a small model is measured.

    It gains next to nothing from a second core, and becomes ten times as slow when another program wants that core too:
    threads wait for each other in every operation.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1 if tokens <= SMALL else threads)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def grid_of(subject: Subject) -> tuple[int, tuple[int, int]]:
    """Most tokens of any layer, and the smallest sides of any layer's grid."""
    blank = torch.zeros(1, 3, *subject.image_size, dtype=torch.uint8)
    layers = capture_attention(subject.model, subject.normalize(blank))
    sides = zip(*(layer.grid_size for layer in layers), strict=True)
    height, width = (min(values) for values in sides)
    return max(layer.num_tokens for layer in layers), (height, width)


def _confusion(subject: Subject, source: ImageSource, sizes: SampleSizes) -> dict[str, Any]:
    """Confused pairs of every picture over all layers and heads, as a share of the pairs that differ."""
    sample = PictureSample(source, images=sizes.attention)
    counts, _ = survey_confusion(subject, sample, worst=0)
    images: dict[str, list[int]] = {}
    for count in counts:
        pairs = images.setdefault(count.image, [0, 0])
        pairs[0] += count.confused_pairs
        pairs[1] += count.distinct_pairs
    rows = [
        {"image": name, "confused": confused, "distinct": distinct} for name, (confused, distinct) in images.items()
    ]
    return {"tolerance": TOLERANCE, "images": rows}


def _locality(subject: Subject, source: ImageSource, sizes: SampleSizes) -> list[dict[str, Any]]:
    """Share of |w| in the neighbourhood by layer, side and local term, mean over heads and pictures."""
    sample = PictureSample(source, images=sizes.attention)
    groups: dict[tuple[Any, ...], list[Any]] = {}
    for item in survey_locality(subject, sample, sides=_sides(subject)):
        groups.setdefault((item.layer, item.side, item.local_term), []).append(item)
    return [
        {
            "layer": layer,
            "side": side,
            "local_term": local_term,
            "share": fmean(item.share for item in items),
            "uniform": fmean(item.uniform for item in items),
        }
        for (layer, side, local_term), items in groups.items()
    ]


def _masking(subject: Subject, source: ImageSource, sizes: SampleSizes) -> list[dict[str, Any]]:
    """Top-1 with neighbourhoods or random tokens hidden."""
    sample = PictureSample(source, images=sizes.masking, batch_size=32)
    return [flat_row(result) for result in survey_masking(subject, sample, sides=_sides(subject)[:MASKED_SIDES])]


def _answers(subject: Subject, source: ImageSource, sizes: SampleSizes) -> list[dict[str, Any]]:
    """What the model takes every sampled picture for, and how sure it is, by the picture's number."""
    if subject.class_names is None:
        raise ValueError("its weights do not say which classes they know")
    answers: list[dict[str, Any]] = []
    for batch in PictureSample(source, images=sizes.answers, batch_size=32).batches(subject):
        with torch.inference_mode():
            probabilities = subject.model(subject.normalize(batch.images)).float().softmax(-1).cpu()
        for index, target, row in zip(batch.indices.tolist(), batch.targets.tolist(), probabilities, strict=True):
            guess, truth = int(row.argmax()), source.class_names[target]
            known = subject.class_names.index(truth) if truth in subject.class_names else None
            answers.append(
                {
                    "index": index,
                    "truth": truth,
                    "guess": subject.class_names[guess],
                    "probability": row[guess].item(),
                    "truth_probability": 0.0 if known is None else row[known].item(),
                }
            )
    return answers


MEASUREMENTS: dict[str, Measurement] = {
    "confusion": _confusion,
    "locality": _locality,
    "masking": _masking,
    "answers": _answers,
}


def shown_pictures(answers: Sequence[Sequence[dict[str, Any]]], count: int = SHOWN_ANSWERS) -> list[int]:
    """Numbers of the pictures to show: the hardest, each class once before any comes twice.

    Args:
        answers: Of several models. Picking what one of them finds hardest would make the others look better than it.
        count: How many to show.
    """
    truths: dict[int, str] = {}
    probabilities: dict[int, list[float]] = {}
    for answer in itertools.chain(*answers):
        truths[answer["index"]] = answer["truth"]
        probabilities.setdefault(answer["index"], []).append(answer["truth_probability"])
    hardest = sorted(probabilities, key=lambda index: fmean(probabilities[index]))
    seen: set[str] = set()
    first, further = [], []
    for index in hardest:
        (further if truths[index] in seen else first).append(index)
        seen.add(truths[index])
    return [*first, *further][:count]


def picture_and_map(subject: Subject, source: ImageSource, index: int) -> dict[str, Any]:
    """One picture as the model sees it, and where its most striking token looks in the middle layer."""
    pixels = subject.transform()(source.load(index))
    maps = measure_attention_maps(subject, pixels)
    (place,) = interesting_tokens(pixels, maps.grid_size, count=1)
    chosen = measure_attention_maps(subject, pixels, layer=maps.layer, tokens=[place])
    return {
        "index": index,
        "name": source.name(index),
        "picture": picture_address(pixels),
        "layer": chosen.layer,
        "token": list(place),
        "weights": chosen.maps[0].times_uniform.tolist(),
    }


def _sides(subject: Subject) -> list[int]:
    """Neighbourhoods that leave something of the smallest grid outside."""
    _, grid = grid_of(subject)
    return [side for side in SIDES if side < min(grid)] or [SIDES[0]]
