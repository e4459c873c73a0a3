"""Accuracy and loss, epoch by epoch."""

from __future__ import annotations

from inline_attention.report.charts import (
    Series,
    legend,
    line_panel,
    linear_scale,
)
from inline_attention.report.evidence import Evidence
from inline_attention.report.html import table, tag
from inline_attention.report.sections.section import (
    Section,
    left_out,
    listed,
    number_or_dash,
    reasons,
)

MOST_MARKERS = 24  # points of a line beyond which markers would hide it


def curves_section(evidence: Evidence) -> Section:
    """Accuracy and loss by epoch."""
    title = "Learning: epoch by epoch"
    runs = [run for run in evidence.runs if run.curves is not None]
    if not runs:
        return left_out("curves", title, evidence)
    accuracy, loss, body, lasts = [], [], [], []
    for run in runs:
        assert run.curves is not None
        epochs = run.curves.epochs
        tops = [(epoch.epoch, top) for epoch in epochs
                if (top := epoch.top1 if epoch.averaged_top1 is None else epoch.averaged_top1) is not None]  # fmt: skip
        losses = [(epoch.epoch, epoch.train_loss) for epoch in epochs if epoch.train_loss is not None]
        accuracy.append(Series(run.label, run.style, tops, markers=len(tops) <= MOST_MARKERS))
        loss.append(Series(run.label, run.style, losses, markers=len(losses) <= MOST_MARKERS))
        if tops:
            lasts.append(f"{run.label} {tops[-1][1]:.1f} %")
        by_epoch = dict(tops)
        body += [
            [
                run.label,
                str(epoch.epoch),
                number_or_dash(epoch.train_loss, 3),
                number_or_dash(epoch.validation_loss, 3),
                number_or_dash(by_epoch.get(epoch.epoch), 2),
            ]
            for epoch in epochs
        ]
    x = linear_scale("epoch", [epoch for line in loss for epoch, _ in line.points], zero=True, whole=True)
    panels = []
    for name, series, percent in (("top-1 of held-out pictures (%)", accuracy, True), ("training loss", loss, False)):
        values = [value for line in series for _, value in line.points]
        if values:
            y = linear_scale("%" if percent else "cross entropy", values, zero=True, percent=percent)
            panels.append(line_panel(name, [line for line in series if line.points], x, y,
                                     description=f"{name} by epoch; the numbers are in the table below."))  # fmt: skip
    ended = f" They end at {listed(lasts)}." if lasts else ""
    return Section(
        "curves",
        title,
        f"Left, accuracy on pictures that were not learnt from, after every epoch; right, the loss that training "
        f"lowers.{ended}",
        tag("div", legend([(run.label, run.style, False) for run in runs]), tag("div", *panels, class_="panels")),
        table(["run", "epoch", "training loss", "validation loss", "top-1 %"], body, caption="Epochs of every run"),
        reasons(evidence, "curves"),
    )
