"""What a recipe is."""

from __future__ import annotations

import shlex
from dataclasses import dataclass

from inline_attention.engine.config import TrainConfig, to_yaml


@dataclass(frozen=True)
class Recipe:
    """Settings that are known to give a result.

    Attributes:
        name: What `inline train` calls it.
        summary: What it trains, in a line.
        config: The settings.
        expected: Top-1 in percent that the paper reports for it; None where nothing is published.
        measured: Top-1 in percent that we found, as benchmarks/results has it; None where we have not.
    """

    name: str
    summary: str
    config: TrainConfig
    expected: float | None = None
    measured: float | None = None

    @property
    def command(self) -> str:
        """The command that runs it; words in capitals are for the user to replace."""
        words = ["inline", "train", self.name]
        if self.config.data.dataset in ("folder", "cifar10", "coco", "pairs"):
            words += ["--data-dir", "DIR"]
        if self.config.model.require_checkpoint:
            words += ["--initial-checkpoint", "FILE"]
        return shlex.join(words)

    def to_yaml(self) -> str:
        """The settings as documented YAML, below what the recipe is for."""
        header = [f"{self.name}: {self.summary}", self.command]
        if self.expected is not None:
            header.append(f"The paper reports {self.expected:.1f} % top-1.")
        if self.measured is not None:
            header.append(f"We measured {self.measured:.1f} % top-1.")
        return to_yaml(self.config, header="\n".join(header))
