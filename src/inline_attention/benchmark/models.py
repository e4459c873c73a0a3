"""Time whole models: images per second and peak memory of an InLine model and its rivals, in one run.

Rivals: "timm" (timm's softmax model of the same size), "plain" (the same model and weights with `backend="eager"`) and
"softmax" (the softmax twin from this library). The logits of an InLine model are checked against the same weights on
plain PyTorch in float32 before it is timed.
"""

from __future__ import annotations

import copy
import functools
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, NamedTuple, cast, get_args

import timm
import torch
import torch.nn.functional as F
from torch import nn
from torch.profiler import ProfilerActivity, profile

from inline_attention.benchmark import results, timing
from inline_attention.benchmark.environment import describe_environment
from inline_attention.benchmark.results import Measurement, check_close, check_finite, ratio
from inline_attention.benchmark.side_by_side import time_limit
from inline_attention.benchmark.timing import Call, Work, read_peak, release_memory, reset_peak, synchronize
from inline_attention.layers.attention import TokenAttention
from inline_attention.layers.block import Block
from inline_attention.layers.conversion import convert_attention
from inline_attention.models import create_model, list_models
from inline_attention.support.untrusted import build_dataclass, build_value

Mode = Literal["inference", "training"]
MODES: tuple[Mode, ...] = get_args(Mode)
Rival = Literal["timm", "plain", "softmax"]
RIVALS: tuple[Rival, ...] = get_args(Rival)
Execution = Literal["compiled", "eager"]
EXECUTIONS: tuple[Execution, ...] = get_args(Execution)
OURS = "inline"

# Models of equal depth and width. timm's DeiT-S and DeiT-B are wider than ours; it has no PVT or CSWin.
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
IMAGES_AT_ONCE = 16  # on plain PyTorch in float32, which needs the most memory
WARM_UP_STEPS = 3
LEAST_ROUNDS = 5
CLASSES = 1000
PATCH_SIZE = 16  # of models whose blocks are measured
BLOCK_REPEATS_AND_ROUNDS = {"cuda": (30, 15), "cpu": (1, 3)}
LAUNCH = re.compile(r"cu(da)?(LaunchKernel|LaunchCooperativeKernel|GraphLaunch|Memcpy|Memset)")


@dataclass(frozen=True)
class ModelCase:
    """One model at one size."""

    model: str  # name of an InLine model, or of timm's if `converted`
    size: int  # side of its square images in pixels
    batch: int
    mode: Mode = "inference"  # "inference", or a "training" step: forward, backward and AdamW
    rivals: tuple[Rival, ...] = ("timm",)
    execution: Execution = "compiled"  # "compiled" by `torch.compile`, or "eager"
    converted: bool = False  # measure timm's model after `convert_attention` against the original
    # Autocast over float32 weights, or weights of the settings' dtype. None: autocast in training only.
    autocast: bool | None = None

    def __post_init__(self) -> None:
        if self.converted and not timm.is_model(self.model):
            raise ValueError(f"timm has no model {self.model!r}; timm.list_models() lists them")
        if not self.converted and self.model not in list_models("inline_*"):
            raise ValueError(f"there is no InLine model {self.model!r}; `inline models` lists them")

    def __str__(self) -> str:
        precision = {None: "", True: ", autocast", False: ", half weights"}[self.autocast]
        return f"{self.model} {self.size}² B={self.batch} {self.mode}{precision} {self.execution}"

    @property
    def contestants(self) -> tuple[str, ...]:
        """Our model, then its rivals."""
        return (OURS, *self.rivals)

    @property
    def uses_autocast(self) -> bool:
        """True if weights stay float32 and autocast chooses the dtype of each operation."""
        return self.mode == "training" if self.autocast is None else self.autocast


@dataclass(frozen=True)
class ModelSettings:
    """What to measure."""

    device: torch.device
    dtype: torch.dtype  # of weights and images in inference, of autocast in training (float32: no autocast)
    cases: tuple[ModelCase, ...]
    compile_mode: str = "default"
    seconds: float = 2.0  # of timing per case
    time_limit: float = math.inf  # seconds after which no further case is started
    preparation_limit: float = math.inf  # seconds to compile, check and warm up one contestant


@dataclass(frozen=True)
class ModelResult:
    """Measurements of one case: our model first, then its rivals."""

    case: ModelCase
    measurements: list[Measurement]

    def images_per_second(self, item: Measurement) -> float | None:
        """Return the throughput of a contestant."""
        return ratio(1e3 * self.case.batch, item.milliseconds)

    def speedup(self, item: Measurement) -> float | None:
        """Return how many times faster our model is than a contestant."""
        return ratio(item.milliseconds, self.measurements[0].milliseconds)

    def as_json(self) -> dict[str, Any]:
        """Return plain data, with the ratios that the table shows."""

        def row(item: Measurement) -> dict[str, Any]:
            speed = {"images_per_second": self.images_per_second(item), "inline_times_faster": self.speedup(item)}
            return {**asdict(item), **speed}

        return {**asdict(self.case), "contestants": [row(item) for item in self.measurements]}


@dataclass
class ModelReport:
    """The results so far."""

    environment: dict[str, str]
    settings: ModelSettings
    results: list[ModelResult] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            "environment": self.environment,
            "device": str(self.settings.device),
            "dtype": results.dtype_name(self.settings.dtype),
            "compile_mode": self.settings.compile_mode,
            "cases": [result.as_json() for result in self.results],
        }

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> ModelReport:
        """Return the report that `as_json` has written."""
        found: list[ModelResult] = []
        for case in content["cases"]:
            measurements = build_value(list[Measurement], case["contestants"])
            found.append(ModelResult(build_dataclass(ModelCase, case), measurements))
        device, dtype = torch.device(content["device"]), getattr(torch, content["dtype"])
        settings = ModelSettings(device, dtype, tuple(result.case for result in found), content["compile_mode"])
        return cls(content["environment"], settings, found)


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
    """Return every combination; without a batch size, one that keeps the pixels of a batch constant."""
    sizes = sizes or ((224,) if quick or device.type != "cuda" else (224, 512, 1024, 2048))
    return tuple(
        ModelCase(name, size, batch_size or constant_pixel_batch(size, device), mode, tuple(rivals), execution)
        for mode in modes
        for name in models
        for size in sizes
        for execution in executions
    )


def constant_pixel_batch(size: int, device: torch.device) -> int:
    """Return how many images have the pixels of 256 at 224² on a GPU, of 4 on a CPU."""
    at_224 = 256 if device.type == "cuda" else 4
    return max(1, round(at_224 * 224**2 / size**2))


def measure_models(
    settings: ModelSettings, on_step: Callable[[ModelReport, str], None] = lambda *_: None
) -> ModelReport:
    """Measure every case.

    `on_step` is called with the report so far and a line: for each contestant that is ready, then for the case.
    """
    report = ModelReport(describe_environment(), settings)
    deadline = time.monotonic() + settings.time_limit
    for case in settings.cases:
        if time.monotonic() > deadline:
            on_step(report, f"{case}: left out, the time is up")
            continue
        report.results.append(measure_case(case, settings, lambda line: on_step(report, line)))
        on_step(report, f"{case}: {results.describe(report.results[-1].measurements)}")
        release_memory(settings.device)
    return report


def count_steps(settings: ModelSettings) -> int:
    """Return the number of steps of `measure_models`."""
    return sum(1 + len(case.contestants) for case in settings.cases)


def set_backend(model: nn.Module, backend: str) -> nn.Module:
    """Make every block and attention layer of a model use this backend ("eager": plain PyTorch); return the model."""
    for module in model.modules():
        if isinstance(module, (Block, TokenAttention)):
            module.backend = backend
    return model


def compile_jobs(settings: ModelSettings) -> dict[str, Call]:
    """Return functions that compile each contestant, by description. Training takes longest, so it comes first."""
    return {
        f"{case}: {name}": functools.partial(_compile_once, case, name, settings)
        for case in sorted(settings.cases, key=lambda case: case.mode == "inference")
        if case.execution == "compiled"
        for name in case.contestants
    }


def _compile_once(case: ModelCase, contestant: str, settings: ModelSettings) -> None:
    torch._dynamo.reset()  # as before each case of the benchmark: cache keys depend on it
    _prepare(contestant, case, settings, *_random_batch(case, settings))


def measure_case(
    case: ModelCase, settings: ModelSettings, on_ready: Callable[[str], None] = lambda _: None
) -> ModelResult:
    """Measure one case, which need not be one of the settings."""
    torch._dynamo.reset()  # models share their code, and a piece of code is compiled for few variants only
    batch = functools.cache(lambda: _random_batch(case, settings))

    def prepare(name: str) -> tuple[Work, float | None, int | None]:
        with time_limit(settings.preparation_limit):
            step, error, peak_bytes = _prepare(name, case, settings, *batch())
        return timing.prepare_throughput(step, settings.device), error, peak_bytes

    measurements = results.measure_contestants(
        case.contestants, prepare, settings.device, seconds=settings.seconds, at_least=LEAST_ROUNDS,
        on_ready=lambda item: on_ready(f"{case}: {item.contestant} {item.note or 'ready'}"),
    )  # fmt: skip
    return ModelResult(case, measurements)


def _random_batch(case: ModelCase, settings: ModelSettings) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator(settings.device).manual_seed(0)
    images = torch.randn(case.batch, 3, case.size, case.size, device=settings.device, generator=generator)
    labels = torch.randint(CLASSES, (case.batch,), device=settings.device, generator=generator)
    return (images if case.uses_autocast else images.to(settings.dtype)), labels


def _prepare(
    contestant: str, case: ModelCase, settings: ModelSettings, images: torch.Tensor, labels: torch.Tensor
) -> tuple[Call, float | None, int | None]:
    """Return a warm step of a checked contestant, its error, and its peak memory without the images."""
    device, is_training = settings.device, case.mode == "training"
    release_memory(device)
    occupied = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    model = build_contestant(contestant, case, device).train(is_training)
    if not case.uses_autocast:
        model = model.to(settings.dtype)
    runnable = model
    if case.execution == "compiled":
        runnable = torch.compile(model, mode=settings.compile_mode, dynamic=False)

    def logits() -> torch.Tensor:
        enabled = case.uses_autocast and settings.dtype != torch.float32
        with torch.autocast(device.type, settings.dtype, enabled=enabled), torch.set_grad_enabled(is_training):
            return runnable(images)

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.05, fused=device.type == "cuda")

    def train() -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = F.cross_entropy(logits().float(), labels)
        loss.backward()
        optimizer.step()
        return loss

    step = train if is_training else logits
    error = _check(contestant, model, images, labels, logits())
    # During warm-up: a replayed CUDA graph allocates nothing, so only its recording shows its memory.
    reset_peak(device)
    last = [step() for _ in range(WARM_UP_STEPS)][-1]
    peak_bytes = read_peak(device, occupied)
    for values in (last, *model.parameters()):
        check_finite("loss, logits or weights after a step", values)
    return step, error, peak_bytes


def build_contestant(contestant: str, case: ModelCase, device: torch.device) -> nn.Module:
    """Return the model of a contestant, with random weights; `ValueError` if there is no such rival."""
    # Stochastic depth belongs to training recipes, and timm has other defaults.
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
            for parameter in module.residual.parameters():  # zeros would hide a wrong 3×3 term
                nn.init.trunc_normal_(parameter, std=0.02)
    return model


def _check(
    contestant: str, model: nn.Module, images: torch.Tensor, labels: torch.Tensor, logits: torch.Tensor
) -> float | None:
    """Check logits, and in training mode gradients, against the same weights on plain PyTorch in float32.

    Return the error of the logits. Those of other models must be finite; there is nothing to compare them with.
    """
    check_finite("logits", logits)
    gradients = torch.zeros(())
    if model.training:
        F.cross_entropy(logits.float(), labels).backward()
        gradients = _flat_gradients(model)
        check_finite("gradients", gradients)
        model.zero_grad(set_to_none=True)
    if contestant not in (OURS, "plain"):
        return None
    exact_model = set_backend(copy.deepcopy(model), "eager").float()
    with torch.no_grad():
        exact = torch.cat([exact_model(image[None].float()) for image in images[:CHECKED_IMAGES]])
    error = check_close("logits", logits[:CHECKED_IMAGES], exact, LARGEST_ERROR[logits.dtype])
    if model.training:
        for some, their_labels in zip(images.split(IMAGES_AT_ONCE), labels.split(IMAGES_AT_ONCE), strict=True):
            loss = F.cross_entropy(exact_model(some.float()), their_labels, reduction="sum") / len(images)
            loss.backward()
        check_close("gradients", gradients, _flat_gradients(exact_model), LARGEST_GRADIENT_ERROR[logits.dtype])
    return error


def _flat_gradients(model: nn.Module) -> torch.Tensor:
    """Return all gradients in one vector, with zeros for a parameter without one."""
    pairs = [(parameter, parameter.grad) for parameter in model.parameters()]
    return torch.cat([(torch.zeros_like(owner) if grad is None else grad).flatten().float() for owner, grad in pairs])


class BlockCost(NamedTuple):
    """Kernels, copies and fills that the host starts on a GPU in one pass, and the host's time."""

    launches: int
    microseconds: float


def measure_blocks(case: ModelCase, device: torch.device, dtype: torch.dtype) -> dict[str, dict[str, BlockCost]]:
    """Return the cost of the first block of each contestant, by pass ("forward", "backward"), in a training step.

    The batch is one, so that the GPU waits for the host and never the host for the GPU. The model must have patches of
    16² pixels. The dtype is that of autocast; float32 is no autocast.
    """
    calls = prepare_blocks(case, device, dtype)
    repeats, rounds = BLOCK_REPEATS_AND_ROUNDS[device.type]
    works = {name: timing.host_work(call, device, repeats) for name, call in calls.items()}
    timings = timing.interleaved_timings(works, seconds=0, at_least=rounds)
    costs = {
        key: BlockCost(_count_launches(call, device), 1e3 * timings[key].milliseconds) for key, call in calls.items()
    }
    result: dict[str, dict[str, BlockCost]] = {}
    for name in case.contestants:
        forward, both = costs[f"{name} forward"], costs[f"{name} both"]
        backward = BlockCost(both.launches - forward.launches, both.microseconds - forward.microseconds)
        result[name] = {"forward": forward, "backward": backward}
    return result


def prepare_blocks(case: ModelCase, device: torch.device, dtype: torch.dtype) -> dict[str, Call]:
    """Compile, check and warm up the blocks of all contestants; return their calls "NAME forward" and "NAME both"."""
    torch._dynamo.reset()  # blocks share their code, and a piece of code is compiled for few variants only
    calls: dict[str, Call] = {}
    for name in case.contestants:
        calls[f"{name} forward"], calls[f"{name} both"] = _prepare_block(name, case, device, dtype)
    return calls


def _count_launches(call: Call, device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    synchronize(device)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        call()
        synchronize(device)
    return sum(LAUNCH.match(event.name) is not None for event in profiler.events() or ())


def _prepare_block(contestant: str, case: ModelCase, device: torch.device, dtype: torch.dtype) -> tuple[Call, Call]:
    blocks = cast(nn.Sequential, build_contestant(contestant, case, device).train().blocks)
    block = blocks[0]
    side = case.size // PATCH_SIZE
    grid = ((side, side),) if isinstance(block, Block) else ()
    channels = cast(nn.LayerNorm, block.norm1).normalized_shape[0]
    generator = torch.Generator(device).manual_seed(0)
    tokens, grad = torch.randn(2, 1, 1 + side**2, channels, generator=generator, device=device)
    tokens.requires_grad_()
    runnable: Any = torch.compile(block, dynamic=False) if case.execution == "compiled" else block

    def forward() -> torch.Tensor:
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            return runnable(tokens, *grid)

    def both() -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(forward(), [tokens, *block.parameters()], grad)

    if contestant == OURS:
        exact_tokens = tokens.detach().double().requires_grad_()
        exact = set_backend(copy.deepcopy(block), "eager").double()(exact_tokens, *grid)
        exact_gradient = torch.autograd.grad(exact, exact_tokens, grad.double())[0]
        check_close("block's output", forward(), exact, LARGEST_ERROR[dtype])
        check_close("block's gradient", both()[0], exact_gradient, LARGEST_ERROR[dtype])
    for _ in range(WARM_UP_STEPS):
        forward()
        both()
    return forward, both
