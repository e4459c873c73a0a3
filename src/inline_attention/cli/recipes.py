"""`inline recipes`: what can be trained, by which command, and what comes of it."""

from __future__ import annotations

from rich.table import Table

from inline_attention.cli.printing import make_console, say
from inline_attention.recipes import get_recipe, list_recipes


def run_recipes_list() -> None:
    """Print a table of all recipes."""
    console = make_console()
    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("recipe", "top-1", "command"):
        table.add_column(column, no_wrap=column != "command")
    for recipe in list_recipes():
        figures = ((recipe.expected, "paper"), (recipe.measured, "ours"))
        expected = ", ".join(f"{figure:.1f} % ({source})" for figure, source in figures if figure is not None)
        table.add_row(recipe.name, expected or "–", recipe.command)
    console.print(table)


def run_recipes_show(name: str) -> None:
    """Print a recipe as YAML, ready to be saved, edited and given to `inline train`."""
    say(get_recipe(name).to_yaml(), nl=False)
