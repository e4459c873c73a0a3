"""Configuration of a training run: documented dataclasses, YAML, overrides, timm's flags, checks."""

from inline_attention.engine.config.checks import check
from inline_attention.engine.config.flags import FLAGS, Flag
from inline_attention.engine.config.overrides import check_recipe_file, with_overrides
from inline_attention.engine.config.parsing import ConfigError, Problem, from_mapping, to_mapping
from inline_attention.engine.config.resolving import ResolvedValues, resolve
from inline_attention.engine.config.schema import (
    AugmentationSection,
    CheckpointsSection,
    DataSection,
    DetectionSection,
    DistributedSection,
    EmaSection,
    LimitsSection,
    LoggingSection,
    LossSection,
    ModelSection,
    OptimizerSection,
    RunSection,
    ScheduleSection,
    SegmentationSection,
    TaskSection,
    TrainConfig,
    TrainingSection,
)
from inline_attention.engine.config.settings import SETTINGS, Setting
from inline_attention.engine.config.timm_arguments import (
    fused_optimizer,
    input_size,
    model_arguments,
    optimizer_arguments,
    schedule_arguments,
)
from inline_attention.engine.config.yaml_text import from_yaml, read_config, to_yaml

__all__ = [
    "FLAGS",
    "SETTINGS",
    "AugmentationSection",
    "CheckpointsSection",
    "ConfigError",
    "DataSection",
    "DetectionSection",
    "DistributedSection",
    "EmaSection",
    "Flag",
    "LimitsSection",
    "LoggingSection",
    "LossSection",
    "ModelSection",
    "OptimizerSection",
    "Problem",
    "ResolvedValues",
    "RunSection",
    "ScheduleSection",
    "SegmentationSection",
    "Setting",
    "TaskSection",
    "TrainConfig",
    "TrainingSection",
    "check",
    "check_recipe_file",
    "from_mapping",
    "from_yaml",
    "fused_optimizer",
    "input_size",
    "model_arguments",
    "optimizer_arguments",
    "read_config",
    "resolve",
    "schedule_arguments",
    "to_mapping",
    "to_yaml",
    "with_overrides",
]
