"""Everything a report shows: read from runs, and measured where no earlier report has measured it.

Measurements are plain dataclasses. They are kept in a JSON file, and are checked when they are read back.
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
import hashlib
import io
import itertools
import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch
from PIL import Image

from inline_attention.ablation.tables import AblationFile
from inline_attention.analysis.attention_map import measure_attention_maps
from inline_attention.analysis.confusion import ImageConfusion, by_image, survey_confusion
from inline_attention.analysis.locality import SIDES, Locality, average, survey_locality
from inline_attention.analysis.masking import MaskingResult, survey_masking
from inline_attention.analysis.predictions import Answer, answer_batches
from inline_attention.analysis.probes import capture_attention
from inline_attention.analysis.subjects import PictureSample, Subject, trained_subject
from inline_attention.analysis.training_curves import SETTINGS, TrainingCurves, read_training_curves, run_labels
from inline_attention.benchmark.cost import CostPoint, measure_attention_cost
from inline_attention.benchmark.environment import describe_environment
from inline_attention.benchmark.results import write_json
from inline_attention.benchmark.timing import torch_threads
from inline_attention.data.broken import BrokenImagesError
from inline_attention.data.datasets import open_dataset
from inline_attention.data.loading import DataWorkerError
from inline_attention.data.sources import DataError, ImageSource
from inline_attention.engine.checkpoint_format import evaluated_weights
from inline_attention.engine.checkpoints import LAST
from inline_attention.engine.config import TrainConfig, read_config
from inline_attention.engine.trainer import CHECKPOINTS
from inline_attention.models.checkpoints import CheckpointError
from inline_attention.models.registry import ATTENTIONS
from inline_attention.support.files import read_bounded
from inline_attention.support.text import printable
from inline_attention.support.untrusted import UntrustedDataError, build_dataclass, build_value, parse_json

COST_SIZES = (196, 784, 3136)
KEPT_FORMAT = "measurements of inline report"
KEPT_VERSION = 2  # of the measurements: increase it when one changes its meaning
MAX_KEPT_BYTES = 2**28
MAX_ABLATION_BYTES = 2**24
SHOWN_PICTURES = 6
SMALL = 100  # tokens up to which one thread is as fast as several
# Pictures by the largest number of tokens, and by measurement: a few minutes for three models on a CPU.
SAMPLE_SIZES = {
    SMALL: {"attention": 360, "masking": 1000, "answers": 1000},
    400: {"attention": 32, "masking": 128, "answers": 512},
    math.inf: {"attention": 6, "masking": 24, "answers": 96},
}
MASKED_SIDES = 2  # neighborhoods to hide; each takes four passes over the pictures of a model with a local term
LARGEST_SIDE = 256  # pixels; larger pictures are reduced, so that a page stays small
PNG_ADDRESS = "data:image/png;base64,"
MEASUREMENTS = {"confusion": ImageConfusion, "locality": Locality, "masking": MaskingResult, "answers": Answer}


class NoRunError(ValueError):
    """A path is neither a run nor a folder of runs, or an ablation cannot be read."""


class ForeignFileError(ValueError):
    """A file that no report has written is in the way."""


@dataclass(frozen=True)
class ShownPicture:
    """A picture with an attention map."""

    index: int  # in its dataset
    name: str
    picture: str  # PNG as data address, as the model sees it
    layer: int
    token: tuple[int, int]  # row and column of the query
    weights: list[list[float]]  # [h][w], in multiples of the uniform weight

    def __post_init__(self) -> None:
        if len({len(row) for row in self.weights}) != 1 or not self.weights[0]:
            raise UntrustedDataError("weights must be a rectangle of numbers")
        try:
            base64.b64decode(self.picture.removeprefix(PNG_ADDRESS), validate=True)
        except (binascii.Error, ValueError):
            raise UntrustedDataError("a picture must be a PNG in base64") from None


@dataclass
class Run:
    """One run and its measurements; None until it is measured."""

    label: str
    kind: str  # of attention
    model_name: str
    dataset: str
    curves: TrainingCurves | None = None
    confusion: list[ImageConfusion] | None = None
    locality: list[Locality] | None = None  # mean over heads
    masking: list[MaskingResult] | None = None
    answers: list[Answer] | None = None
    pictures: list[ShownPicture] | None = None

    @property
    def shown(self) -> list[tuple[ShownPicture, Answer]]:
        """Pictures to show, with the model's answers."""
        answers = {answer.index: answer for answer in self.answers or ()}
        return [(picture, answers[picture.index]) for picture in self.pictures or () if picture.index in answers]


@dataclass
class Evidence:
    """The content of a page."""

    runs: list[Run]
    cost: list[CostPoint] = field(default_factory=list)
    ablations: list[AblationFile] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    missing: dict[str, list[str]] = field(default_factory=dict)  # by section: why something is left out

    @contextmanager
    def leaving_out(self, run: Run, *sections: str) -> Iterator[None]:
        """Record an error of the `with` block as the reason why the run is left out of sections."""
        try:
            yield
        except (ValueError, CheckpointError, BrokenImagesError, DataWorkerError, OSError) as error:
            for section in sections:
                reasons = self.missing.setdefault(section, [])
                reasons += {printable(f"{run.label}: {error}")} - set(reasons)


class KeptMeasurements:
    """A JSON file of measurements by key. Measurements of another version, or damaged ones, are made anew."""

    def __init__(self, path: Path):
        """Read the file, if it exists; raise `ForeignFileError` if no report has written it."""
        self._path = path
        self._used: set[str] = set()
        self._entries: dict[str, Any] = {}
        if not path.exists():
            return
        content: Any = None
        with suppress(ValueError):
            content = parse_json(read_bounded(path, MAX_KEPT_BYTES), max_bytes=MAX_KEPT_BYTES)
        if not isinstance(content, dict) or content.get("format") != KEPT_FORMAT:
            raise ForeignFileError(
                f"{path} is not a file of `inline report` and will not be overwritten; choose another --output, or "
                "move the file away"
            )
        entries = content.get("measurements")
        if content.get("version") == KEPT_VERSION and isinstance(entries, dict):
            self._entries = entries

    def get(self, key: str, kind: type, work: Callable[[], Sequence[Any]]) -> list[Any]:
        """Return the kept list of dataclasses or named tuples or, if there is none, do the work and keep its result.

        The key has everything that the measurement depends on.
        """
        self._used.add(key)
        if key in self._entries:
            with suppress(UntrustedDataError):
                return build_value(list[kind], self._entries[key])
        found: list[Any] = list(work())
        is_tuple = hasattr(kind, "_fields")
        self._entries[key] = [item._asdict() if is_tuple else dataclasses.asdict(item) for item in found]
        self._write()
        return found

    def drop_unused(self) -> None:
        """Remove measurements that were not asked for, such as those of weights that are gone."""
        if self._entries.keys() - self._used:
            self._entries = {key: value for key, value in self._entries.items() if key in self._used}
            self._write()

    def _write(self) -> None:
        write_json(self._path, {"format": KEPT_FORMAT, "version": KEPT_VERSION, "measurements": self._entries})


class LoadedRun(NamedTuple):
    """A run with its model and pictures, ready to be measured."""

    run: Run
    subject: Subject
    source: ImageSource
    tokens: int  # of the largest layer
    sides: Sequence[int]  # of neighborhoods that are smaller than the smallest grid
    sizes: dict[str, int]  # see `sample_sizes`
    key: str  # all that measurements depend on

    def measure(self, name: str) -> Sequence[Any]:
        """Return one of `MEASUREMENTS`."""
        few = PictureSample(self.source, images=self.sizes["attention"])
        # With a small model, another thread gains little, and costs a lot if another program needs its core.
        with torch_threads(1 if self.tokens <= SMALL else torch.get_num_threads()):
            if name == "confusion":
                return by_image(survey_confusion(self.subject, few, worst=0)[0])
            if name == "locality":
                return average(survey_locality(self.subject, few, sides=self.sides), over_heads=True)
            many = PictureSample(self.source, images=self.sizes[name], batch_size=32)
            if name == "masking":
                return survey_masking(self.subject, many, sides=self.sides[:MASKED_SIDES])
            return [answer for _, answers in answer_batches(self.subject, many) for answer in answers]

    def show(self, indices: Sequence[int]) -> list[ShownPicture]:
        """Return pictures as the model sees them, with a map of their most detailed token in the middle layer."""
        pictures: list[ShownPicture] = []
        for index in indices:
            pixels = self.subject.transform()(self.source.load(index))
            found = measure_attention_maps(self.subject, pixels, count=1)
            picture = Image.fromarray(pixels.permute(1, 2, 0).cpu().numpy())
            picture.thumbnail((LARGEST_SIDE, LARGEST_SIDE))
            token, weights = found.maps[0].token, found.maps[0].times_uniform.tolist()
            name = self.source.name(index)
            pictures.append(ShownPicture(index, name, png_address(picture), found.layer, token, weights))
        return pictures


def sample_sizes(tokens: int, device: torch.device) -> dict[str, int]:
    """Return the number of pictures by measurement: fewer for large attention matrices, more on a GPU."""
    sizes = next(sizes for most, sizes in SAMPLE_SIZES.items() if tokens <= most)
    return {name: count if device.type == "cpu" else 8 * count for name, count in sizes.items()}


def find_runs(paths: Sequence[Path]) -> list[Path]:
    """Return run folders: each path is a run, or a folder with runs in it; raise `NoRunError` if it has none."""
    found: list[Path] = []
    for path in paths:
        inside = [path] if (path / SETTINGS).is_file() else sorted(file.parent for file in path.glob(f"*/{SETTINGS}"))
        if not inside:
            what = "holds no run" if path.is_dir() else "does not exist"
            raise NoRunError(f"{printable(path)} {what}; expected a run folder of `inline train`, or a folder of runs")
        found += [folder for folder in inside if folder not in found]
    return found if len(paths) > 1 else sorted(found, key=_rank)


def gather(
    folders: Sequence[Path],
    kept: KeptMeasurements,
    *,
    ablations: Sequence[Path] = (),
    cost: Sequence[CostPoint] | None = None,
    device: str = "auto",
    on_step: Callable[[str], None] = lambda _: None,
) -> Evidence:
    """Read runs and results of `inline ablate` (or raise `NoRunError`), and measure what is not kept or given."""
    configs = [read_config(folder / SETTINGS) for folder in folders]
    labels = run_labels([config.model.name for config in configs], folders)
    runs = [
        Run(label, config.model.attention_kind, config.model.name, config.data.dataset)
        for label, config in zip(labels, configs, strict=True)
    ]
    results = [_read_ablation(path) for path in ablations]
    evidence = Evidence(runs, ablations=results, environment=describe_environment())
    answered: list[LoadedRun] = []
    for run, folder, config in zip(evidence.runs, folders, configs, strict=True):
        with evidence.leaving_out(run, "curves"):
            (curves,) = read_training_curves([folder])
            run.curves = dataclasses.replace(curves, label=run.label)
        with evidence.leaving_out(run, *MEASUREMENTS, "pictures"):
            loaded = _load(run, folder, config, device)
            run.kind = run.kind if run.kind in ATTENTIONS else loaded.subject.kind  # names of timm do not tell
            for name, kind in MEASUREMENTS.items():
                on_step(f"{run.label}: {name}")
                with evidence.leaving_out(run, name):
                    setattr(run, name, kept.get(f"{name} {loaded.key}", kind, partial(loaded.measure, name)))
            answered += [loaded] if run.answers else []
    for loaded in answered:
        peers = [other.run.answers or [] for other in answered if other.source.location == loaded.source.location]
        shown = shown_pictures(peers)
        on_step(f"{loaded.run.label}: attention maps")
        with evidence.leaving_out(loaded.run, "pictures"):
            key = f"pictures {shown} {loaded.key}"
            loaded.run.pictures = kept.get(key, ShownPicture, partial(loaded.show, shown))
    on_step("cost of attention")
    if cost is None:
        key = f"cost {evidence.environment['machine']} {COST_SIZES}"
        cost = kept.get(key, CostPoint, lambda: measure_attention_cost(sizes=COST_SIZES))
    evidence.cost = list(cost)
    kept.drop_unused()
    return evidence


def shown_pictures(answers: Sequence[Sequence[Answer]], count: int = SHOWN_PICTURES) -> list[int]:
    """Return the numbers of the pictures that are hardest for all models, each class once before any comes twice."""
    truths: dict[int, str] = {}
    probabilities: dict[int, list[float]] = {}
    for answer in itertools.chain(*answers):
        truths[answer.index] = answer.truth
        probabilities.setdefault(answer.index, []).append(answer.truth_probability)
    hardest = sorted(probabilities, key=lambda index: fmean(probabilities[index]))
    firsts = list({truths[index]: index for index in reversed(hardest)}.values())
    return sorted(hardest, key=lambda index: (index not in firsts, hardest.index(index)))[:count]


def png_address(picture: Image.Image) -> str:
    """Return a picture as a data address."""
    file = io.BytesIO()
    picture.save(file, "PNG", optimize=True)
    return PNG_ADDRESS + base64.b64encode(file.getvalue()).decode()


def _load(run: Run, folder: Path, config: TrainConfig, device: str) -> LoadedRun:
    data = config.data
    if data.dataset.startswith("hfds/"):  # a run's file may describe data, not fetch it
        raise DataError(f"the run was trained on {data.dataset}, which a report does not download")
    source = open_dataset(data.dataset, data.dir, data.val_split)
    # The weights after the last epoch: the best would be chosen by the pictures they are measured on.
    file = evaluated_weights(folder / CHECKPOINTS / LAST)
    if file is None:
        raise CheckpointError(f"{folder} has no checkpoint; only its curves are shown")
    subject = dataclasses.replace(trained_subject(file, device=device), label=run.label)
    blank = torch.zeros(1, 3, *subject.image_size, dtype=torch.uint8)
    layers = capture_attention(subject.model, subject.normalize(blank))
    tokens, smallest = max(layer.num_tokens for layer in layers), min(min(layer.grid_size) for layer in layers)
    sides = [side for side in SIDES if side < smallest] or [SIDES[0]]
    sizes = sample_sizes(tokens, subject.device)
    with file.open("rb") as opened:
        digest = hashlib.file_digest(opened, "sha256").hexdigest()[:16]
    key = f"{digest} {source.location} {len(source)} {json.dumps(sizes)}"
    return LoadedRun(run, subject, source, tokens, sides, sizes, key)


def _rank(folder: Path) -> tuple[int, str]:
    """Return a key that sorts InLine first, then its twins."""
    kind = read_config(folder / SETTINGS).model.attention_kind
    return ([*ATTENTIONS, kind].index(kind), folder.name)


def _read_ablation(path: Path) -> AblationFile:
    file = path / "ablation.json" if path.is_dir() else path
    try:
        content = parse_json(read_bounded(file, MAX_ABLATION_BYTES), max_bytes=MAX_ABLATION_BYTES)
        return build_dataclass(AblationFile, content)
    except (OSError, ValueError) as error:
        raise NoRunError(
            f"{printable(file)} is no result of `inline ablate` ({error}); expected its ablation.json or its folder"
        ) from error
