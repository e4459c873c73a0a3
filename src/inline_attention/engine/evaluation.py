"""A model run over validation data, every sample once, over any number of processes; what is measured is the task's."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import nn

from inline_attention.data.loading import Loader
from inline_attention.engine.lockstep import Lockstep
from inline_attention.engine.precision import Precision
from inline_attention.tasks.task import Evaluator, Metrics

AnyMetrics = TypeVar("AnyMetrics", bound=Metrics)


@torch.no_grad()
def evaluate(
    model: nn.Module,
    loader: Loader[Any],
    evaluator: Evaluator[AnyMetrics],
    precision: Precision,
    lockstep: Lockstep,
) -> AnyMetrics:
    """Evaluate in eval mode; the model is left in the mode it was in.

    Raises:
        InterruptedBySignalError: If told to stop.
        BrokenImagesError: If too many images are broken.
        ValueError: If there is nothing to evaluate on.
    """
    processes = lockstep.processes
    was_training = model.training
    model.eval()
    batches = loader.epoch()
    for _ in range(max(processes.gather(len(loader)))):  # one process may have a batch more than another
        for batch in lockstep.fetch(batches):
            with precision.autocast():
                evaluator.add(model, batch)
    model.train(was_training)
    return evaluator.compute(processes)
