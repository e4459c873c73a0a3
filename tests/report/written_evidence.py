"""Evidence of runs of which everything was measured, without measuring, and a strict HTML parser."""

from html.parser import HTMLParser

from inline_attention.ablation.tables import AblationFile, AblationResult, RunOutcome
from inline_attention.analysis.confusion import ImageConfusion
from inline_attention.analysis.locality import Locality
from inline_attention.analysis.masking import Hiding, MaskingResult
from inline_attention.analysis.predictions import Answer
from inline_attention.analysis.training_curves import EpochFigures, TrainingCurves
from inline_attention.benchmark.cost import CostPoint
from inline_attention.report.measurement import Evidence, Run, ShownPicture

VOID = {"meta", "img", "input", "br", "wbr"}


class Outline(HTMLParser):
    """Notes elements, and fails on one that is not closed where it was opened."""

    def __init__(self, text):
        super().__init__()
        self.open, self.elements, self.attributes = [], [], []
        self.feed(text)
        self.close()
        assert self.open == [], f"never closed: {self.open}"

    def handle_starttag(self, name, attributes):
        self.elements.append(name)
        self.attributes += [(name, key, value or "") for key, value in attributes]
        assert len({key for key, _ in attributes}) == len(attributes), f"<{name}> has an attribute twice"
        if name not in VOID:
            self.open.append(name)

    def handle_startendtag(self, name, attributes):
        self.handle_starttag(name, attributes)
        self.open.remove(name)

    def handle_endtag(self, name):
        assert self.open.pop() == name, name


def curves(label):
    epochs = tuple(EpochFigures(epoch, 2 / epoch, 1.5, 10.0 * epoch, None) for epoch in (1, 2, 3))
    return TrainingCurves(label, label, "digits", 3, epochs)


def run(label="inline_deit_tiny", kind="inline", truth="cat", picture="cat.png"):
    """A run of which everything was measured."""
    terms = ("hidden", "kept") if kind == "inline" else ("none",)
    masking = [MaskingResult(Hiding("nothing", 0, terms[-1]), 90.0, 90.0, 50)] + [
        MaskingResult(Hiding(where, side, term), 90.0 - 10 * side, 90.0, 50)
        for term in terms for side in (3, 5) for where in ("neighborhood", "random")
    ]  # fmt: skip
    return Run(
        label=label,
        kind=kind,
        model_name=f"{kind}_deit_tiny",
        dataset="digits",
        curves=curves(label),
        confusion=[ImageConfusion(picture, 60, 3)],
        locality=[
            Locality(layer, None, kind, term, side, 0.4, 0.4, 0.3)
            for layer in (0, 1) for side in (3, 5) for term in ("without", "with")[: 2 if kind == "inline" else 1]
        ],
        masking=masking,
        answers=[Answer(4, picture, truth, 0.2, "dog", 0.7, False)],
        pictures=[ShownPicture(4, picture, "data:image/png;base64,AAAA", 1, (0, 1), [[-1.0, 2.0], [0.0, 3.0]])],
    )  # fmt: skip


def ablation(title="Ablation of digits", label="relu"):
    environment = {"machine": "a CPU", "gpu": "none", "torch": "2.11", "commit": "abc", "date": "2026-01-01"}
    runs = {seed: RunOutcome(top1, 1, 2.0, 10.0, environment) for seed, top1 in (("0", 69.0), ("1", 71.0))}
    results = [
        AblationResult(70.0, 1.0, 2, 1e6, 2e6, 10.0, "", name, {"feature_map": name}, runs)
        for name in (label, "identity")
    ]
    missing = AblationResult(None, None, 0, None, None, None, "diverged", "exp", {"feature_map": "exp"}, {})
    return AblationFile(title, environment, [*results, missing])


def evidence(*runs, **fields):
    points = [CostPoint(kind, n, n / 100, 5, n * 1000) for n in (64, 256) for kind in ("softmax", "linear", "inline")]
    measured = {"cost": points, "environment": {"machine": "a CPU"}, "ablations": [ablation()]}
    return Evidence(list(runs), **(measured | fields))
