"""Settings of a training run: dataclasses, YAML, overrides, timm's flags, checks."""

from inline_attention.engine.config.checks import check
from inline_attention.engine.config.flags import FLAGS, Flag
from inline_attention.engine.config.reading import (
    ConfigError,
    Problem,
    check_recipe_file,
    from_mapping,
    from_yaml,
    read_config,
    to_mapping,
    to_yaml,
    with_overrides,
)
from inline_attention.engine.config.resolving import (
    ResolvedValues,
    fused_optimizer,
    input_size,
    model_arguments,
    optimizer_arguments,
    resolve,
    schedule_arguments,
)
from inline_attention.engine.config.schema import SETTINGS, ModelSection, TrainConfig, TrainingSection
from inline_attention.support.settings import Setting
from inline_attention.tasks.task import DataSection

__all__ = [
    "FLAGS",
    "SETTINGS",
    "ConfigError",
    "DataSection",
    "Flag",
    "ModelSection",
    "Problem",
    "ResolvedValues",
    "Setting",
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
