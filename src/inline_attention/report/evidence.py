"""Everything that a report shows, gathered from runs and measured where nobody has measured it yet."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from inline_attention.analysis.subjects import Subject, trained_subject
from inline_attention.analysis.training_curves import SETTINGS, RunFolderError, TrainingCurves, read_training_curves
from inline_attention.benchmark.cost import CostPoint, describe_machine, measure_attention_cost
from inline_attention.benchmark.environment import describe_environment
from inline_attention.benchmark.results import write_json
from inline_attention.data.datasets import open_dataset
from inline_attention.data.sources import DataError, ImageSource
from inline_attention.engine.checkpoint_format import EMA_WEIGHTS, WEIGHTS
from inline_attention.engine.checkpoints import LAST
from inline_attention.engine.config import DataSection, read_config
from inline_attention.engine.trainer import CHECKPOINTS
from inline_attention.models.checkpoints import CheckpointError
from inline_attention.models.registry import TWINS
from inline_attention.report.charts import Style
from inline_attention.report.measured_run import (
    MEASUREMENTS,
    TROUBLE,
    SampleSizes,
    grid_of,
    picture_and_map,
    shown_pictures,
    suitable_threads,
)
from inline_attention.support.files import read_bounded
from inline_attention.support.text import printable
from inline_attention.support.untrusted import UntrustedDataError, build_dataclass, parse_json

COST_SIZES = (196, 784, 3136)
KEPT_FORMAT = "measurements of inline report"
KEPT_VERSION = 1  # of what is measured: a change of meaning must not meet figures from before
KINDS = ("inline", *TWINS)
MAX_KEPT_BYTES = 2**28
MAX_ABLATION_BYTES = 2**24

OnStep = Callable[[str], None]


class NoRunError(ValueError):
    """A path that is neither a run nor a folder of runs, or an ablation that is none."""


class ForeignFileError(ValueError):
    """A file that is in the way, and not ours."""


@dataclass(frozen=True)
class AblationRun:
    """One training run of an ablation; `top1` in percent."""

    top1: float | None


@dataclass(frozen=True)
class AblationResult:
    """One row of an ablation's table, as `inline ablate` writes it."""

    label: str
    values: dict[str, bool | int | float | str]
    top1_mean: float | None
    top1_std: float | None
    seeds: int
    parameters: float | None
    macs: float | None
    images_per_second: float | None
    note: str
    runs: dict[str, AblationRun]


@dataclass(frozen=True)
class AblationFile:
    """What the report reads of an `ablation.json`."""

    title: str
    environment: dict[str, str]
    results: list[AblationResult]

    def __post_init__(self) -> None:
        if not self.results or any(result.values.keys() != self.results[0].values.keys() for result in self.results):
            raise UntrustedDataError("results must have at least one row, all with the same axes")


@dataclass
class Run:
    """One run, and what is known of it.

    Attributes:
        label: Its model, or its folder where several are of one model.
        style: How it is drawn.
        model_name: Of the registry.
        dataset: As its settings name it.
        curves: Its epochs; None before the first is over.
        found: Measurements by name.
        pictures: Of the pictures that are shown: itself, and where the model looks.
    """

    label: str
    style: Style
    model_name: str
    dataset: str
    curves: TrainingCurves | None = None
    found: dict[str, Any] = field(default_factory=dict)
    pictures: list[dict[str, Any]] = field(default_factory=list)


@dataclass
class Evidence:
    """What a page is made of.

    Attributes:
        runs: In the order given.
        cost: Time and memory of attention by number of tokens.
        cost_machine: Where that was measured.
        ablations: Contents of their JSON files.
        environment: Where and when the page was made.
        missing: Reasons why something is left out, by section.
    """

    runs: list[Run]
    cost: list[CostPoint] = field(default_factory=list)
    cost_machine: str = ""
    ablations: list[dict[str, Any]] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    missing: dict[str, list[str]] = field(default_factory=dict)

    def miss(self, section: str, reason: str) -> None:
        """Note why something is left out."""
        reasons = self.missing.setdefault(section, [])
        reason = printable(reason)
        if reason not in reasons:
            reasons.append(reason)


class KeptMeasurements:
    """A JSON file of measurements by what they depend on. Those of another version count as none."""

    def __init__(self, path: Path):
        """Read what is there.

        Raises:
            ForeignFileError: If there is a file that no report has written: it must not be written over.
            OSError: If it cannot be read.
        """
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
                f"{path}, where measurements would be kept, is not a file of `inline report`, and stays as it is; "
                "choose another --output, or move it away"
            )
        entries = content.get("measurements")
        if content.get("version") == KEPT_VERSION and isinstance(entries, dict):
            self._entries = entries

    def get(self, key: str, work: Callable[[], Any]) -> Any:
        """What was kept, or what `work` gives, which is kept at once."""
        self._used.add(key)
        if key not in self._entries:
            self._entries[key] = work()
            self._write()
        return self._entries[key]

    def drop_unused(self) -> None:
        """Keep only what was asked for: measurements of weights that are gone would pile up."""
        if self._entries.keys() - self._used:
            self._entries = {key: value for key, value in self._entries.items() if key in self._used}
            self._write()

    def _write(self) -> None:
        write_json(self._path, {"format": KEPT_FORMAT, "version": KEPT_VERSION, "measurements": self._entries})


def find_runs(paths: Sequence[Path]) -> list[Path]:
    """The folders of runs that are meant: each a run, or a folder with runs in it.

    Raises:
        NoRunError: If there is none in one of them.
    """
    found: list[Path] = []
    for path in paths:
        inside = [path] if (path / SETTINGS).is_file() else sorted(file.parent for file in path.glob(f"*/{SETTINGS}"))
        if not inside:
            what = "holds no run" if path.is_dir() else "does not exist"
            raise NoRunError(f"{path} {what}; expected the folder of a run of `inline train`, or a folder of such")
        found += [folder for folder in inside if folder not in found]
    # The argument is about InLine: it comes first, then its twins, whatever their folders are called.
    return sorted(found, key=_rank) if len(paths) == 1 else found


def gather(
    folders: Sequence[Path],
    kept: KeptMeasurements,
    *,
    ablations: Sequence[Path] = (),
    cost: Sequence[CostPoint] | None = None,
    device: str = "auto",
    on_step: OnStep | None = None,
) -> Evidence:
    """Read the runs, and measure what is not kept.

    Args:
        folders: Of runs, see `find_runs`.
        kept: Where measurements are kept.
        ablations: JSON files of `inline ablate`, or their folders.
        cost: Of attention, if measured before.
        device: To measure models on.
        on_step: Told what is done next.

    Raises:
        NoRunError: If an ablation cannot be read.
    """
    say = on_step or (lambda _: None)
    evidence = Evidence(
        list(_described_runs(folders)),
        environment=describe_environment(),
        ablations=[_read_ablation(path) for path in ablations],
    )
    for run, folder in zip(evidence.runs, folders, strict=True):
        say(f"{run.label}: epochs")
        try:
            (run.curves,) = read_training_curves([folder])
        except RunFolderError as error:
            evidence.miss("curves", f"{run.label}: {error}")
    _measure_runs(evidence, folders, kept, device, say)
    say("cost of attention")
    machine = describe_machine()
    if cost is None:
        points = kept.get(f"cost {machine} {COST_SIZES}", lambda: measure_attention_cost(sizes=COST_SIZES))
        cost = [CostPoint(*point) for point in points]
    evidence.cost, evidence.cost_machine = list(cost), machine
    kept.drop_unused()
    return evidence


def _described_runs(folders: Sequence[Path]) -> Iterator[Run]:
    configs = [read_config(folder / SETTINGS) for folder in folders]
    names = Counter(config.model.name for config in configs)
    seen: Counter[str] = Counter()
    labels: Counter[str] = Counter()
    for folder, config in zip(folders, configs, strict=True):
        name = config.model.name
        label = printable(name if names[name] == 1 else folder.resolve().name)
        labels[label] += 1
        label = label if labels[label] == 1 else f"{label} (#{labels[label]})"
        kind = name.partition("_")[0]
        kind = kind if kind in KINDS else "other"
        yield Run(label, Style(kind, seen[kind]), name, config.data.dataset)
        seen[kind] += 1


def _measure_runs(
    evidence: Evidence, folders: Sequence[Path], kept: KeptMeasurements, device: str, say: OnStep
) -> None:
    loaded: list[tuple[Run, Subject, ImageSource, str]] = []
    for run, folder in zip(evidence.runs, folders, strict=True):
        try:
            source = _held_out_pictures(read_config(folder / SETTINGS).data)
            file = _last_weights(folder)
            subject = dataclasses.replace(trained_subject(file, device=device), label=run.label)
        except (CheckpointError, *TROUBLE) as error:
            for section in (*MEASUREMENTS, "maps"):
                evidence.miss(section, f"{run.label}: {error}")
            continue
        tokens, _ = grid_of(subject)
        sizes = SampleSizes(tokens, subject.device)
        key = f"{_digest(file)} {source.location} {len(source)} {json.dumps(sizes.described())}"
        loaded.append((run, subject, source, key))
        for name, measurement in MEASUREMENTS.items():
            say(f"{run.label}: {name}")
            try:
                with suitable_threads(tokens):
                    run.found[name] = kept.get(f"{name} {key}", partial(measurement, subject, source, sizes))
            except TROUBLE as error:
                evidence.miss(name, f"{run.label}: {error}")
    _show_pictures(evidence, loaded, kept, say)


def _show_pictures(
    evidence: Evidence, loaded: Sequence[tuple[Run, Subject, ImageSource, str]], kept: KeptMeasurements, say: OnStep
) -> None:
    """The same pictures for all models of one dataset: those that they find hardest, taken together."""
    answered = [entry for entry in loaded if "answers" in entry[0].found]
    for run, subject, source, key in answered:
        peers = [other.found["answers"] for other, _, pictures, _ in answered if pictures.location == source.location]
        shown = shown_pictures(peers)
        say(f"{run.label}: attention maps")
        work = partial(_pictures_and_maps, subject, source, shown)
        try:
            run.pictures = kept.get(f"maps {shown} {key}", work)
        except TROUBLE as error:
            evidence.miss("maps", f"{run.label}: {error}")


def _pictures_and_maps(subject: Subject, source: ImageSource, shown: Sequence[int]) -> list[dict[str, Any]]:
    return [picture_and_map(subject, source, index) for index in shown]


def _held_out_pictures(settings: DataSection) -> ImageSource:
    if settings.dataset.startswith("hfds/"):  # a run's file may describe data, not fetch it
        raise DataError(f"the run was trained on {settings.dataset}, which a report does not download")
    return open_dataset(settings.dataset, settings.dir, settings.val_split)


def _last_weights(folder: Path) -> Path:
    """Those after the last epoch: the best would be chosen by the pictures they are measured on."""
    checkpoint = folder / CHECKPOINTS / LAST
    averaged = checkpoint / EMA_WEIGHTS
    file = averaged if averaged.is_file() else checkpoint / WEIGHTS
    if not file.is_file():
        raise CheckpointError(f"{folder} has no checkpoint; its curves are all that is left of it")
    return file


def _digest(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()[:16]


def _rank(folder: Path) -> tuple[int, str]:
    kind = read_config(folder / SETTINGS).model.name.partition("_")[0]
    return (KINDS.index(kind) if kind in KINDS else len(KINDS), folder.name)


def _read_ablation(path: Path) -> dict[str, Any]:
    file = path / "ablation.json" if path.is_dir() else path
    try:
        content = parse_json(read_bounded(file, MAX_ABLATION_BYTES), max_bytes=MAX_ABLATION_BYTES)
        return dataclasses.asdict(build_dataclass(AblationFile, content))
    except (OSError, ValueError) as error:
        raise NoRunError(
            f"{file} is no result of `inline ablate` ({error}); expected its ablation.json or its folder"
        ) from error
