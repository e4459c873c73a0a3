"""Measurements of attention (plain tables) and pictures of them; only `analysis.plots` needs matplotlib."""

from inline_attention.analysis.cost import CostPoint, describe_machine, measure_attention_cost
from inline_attention.analysis.injectivity import CollisionCase, InjectivityResult, measure_injectivity

__all__ = [
    "CollisionCase",
    "CostPoint",
    "InjectivityResult",
    "describe_machine",
    "measure_attention_cost",
    "measure_injectivity",
]
