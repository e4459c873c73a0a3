"""Cards of pictures: what each shows, what every model takes it for, and where the models look."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from inline_attention.report.evidence import Run
from inline_attention.report.html import Html, tag
from inline_attention.report.pictures import map_address

LEAST_FULL = 3.0  # times uniform: attention that is uniform must not look like attention to everything


def picture_cards(runs: Sequence[Run]) -> Html:
    """One card per picture, in the order of the first run's; runs of other data have cards of their own."""
    cards: dict[str, list[tuple[Run, Mapping[str, Any]]]] = {}
    for run in runs:
        for picture in run.pictures:
            cards.setdefault(f"{picture['index']} {picture['name']}", []).append((run, picture))
    return tag("div", *(_card(entries) for entries in cards.values()), class_="cards")


def _card(entries: Sequence[tuple[Run, Mapping[str, Any]]]) -> Html:
    first_run, first = entries[0]
    truth = _answer(first_run, first)["truth"]
    maps = [torch.tensor(picture["weights"]) for _, picture in entries]
    largest = max(LEAST_FULL, *(weights.abs().max().item() for weights in maps))
    figures = [_figure(run, picture, weights, largest) for (run, picture), weights in zip(entries, maps, strict=True)]
    size = f"{first['name']}: {truth}"
    head = tag("header", tag("img", src=first["picture"], alt=f"Picture {size}", class_="picture"),
               tag("p", tag("strong", truth), tag("span", first["name"], class_="note")))  # fmt: skip
    return tag("article", head, tag("div", *figures, class_="maps"), class_="card", aria_label=size)


def _figure(run: Run, picture: Mapping[str, Any], weights: torch.Tensor, largest: float) -> Html:
    answer = _answer(run, picture)
    is_right = answer["guess"] == answer["truth"]
    height, width = weights.shape
    row, column = picture["token"]
    ring = (
        f"left:{100 * column / width:.2f}%;top:{100 * row / height:.2f}%;"
        f"width:{100 / width:.2f}%;height:{100 / height:.2f}%"
    )
    spoken = (
        f"Attention of {run.label} from row {row + 1}, column {column + 1} of {height}×{width} tokens, in layer "
        f"{picture['layer']}: from {weights.min():.1f} to {weights.max():.1f} times uniform"
    )
    stack = tag(
        "div",
        tag("img", src=picture["picture"], alt="", class_="under"),
        tag("img", src=map_address(weights, largest), alt=spoken, class_="over"),
        tag("span", class_="ring", style=ring),
        class_="stack",
    )
    verdict = tag("span", "✓ " if is_right else "✗ ", class_="right" if is_right else "wrong")
    said = tag("span", "right: " if is_right else "wrong: ", class_="spoken")
    text = f"{answer['guess']}, {100 * answer['probability']:.0f} %"
    return tag("figure", stack, tag("figcaption", tag("b", run.label), tag("span", verdict, said, text)),
               class_=run.style.classes)  # fmt: skip


def _answer(run: Run, picture: Mapping[str, Any]) -> Mapping[str, Any]:
    return next(answer for answer in run.found["answers"] if answer["index"] == picture["index"])
