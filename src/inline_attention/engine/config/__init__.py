"""Settings of a training run: dataclasses, YAML, overrides, timm's flags, checks."""
# ruff: noqa: F401 - these are the public names of the package

from inline_attention.engine.config.checks import check
from inline_attention.engine.config.reading import (
    check_recipe_file,
    from_mapping,
    from_yaml,
    read_config,
    to_mapping,
    to_yaml,
    with_overrides,
)
from inline_attention.engine.config.resolving import ResolvedValues, optimizer_arguments, resolve, schedule_arguments
from inline_attention.engine.config.schema import FLAGS, SETTINGS, Flag, TrainConfig, TrainingSection
from inline_attention.support.settings import ConfigError, Problem, Setting
from inline_attention.tasks.task import DataSection, ModelSection
