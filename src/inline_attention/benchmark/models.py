"""Whole models: images per second and peak memory of an InLine model against its rivals, in one run.

Rivals: "timm" (timm's own softmax model of that name), "plain" (the same model and weights on plain PyTorch, that is,
every block and attention with `backend="eager"`) and "softmax" (the softmax twin from this library). No InLine model is
timed before its logits agree with those of the same weights on plain PyTorch in float32.
"""

from __future__ import annotations

import copy
import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args

import timm
import torch
import torch.nn.functional as F
from torch import nn

from inline_attention.benchmark.compile_cache import run_compile_jobs, time_limit
from inline_attention.benchmark.environment import describe_environment
from inline_attention.benchmark.results import Measurement, WrongResultError, ratio, relative_error
from inline_attention.benchmark.timing import Work, interleaved_timings, prepare_throughput, release_memory
from inline_attention.layers.attention import TokenAttention
from inline_attention.layers.block import Block
from inline_attention.layers.conversion import convert_attention
from inline_attention.models import create_model, list_models
from inline_attention.support.untrusted import build_dataclass

Mode = Literal["inference", "training"]
MODES: tuple[Mode, ...] = get_args(Mode)
Rival = Literal["timm", "plain", "softmax"]
RIVALS: tuple[Rival, ...] = get_args(Rival)
Execution = Literal["compiled", "eager"]
EXECUTIONS: tuple[Execution, ...] = get_args(Execution)
OURS = "inline"

# Models of the same depth and width (timm's DeiT-S and -B are wider than ours; PVT and CSWin it does not have).
TIMM_RIVALS = {
    "inline_deit_tiny": "deit_tiny_patch16_224",
    "inline_swin_tiny": "swin_tiny_patch4_window7_224",
    "inline_swin_small": "swin_small_patch4_window7_224",
    "inline_swin_base": "swin_base_patch4_window7_224",
    "inline_swin_base_384": "swin_base_patch4_window12_384",
}
LARGEST_ERROR = {torch.float32: 1e-3, torch.bfloat16: 2e-2, torch.float16: 2e-2}  # relative, of logits
LARGEST_GRADIENT_ERROR = {torch.float32: 1e-2, torch.bfloat16: 5e-2, torch.float16: 5e-2}  # of all parameters at once
CHECKED_IMAGES = 4
IMAGES_AT_ONCE = 16  # of plain PyTorch in float32, which needs the most memory
WARM_UP_STEPS = 3
LEAST_ROUNDS = 5
CLASSES = 1000


@dataclass(frozen=True)
class ModelCase:
    """One model at one size.

    Attributes:
        model: Name of an InLine model, or of timm's where `converted`.
        size: Side of its square images in pixels.
        batch: Images per step.
        mode: "inference" in eval mode, or a "training" step: forward, backward and AdamW.
        rivals: Whom it is measured against.
        execution: "compiled" by `torch.compile`, or "eager".
        converted: Measure timm's model after `convert_attention` against the model as it was.
        autocast: Autocast over float32 weights, or weights of the settings' dtype; None for autocast in training only.
    """

    model: str
    size: int
    batch: int
    mode: Mode = "inference"
    rivals: tuple[Rival, ...] = ("timm",)
    execution: Execution = "compiled"
    converted: bool = False
    autocast: bool | None = None

    def __post_init__(self) -> None:
        if self.converted:
            if not timm.is_model(self.model):
                raise ValueError(f"timm has no model {self.model!r}; timm.list_models() lists them")
        elif self.model not in list_models("inline_*"):
            raise ValueError(f"there is no InLine model {self.model!r}; `inline models` lists them")

    def __str__(self) -> str:
        precision = {None: "", True: ", autocast", False: ", half weights"}[self.autocast]
        return f"{self.model} {self.size}² B={self.batch} {self.mode}{precision} {self.execution}"

    @property
    def uses_autocast(self) -> bool:
        """True if weights stay float32 and autocast chooses the dtype of each operation."""
        return self.mode == "training" if self.autocast is None else self.autocast


@dataclass(frozen=True)
class ModelSettings:
    """What to measure.

    Attributes:
        device: Where.
        dtype: Dtype of weights and images in inference, and of autocast in training (float32: no autocast).
        cases: Models and sizes.
        compile_mode: Mode of `torch.compile`.
        seconds: Time spent on measuring each case, as far as `LEAST_ROUNDS` allow.
        time_limit: Seconds after which no further case is begun, as on a machine lent for a while.
        preparation_limit: Seconds that a contestant has to be compiled, checked and warmed up.
    """

    device: torch.device
    dtype: torch.dtype
    cases: tuple[ModelCase, ...]
    compile_mode: str = "default"
    seconds: float = 2.0
    time_limit: float = math.inf
    preparation_limit: float = math.inf

    def __post_init__(self) -> None:
        if self.dtype not in LARGEST_ERROR:
            known = ", ".join(str(dtype).removeprefix("torch.") for dtype in LARGEST_ERROR)
            raise ValueError(f"dtype must be one of {known}, got {self.dtype}")


@dataclass(frozen=True)
class ModelResult:
    """What one case gave: our model first, then its rivals."""

    case: ModelCase
    measurements: list[Measurement]

    def images_per_second(self, item: Measurement) -> float | None:
        """Throughput of a contestant."""
        return ratio(1e3 * self.case.batch, item.milliseconds)

    def speedup(self, item: Measurement) -> float | None:
        """How many times faster our model is than a contestant."""
        return ratio(item.milliseconds, self.measurements[0].milliseconds)


@dataclass
class ModelReport:
    """Everything measured so far."""

    environment: dict[str, str]
    settings: ModelSettings
    results: list[ModelResult] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """Plain data, with the ratios that the table shows."""

        def row(result: ModelResult, item: Measurement) -> dict[str, Any]:
            speed = {"images_per_second": result.images_per_second(item), "inline_times_faster": result.speedup(item)}
            return {**asdict(item), **speed}

        return {
            "environment": self.environment,
            "device": str(self.settings.device),
            "dtype": str(self.settings.dtype).removeprefix("torch."),
            "compile_mode": self.settings.compile_mode,
            "cases": [
                {**asdict(result.case), "contestants": [row(result, item) for item in result.measurements]}
                for result in self.results
            ],
        }

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> ModelReport:
        """Return the report that `as_json` has written."""
        results = [
            ModelResult(
                build_dataclass(ModelCase, case),
                [build_dataclass(Measurement, item) for item in case["contestants"]],
            )
            for case in content["cases"]
        ]
        cases = tuple(result.case for result in results)
        device, dtype = torch.device(content["device"]), getattr(torch, content["dtype"])
        return cls(content["environment"], ModelSettings(device, dtype, cases, content["compile_mode"]), results)


def default_cases(
    device: torch.device,
    *,
    models: Sequence[str] = ("inline_deit_tiny",),
    sizes: Sequence[int] | None = None,
    modes: Sequence[Mode] = ("inference",),
    rivals: Sequence[Rival] = RIVALS,
    executions: Sequence[Execution] = ("compiled",),
    batch_size: int | None = None,
    quick: bool = False,
) -> tuple[ModelCase, ...]:
    """Every combination; without a batch size, one that keeps the pixels of a batch constant.

    Args:
        device: Decides what is not given: a GPU gets larger images and batches than a CPU.
        models: Names of InLine models.
        sizes: Sides of images in pixels.
        modes: Inference, training or both.
        rivals: Whom to measure against.
        executions: Compiled, eager or both.
        batch_size: Images per step.
        quick: The smallest size only.
    """
    on_gpu = device.type == "cuda"
    sizes = sizes or ((224,) if quick or not on_gpu else (224, 512, 1024, 2048))
    return tuple(
        ModelCase(name, size, batch_size or constant_pixel_batch(size, device), mode, tuple(rivals), execution)
        for mode in modes
        for name in models
        for size in sizes
        for execution in executions
    )


def constant_pixel_batch(size: int, device: torch.device) -> int:
    """As many images as have the pixels of 256 at 224² on a GPU, of 4 on a CPU."""
    at_224 = 256 if device.type == "cuda" else 4
    return max(1, round(at_224 * 224**2 / size**2))


def measure_models(
    settings: ModelSettings,
    *,
    on_progress: Callable[[str], None] | None = None,
    on_result: Callable[[ModelReport], None] | None = None,
) -> ModelReport:
    """Measure every case.

    Args:
        settings: What to measure.
        on_progress: Called once per case and contestant, with what came of its preparation, and once per case with
            its figures; `count_steps` says how often.
        on_result: Called with the report after every case.
    """
    report = ModelReport(describe_environment(), settings)
    deadline = time.monotonic() + settings.time_limit
    for case in settings.cases:
        if time.monotonic() > deadline:
            if on_progress is not None:
                on_progress(f"{case.model} {case.size}² {case.mode}: left out, the time is up")
            continue
        result = measure_case(case, settings, on_progress or (lambda _: None))
        report.results.append(result)
        if on_progress is not None:
            on_progress(_describe(result))
        if on_result is not None:
            on_result(report)
        release_memory(settings.device)
    return report


def count_steps(settings: ModelSettings) -> int:
    """How often `measure_models` reports progress."""
    return sum(2 + len(case.rivals) for case in settings.cases)


def set_backend(model: nn.Module, backend: str) -> nn.Module:
    """Make every block and attention layer of a model use this backend ("eager": plain PyTorch); returns the model."""
    for module in model.modules():
        if isinstance(module, (Block, TokenAttention)):
            module.backend = backend
    return model


def fill_compile_cache(
    settings: ModelSettings, processes: int, *, on_progress: Callable[[str], None] | None = None
) -> None:
    """Compile all contestants in several processes at once; `measure_models` then finds them in PyTorch's disk cache.

    What fails here is left to `measure_models`, which says why.

    Args:
        settings: Settings of the benchmark.
        processes: How many at a time; each holds a model and its activations on the device.
        on_progress: Called with a line as each is done.
    """
    run_compile_jobs(compile_jobs(settings), processes, on_progress=on_progress)


def compile_jobs(settings: ModelSettings) -> dict[str, Callable[[], object]]:
    """What has to be compiled, by description. Training takes longest, so it comes first."""
    return {
        f"{case}: {name}": functools.partial(_compile_once, case, name, settings)
        for case in sorted(settings.cases, key=lambda case: case.mode == "inference")
        if case.execution == "compiled"
        for name in (OURS, *case.rivals)
    }


def _compile_once(case: ModelCase, contestant: str, settings: ModelSettings) -> None:
    torch._dynamo.reset()  # as before each case of the benchmark: what is cached depends on it
    with time_limit(settings.preparation_limit):
        _prepare(contestant, case, settings, _random_batch(case, settings))


def measure_case(case: ModelCase, settings: ModelSettings, on_progress: Callable[[str], None]) -> ModelResult:
    """Measure one case, which need not be one of the settings."""
    device = settings.device
    torch._dynamo.reset()  # models share their code, and a piece of code is compiled for few variants only
    works: dict[str, Work] = {}
    outcomes: dict[str, Measurement] = {}
    images_and_labels: tuple[torch.Tensor, torch.Tensor] | None = None
    for name in (OURS, *case.rivals):
        try:
            images_and_labels = images_and_labels or _random_batch(case, settings)
            with time_limit(settings.preparation_limit):
                step, error, peak_bytes = _prepare(name, case, settings, images_and_labels)
            works[name] = prepare_throughput(step, device)
            outcomes[name] = Measurement(name, "timed", error=error, peak_bytes=peak_bytes)
        except Exception as failure:  # whatever one contestant may raise, the others are to be measured
            outcomes[name] = Measurement.failure(name, failure)
            release_memory(device)
        on_progress(f"{case}: {name} {outcomes[name].note or 'ready'}")
    timings = interleaved_timings(works, seconds=settings.seconds, at_least=LEAST_ROUNDS)
    return ModelResult(
        case,
        [
            Measurement(name, outcome.status, timings.get(name), outcome.error, outcome.note, outcome.peak_bytes)
            for name, outcome in outcomes.items()
        ],
    )


def _random_batch(case: ModelCase, settings: ModelSettings) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator(settings.device).manual_seed(0)
    images = torch.randn(case.batch, 3, case.size, case.size, device=settings.device, generator=generator)
    labels = torch.randint(CLASSES, (case.batch,), device=settings.device, generator=generator)
    return (images if case.uses_autocast else images.to(settings.dtype)), labels


def _prepare(
    contestant: str, case: ModelCase, settings: ModelSettings, images_and_labels: tuple[torch.Tensor, torch.Tensor]
) -> tuple[Callable[[], object], float | None, int | None]:
    """A warm step of a checked contestant, its error, and the peak memory it adds to the images.

    Raises:
        WrongResultError: Logits or gradients are not what they should be.
        ValueError: There is no such rival of this model.
    """
    device = settings.device
    release_memory(device)
    occupied = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    images, labels = images_and_labels
    model = build_contestant(contestant, case, device)
    model = model.train(case.mode == "training")
    if not case.uses_autocast:
        model = model.to(settings.dtype)
    runnable = (
        torch.compile(model, mode=settings.compile_mode, dynamic=False) if case.execution == "compiled" else model
    )

    def logits() -> torch.Tensor:
        enabled = case.uses_autocast and settings.dtype != torch.float32
        with torch.autocast(device.type, settings.dtype, enabled=enabled):
            return runnable(images)

    if case.mode == "inference":

        def step() -> torch.Tensor:
            with torch.no_grad():
                return logits()
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.05, fused=device.type == "cuda")

        def step() -> torch.Tensor:
            optimizer.zero_grad(set_to_none=True)
            loss = F.cross_entropy(logits().float(), labels)
            loss.backward()
            optimizer.step()
            return loss

    with torch.set_grad_enabled(case.mode == "training"):
        first = logits()
    error = _check(contestant, model, images, first)
    if case.mode == "training":
        _check_gradients(contestant, model, images, labels, first)
    del first
    # While warming up, not later: a replayed CUDA graph allocates nothing, so that only its recording shows its memory.
    reset_peak(device)
    last = [step() for _ in range(WARM_UP_STEPS)][-1]
    peak_bytes = read_peak(device, occupied)
    if not last.isfinite().all() or not all(parameter.isfinite().all() for parameter in model.parameters()):
        raise WrongResultError("a step leaves something that is not finite")
    return step, error, peak_bytes


def build_contestant(contestant: str, case: ModelCase, device: torch.device) -> nn.Module:
    """The model of a contestant, with random weights.

    Raises:
        ValueError: There is no such rival of this model.
    """
    # Stochastic depth is a training recipe's choice, with other defaults in timm.
    arguments: dict[str, Any] = {"img_size": case.size, "num_classes": CLASSES, "drop_path_rate": 0.0}
    torch.manual_seed(0)
    with device:
        if contestant == "timm":
            name = case.model if case.converted else TIMM_RIVALS.get(case.model)
            if name is None:
                raise ValueError(f"timm has no model of the size of {case.model}; compare with 'plain' or 'softmax'")
            return timm.create_model(name, **arguments)
        if contestant == "softmax":
            if case.converted:
                raise ValueError(f"this library has no softmax twin of {case.model}; compare with 'timm'")
            return create_model(case.model.replace("inline_", "softmax_", 1), **arguments)
        model = _converted(case.model, arguments) if case.converted else create_model(case.model, **arguments)
    return set_backend(model, "eager" if contestant == "plain" else "auto")


def _converted(name: str, arguments: dict[str, Any]) -> nn.Module:
    model = timm.create_model(name, **arguments)
    convert_attention(model)
    for module in model.modules():
        if isinstance(module, TokenAttention) and module.residual is not None:
            for parameter in module.residual.parameters():  # zeros would hide a wrong local term
                nn.init.trunc_normal_(parameter, std=0.02)
    return model


def _check(contestant: str, model: nn.Module, images: torch.Tensor, logits: torch.Tensor) -> float | None:
    """Relative error of the logits of the first images, against the same weights on plain PyTorch in float32.

    Rivals from elsewhere have nothing to be compared with; theirs must be finite.
    """
    if not logits.isfinite().all():
        raise WrongResultError("the logits are not finite")
    if contestant not in (OURS, "plain"):
        return None
    exact_model = set_backend(copy.deepcopy(model), "eager").float()
    with torch.no_grad():
        exact = torch.cat([exact_model(image[None].float()) for image in images[:CHECKED_IMAGES]])
    error = relative_error(logits[:CHECKED_IMAGES], exact)
    limit = LARGEST_ERROR[logits.dtype]
    if not error <= limit:
        raise WrongResultError(f"relative error {error:.1e} of the logits exceeds {limit:.0e}")
    return error


def _check_gradients(
    contestant: str, model: nn.Module, images: torch.Tensor, labels: torch.Tensor, logits: torch.Tensor
) -> None:
    """Compare the gradients of all parameters with those of the same weights on plain PyTorch in float32.

    Raises:
        WrongResultError: They differ too much, or are not finite.
    """
    F.cross_entropy(logits.float(), labels).backward()
    gradients = _flat_gradients(model)
    model.zero_grad(set_to_none=True)
    if not gradients.isfinite().all():
        raise WrongResultError("the gradients are not finite")
    if contestant not in (OURS, "plain"):
        return
    exact_model = set_backend(copy.deepcopy(model), "eager").float()
    for some, their_labels in zip(images.split(IMAGES_AT_ONCE), labels.split(IMAGES_AT_ONCE), strict=True):
        loss = F.cross_entropy(exact_model(some.float()), their_labels, reduction="sum") / len(images)
        loss.backward()
    error = relative_error(gradients, _flat_gradients(exact_model))
    limit = LARGEST_GRADIENT_ERROR[logits.dtype]
    if not error <= limit:
        raise WrongResultError(f"relative error {error:.1e} of the gradients exceeds {limit:.0e}")


def _flat_gradients(model: nn.Module) -> torch.Tensor:
    """All gradients in a row; zeros for a parameter without one."""
    pairs = [(parameter, parameter.grad) for parameter in model.parameters()]
    return torch.cat([(torch.zeros_like(owner) if grad is None else grad).flatten().float() for owner, grad in pairs])


def reset_peak(device: torch.device) -> None:
    """Begin to measure the peak memory of a GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)


def read_peak(device: torch.device, occupied: int) -> int | None:
    """Bytes of a GPU in use at most since `reset_peak`, beyond what was occupied before; None on a CPU."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - occupied


def _describe(result: ModelResult) -> str:
    case = result.case
    cells = [
        f"{item.contestant} {item.status if speed is None else f'{speed:,.0f} images/s'}"
        for item in result.measurements
        for speed in (result.images_per_second(item),)
    ]
    return f"{case}: {', '.join(cells)}"
