"""`inline models`: list the models and their sizes."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, Annotated

import typer

from inline_attention.cli.printing import fail, make_console, progress_bar, say_json
from inline_attention.support.text import did_you_mean

if TYPE_CHECKING:
    from rich.table import Table

    from inline_attention.benchmark.model_size import ModelSize


def models(
    pattern: Annotated[str | None, typer.Argument(help="Names to list, such as '*swin*'.", show_default=False)] = None,
    all_models: Annotated[bool, typer.Option("--all", help="List the softmax and linear twins too.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the models: parameters and multiply-adds counted here, accuracy from the paper."""
    from inline_attention.models import list_models

    names = list_models(pattern or ("*" if all_models else "inline_*"))
    if not names:
        fail(f"no model matches {pattern!r}{_suggestion(pattern or '')}")
    sizes = _measure_with_progress(names)
    families = [sorted(family, key=lambda name: sizes[name].macs) for _, family in groupby(names, _family)]
    if as_json:
        say_json([_as_json(name, sizes[name]) for family in families for name in family])
    else:
        make_console(log_width=None).print(_table(families, sizes))


def _family(name: str) -> str:
    kind, family, *_ = name.split("_")
    return f"{kind}_{family}"


def _suggestion(pattern: str) -> str:
    from inline_attention.models import list_models

    core = pattern.strip("*").lower()
    if core and list_models(f"*{core}*"):
        return f"; try '*{core}*'"
    return did_you_mean(core, list_models(), most=3) or "; `inline models --all` lists all names"


def _measure_with_progress(names: list[str]) -> dict[str, ModelSize]:
    from inline_attention.benchmark.model_size import measure_model_size

    sizes: dict[str, ModelSize] = {}
    with progress_bar(make_console(stderr=True)) as progress:
        for name in progress.track(names, description="counting parameters and multiply-adds"):
            sizes[name] = measure_model_size(name)
    return sizes


def _table(families: list[list[str]], sizes: dict[str, ModelSize]) -> Table:
    from rich import box
    from rich.table import Table

    from inline_attention.models.registry import PUBLISHED_TOP1

    caption = "parameters and multiply-adds counted at the native size; top-1 on ImageNet-1K as the paper reports it"
    table = Table(caption=caption, box=box.SIMPLE_HEAD)
    table.add_column("model", no_wrap=True)
    for header in ("parameters\n(M)", "multiply-adds\n(GMACs)", "native\nsize", "top-1 (paper)"):
        table.add_column(header, justify="right")
    for family in families:
        for name in family:
            size = sizes[name]
            _, height, width = size.input_size
            top1 = PUBLISHED_TOP1.get(name)
            table.add_row(
                name,
                f"{size.param_count:.2f}",
                f"{size.gmacs:.2f}",
                f"{height}×{width}",
                "–" if top1 is None else f"{top1:.1f}",
                end_section=name == family[-1],
            )
    return table


def _as_json(name: str, size: ModelSize) -> dict[str, object]:
    from inline_attention.models.registry import PUBLISHED_TOP1

    return {
        "name": name,
        "param_count": round(size.param_count, 3),
        "gmacs": round(size.gmacs, 3),
        "input_size": size.input_size,
        "top1_paper": PUBLISHED_TOP1.get(name),
    }
