"""`inline recipes`: list the recipes, and print one as YAML."""

from __future__ import annotations

from itertools import groupby
from typing import Annotated

import typer

from inline_attention.cli.printing import make_console, say

recipes_app = typer.Typer(help="List what can be trained, with commands and results.")


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
def recipes_show(name: Annotated[str, typer.Argument(help="Recipe name.", show_default=False)]) -> None:
    """Print a recipe as YAML, to save, edit and pass to `inline train`."""
    from inline_attention.recipes import get_recipe

    say(get_recipe(name).to_yaml(), nl=False)
