"""Measurements of attention and models as plain data, and figures of them, which need matplotlib."""

from inline_attention.analysis.collision_cases import CollisionCase, InjectivityResult, measure_injectivity
from inline_attention.benchmark.cost import CostPoint, measure_attention_cost
from inline_attention.benchmark.environment import describe_machine
from inline_attention.benchmark.model_size import ModelSize, measure_model_size

__all__ = [
    "CollisionCase",
    "CostPoint",
    "InjectivityResult",
    "ModelSize",
    "describe_machine",
    "measure_attention_cost",
    "measure_injectivity",
    "measure_model_size",
]
