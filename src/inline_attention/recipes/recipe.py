"""What a recipe is."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from inline_attention.engine.config import TrainConfig, from_mapping, to_yaml


@dataclass(frozen=True)
class Recipe:
    """Settings that are known to give a result."""

    name: str  # for `inline train`
    summary: str  # what it trains, in a line
    settings: Mapping[str, Mapping[str, Any]]  # what differs from the defaults, by section and name
    expected: float | None = None  # top-1 in percent that the paper reports; None if nothing is published
    measured: float | None = None  # top-1 in percent that we measured, from benchmarks/results; None if we did not
    data: str = "your pictures"  # dataset that it is made for, in a few words

    @cached_property
    def config(self) -> TrainConfig:
        """All settings."""
        return from_mapping(self.settings, source=f"the recipe {self.name}")

    @property
    def command(self) -> str:
        """The command that runs it; words in capitals are for the user to replace."""
        words = ["inline", "train", self.name]
        if self.config.data.needs_folder:
            words += ["--data-dir", "DIR"]
        if self.config.model.require_checkpoint:
            words += ["--initial-checkpoint", "FILE"]
        return shlex.join(words)

    def to_yaml(self) -> str:
        """Return the settings as YAML with comments, below what the recipe is for."""
        header = [f"{self.name}: {self.summary}", self.command]
        if self.expected is not None:
            header.append(f"The paper reports {self.expected:.1f} % top-1.")
        if self.measured is not None:
            header.append(f"We measured {self.measured:.1f} % top-1.")
        return to_yaml(self.config, header="\n".join(header))
