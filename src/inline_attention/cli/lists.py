"""`inline models` and `inline recipes`: list what can be built and trained."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable
from itertools import groupby
from typing import Annotated

import typer
from typer import Argument, Option

from inline_attention.benchmark.model_size import PUBLISHED_TOP1, stored_model_sizes
from inline_attention.cli.options import AsJson
from inline_attention.cli.printing import fail, make_console, make_table, say, say_json
from inline_attention.support.text import did_you_mean, number

recipes_app = typer.Typer(help="List what can be trained, with commands and results.")


def models(
    pattern: Annotated[str | None, Argument(help="Names to list, such as '*swin*'.", show_default=False)] = None,
    all_models: Annotated[bool, Option("--all", help="List the softmax and linear twins too.")] = False,
    as_json: AsJson = False,
) -> None:
    """List the models: parameters and multiply-adds as we counted them, accuracy from the paper."""
    sizes = stored_model_sizes()
    names = fnmatch.filter(sizes, pattern or ("*" if all_models else "inline_*"))
    if not names:
        fail(f"no model matches {pattern!r}{_suggestion(pattern or '', sizes)}")
    ordered = [
        name for _, family in groupby(names, _family) for name in sorted(family, key=lambda name: sizes[name].macs)
    ]
    rows, contents = [], []
    for name in ordered:
        size, top1 = sizes[name], PUBLISHED_TOP1.get(name)
        counts = {"param_count": round(size.param_count, 3), "gmacs": round(size.gmacs, 3)}
        contents.append({"name": name, **counts, "input_size": size.input_size, "top1_paper": top1})
        native = f"{size.input_size[1]}×{size.input_size[2]}"
        rows.append([name, f"{size.param_count:.2f}", f"{size.gmacs:.2f}", native, number(top1, 1)])
    if as_json:
        say_json(contents)
        return
    header = ("model", "parameters\n(M)", "multiply-adds\n(GMACs)", "native\nsize", "top-1 (paper)")
    caption = "parameters and multiply-adds counted at the native size; top-1 on ImageNet-1K as the paper reports it"
    table = make_table(header, rows, texts=1, group_by=lambda row: _family(row[0]), caption=caption)
    make_console(log_width=None).print(table)


def _family(name: str) -> str:
    kind, family, *_ = name.split("_")
    return f"{kind}_{family}"


def _suggestion(pattern: str, names: Iterable[str]) -> str:
    core = pattern.strip("*").lower()
    if core and fnmatch.filter(names, f"*{core}*"):
        return f"; try '*{core}*'"
    return did_you_mean(core, names, most=3) or "; `inline models --all` lists all names"


@recipes_app.callback(invoke_without_command=True)
def recipes(context: typer.Context) -> None:
    """List the recipes by task: name, data, result, flags they need."""
    if context.invoked_subcommand is not None:
        return
    from rich.table import Table

    from inline_attention.recipes import list_recipes

    by_task = sorted(list_recipes(), key=lambda recipe: recipe.config.task.name)
    for task, recipes_of_task in groupby(by_task, lambda recipe: recipe.config.task.name):
        rows: list[list[str]] = []
        for recipe in recipes_of_task:
            figures = ((recipe.expected, "paper"), (recipe.measured, "ours"))
            result = ", ".join(f"{figure:.1f} ({source})" for figure, source in figures if figure is not None)
            needs = recipe.command.partition(recipe.name)[2].strip()
            rows.append([f"  {recipe.name}", recipe.data, result or "–", needs])
        columns = [f"{task}:", "data", "top-1 %", "needs"]
        if all(row[2] == "–" for row in rows):
            columns, rows = [*columns[:2], columns[3]], [[*row[:2], row[3]] for row in rows]
        table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
        for column in columns:
            table.add_column(column, no_wrap=column != "needs")
        for row in rows:
            table.add_row(*row)
        make_console().print(table)
    say("Start one with `inline train RECIPE`, followed by what it needs.")


@recipes_app.command("show")
def recipes_show(name: Annotated[str, Argument(help="Recipe name.", show_default=False)]) -> None:
    """Print a recipe as YAML, to save, edit and pass to `inline train`."""
    from inline_attention.recipes import get_recipe

    say(get_recipe(name).to_yaml(), nl=False)
