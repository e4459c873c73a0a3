"""Top-1, top-5 and loss of a classifier, over any number of ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from inline_attention.data.batch import Batch
from inline_attention.tasks.task import Collectives, MetricTable


@dataclass(frozen=True)
class ClassificationMetrics:
    """Accuracy in percent, mean cross entropy, and number of samples; `top5` is of all classes if they are fewer."""

    top1: float
    top5: float
    loss: float
    count: int

    @property
    def figures(self) -> dict[str, float]:
        """All but the count."""
        return {"top1": self.top1, "top5": self.top5, "loss": self.loss}

    @property
    def tables(self) -> list[MetricTable]:
        """No details."""
        return []

    def __str__(self) -> str:
        return f"top-1 {self.top1:.3f} %, top-5 {self.top5:.3f} %, loss {self.loss:.4f} of {self.count} images"


class ClassificationEvaluator:
    """Counts right answers; see `Evaluator`."""

    def __init__(self, device: torch.device):
        self._totals = torch.zeros(4, dtype=torch.float64, device=device)

    def add(self, model: nn.Module, batch: Batch) -> None:
        """Classify a batch."""
        self._totals += _count(model(batch.images).float(), batch.targets)

    def compute(self, collectives: Collectives) -> ClassificationMetrics:
        """Compute the metrics over all ranks."""
        top1, top5, loss, count = collectives.sum(self._totals.clone()).tolist()
        if count == 0:
            raise ValueError("there is no sample to evaluate on; check the data's validation split")
        return ClassificationMetrics(100 * top1 / count, 100 * top5 / count, loss / count, int(count))


def _count(logits: Tensor, targets: Tensor) -> Tensor:
    """Number of samples right at once and right among five, sum of losses, number of samples."""
    best = logits.topk(min(5, logits.shape[1]), dim=1).indices
    hits = best == targets[:, None]
    loss = F.cross_entropy(logits, targets, reduction="sum")
    counts = torch.stack([hits[:, 0].sum(), hits.any(1).sum(), loss, loss.new_tensor(len(targets))])
    return counts.to(torch.float64)
