"""Recipes: settings for every published model of the paper, and for data of one's own."""

from inline_attention.recipes import dense, imagenet, small
from inline_attention.recipes.recipe import Recipe
from inline_attention.support.text import did_you_mean, printable

__all__ = ["Recipe", "UnknownRecipeError", "get_recipe", "list_recipes"]

_ALL = (*small.CLASSIFICATION, *small.LINEARIZATION, *imagenet.RECIPES, *small.SCENES, *dense.RECIPES)
_RECIPES = {recipe.name: recipe for recipe in _ALL}


class UnknownRecipeError(ValueError):
    """There is no recipe of that name."""


def list_recipes() -> list[Recipe]:
    """Return all recipes: small ones, linearization, the paper's by family and size, detection and segmentation."""
    return list(_RECIPES.values())


def get_recipe(name: str) -> Recipe:
    """Return the recipe of a name.

    Raises:
        UnknownRecipeError: If there is none. The message suggests the nearest.
    """
    if name in _RECIPES:
        return _RECIPES[name]
    # `inline_swin_tiny` is the model's name; the recipe's has no prefix.
    bare = name.lower().removeprefix("inline_").removeprefix("softmax_").removeprefix("linear_")
    hint = did_you_mean(bare, _RECIPES, most=2) or "; `inline recipes` lists them"
    raise UnknownRecipeError(f"there is no recipe '{printable(name)[:200]}'{hint}")
