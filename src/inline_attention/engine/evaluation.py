"""Top-1, top-5 and loss of a classifier over a dataset, every sample counted once, over any number of processes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from inline_attention.data.loading import Loader
from inline_attention.engine.precision import Precision
from inline_attention.engine.processes import Processes


@dataclass(frozen=True)
class Metrics:
    """What an evaluation found.

    Attributes:
        top1: Percent of samples whose class scored highest.
        top5: Percent whose class was among the five highest, or fewer where there are fewer classes.
        loss: Mean cross entropy.
        count: Samples.
    """

    top1: float
    top5: float
    loss: float
    count: int


@torch.no_grad()
def evaluate(model: nn.Module, loader: Loader, precision: Precision, processes: Processes) -> Metrics:
    """Evaluate in eval mode; the model is left in the mode it was in."""
    was_training = model.training
    model.eval()
    totals = torch.zeros(4, dtype=torch.float64, device=processes.device)
    for batch in loader.epoch():
        with precision.autocast():
            logits = model(batch.images)
        totals += _count(logits.float(), batch.targets)
    model.train(was_training)
    top1, top5, loss, count = processes.sum(totals).tolist()
    if count == 0:
        raise ValueError("there is no sample to evaluate on; check the data's validation split")
    return Metrics(100 * top1 / count, 100 * top5 / count, loss / count, int(count))


def _count(logits: Tensor, targets: Tensor) -> Tensor:
    """Samples right at once, right among five, sum of losses, samples."""
    best = logits.topk(min(5, logits.shape[1]), dim=1).indices
    hits = best == targets[:, None]
    loss = F.cross_entropy(logits, targets, reduction="sum")
    return torch.stack([hits[:, 0].sum(), hits.any(1).sum(), loss, hits.new_tensor(len(targets), dtype=torch.long)]).to(
        torch.float64
    )
