"""Finding recipes by name."""

from __future__ import annotations

import difflib

from inline_attention.recipes import (
    ade20k,
    cifar10,
    coco,
    cswin_base,
    cswin_base_384,
    cswin_small,
    cswin_tiny,
    deit_base,
    deit_small,
    deit_tiny,
    digits,
    finetune,
    pvt_large,
    pvt_medium,
    pvt_small,
    pvt_tiny,
    scenes,
    swin_base,
    swin_base_384,
    swin_small,
    swin_tiny,
)
from inline_attention.recipes.recipe import Recipe

_MODULES = (
    *(digits, cifar10, finetune),
    *(deit_tiny, deit_small, deit_base),
    *(pvt_tiny, pvt_small, pvt_medium, pvt_large),
    *(swin_tiny, swin_small, swin_base, swin_base_384),
    *(cswin_tiny, cswin_small, cswin_base, cswin_base_384),
)
_DENSE_MODULES = (scenes, coco, ade20k)  # one recipe for many backbones: a module has several
_ALL = (*(module.RECIPE for module in _MODULES), *(recipe for module in _DENSE_MODULES for recipe in module.RECIPES))
_RECIPES: dict[str, Recipe] = {recipe.name: recipe for recipe in _ALL}


class UnknownRecipeError(ValueError):
    """There is no recipe of that name."""


def list_recipes() -> list[Recipe]:
    """All recipes: for newcomers first, then the paper's by family and size, then detection and segmentation."""
    return list(_RECIPES.values())


def get_recipe(name: str) -> Recipe:
    """The recipe of a name.

    Raises:
        UnknownRecipeError: If there is none; the text suggests the nearest.
    """
    if name in _RECIPES:
        return _RECIPES[name]
    # `inline_swin_tiny` is the model's name, and the recipe's is what follows the attention.
    bare = name.lower().removeprefix("inline_").removeprefix("softmax_").removeprefix("linear_")
    nearest = difflib.get_close_matches(bare, _RECIPES, n=2)
    hint = f"; did you mean {' or '.join(nearest)}?" if nearest else "; `inline recipes` lists them"
    raise UnknownRecipeError(f"there is no recipe {name!r}{hint}")
