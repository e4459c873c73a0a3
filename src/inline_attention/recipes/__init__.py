"""Recipes: settings for every published model of the paper, and for data of one's own."""

from inline_attention.recipes.catalog import get_recipe, list_recipes
from inline_attention.recipes.recipe import Recipe

__all__ = ["Recipe", "get_recipe", "list_recipes"]
