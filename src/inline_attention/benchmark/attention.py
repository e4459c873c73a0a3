"""Attention from packed qkv: every backend of InLine, local residual included, against PyTorch's softmax.

Nothing is timed before its output and gradients agree with float64. Beside the times stands the floor: how long it
takes to read q, k and v and to write the output at the rate of a plain copy.

Shapes: `B` batch, `N` tokens, `H` heads, `D` head dim, `C` = H·D.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, TypeAlias, get_args

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from inline_attention.benchmark.environment import describe_environment
from inline_attention.benchmark.results import Measurement, WrongResultError, ratio, relative_error
from inline_attention.benchmark.timing import (
    Work,
    interleaved_timings,
    measure_copy_rate,
    measure_host_overheads,
    prepare_work,
    release_memory,
)
from inline_attention.ops import dispatch, inline_attention_qkvpacked
from inline_attention.ops.call import Normalization
from inline_attention.support.untrusted import build_dataclass

Pass = Literal["forward", "forward+backward"]
PASSES: tuple[Pass, ...] = get_args(Pass)
Compiled = Literal["none", "first", "all"]
Attend: TypeAlias = Callable[["Inputs"], torch.Tensor]

LARGEST_ERROR = {torch.float32: 1e-4, torch.bfloat16: 1e-2, torch.float16: 1e-2}  # relative, against float64
LARGEST_TF32_ERROR = 2e-3
CHECKED_SAMPLES = 3
# Inputs rotate until they have filled the cache this often, so that none is found there when its turn comes again.
CACHE_TURNOVERS = 4
MOST_INPUT_SETS = 64  # reached by problems so small that a model, too, would find them in the cache
LEAST_ROUNDS = 9
HOST_WARM_UP_CALLS = 10


@dataclass(frozen=True)
class AttentionCase:
    """One size.

    Attributes:
        tokens: N.
        channels: C.
        head_dim: D.
        batch: B.
        compiled: Whether plain PyTorch under `torch.compile` takes part, which takes seconds to compile.
        grid: `(h, w)` with h·w = N; None for the squarest.
        local: Whether InLine adds the 3×3 term.
        padded: Whether images are of unequal height, with a key padding mask.
        feature_map: Feature map of InLine.
        normalization: Normalization of InLine.
    """

    tokens: int
    channels: int
    head_dim: int
    batch: int
    compiled: bool = False
    grid: tuple[int, int] | None = None
    local: bool = True
    padded: bool = False
    feature_map: str = "identity"
    normalization: Normalization = "subtract"

    @property
    def heads(self) -> int:
        """H."""
        return self.channels // self.head_dim

    @property
    def elements(self) -> int:
        """B·N·C."""
        return self.batch * self.tokens * self.channels

    @property
    def grid_size(self) -> tuple[int, int]:
        """Height and width in tokens."""
        if self.grid is not None:
            return self.grid
        height = next(side for side in range(math.isqrt(self.tokens), 0, -1) if self.tokens % side == 0)
        return height, self.tokens // height


# One 1024² image in 16² patches.
LATENCY_CASE = AttentionCase(tokens=4096, channels=192, head_dim=32, batch=1)


@dataclass(frozen=True)
class AttentionSettings:
    """What to measure.

    Attributes:
        device: Where.
        dtype: Dtype of qkv and local weights.
        cases: Sizes.
        passes: Forward, forward and backward, or both.
        latency_case: Single-image case, or None to leave it out.
        contestants: Names of those that take part; None for all.
        seconds: Time spent on measuring each pass of each case, as far as `LEAST_ROUNDS` allow.
    """

    device: torch.device
    dtype: torch.dtype
    cases: tuple[AttentionCase, ...]
    passes: tuple[Pass, ...] = PASSES
    latency_case: AttentionCase | None = LATENCY_CASE
    contestants: tuple[str, ...] | None = None
    seconds: float = 1.0

    def __post_init__(self) -> None:
        if self.dtype not in LARGEST_ERROR:
            known = ", ".join(str(dtype).removeprefix("torch.") for dtype in LARGEST_ERROR)
            raise ValueError(f"dtype must be one of {known}, got {self.dtype}")
        for case in self.cases:
            if case.channels % case.head_dim != 0:
                raise ValueError(
                    f"channels must be divisible by the head dim, got {case.channels} and {case.head_dim}; "
                    f"try a head dim of {math.gcd(case.channels, case.head_dim)}"
                )


@dataclass(frozen=True)
class CaseResult:
    """What one case gave: the floor of the forward pass in milliseconds, and measurements by pass."""

    case: AttentionCase
    floor: float
    measurements: dict[str, list[Measurement]]

    def milliseconds(self, pass_: str, contestant: str) -> float | None:
        """Median of a contestant, None where it was not timed."""
        found = [item for item in self.measurements.get(pass_, ()) if item.contestant == contestant]
        return found[0].milliseconds if found else None

    def best_softmax(self, pass_: str) -> float | None:
        """Milliseconds of the quickest softmax."""
        times = [item.milliseconds for item in self.measurements.get(pass_, ()) if item.contestant in SOFTMAX_KERNELS]
        return min((time for time in times if time is not None), default=None)


@dataclass
class AttentionReport:
    """Everything measured so far.

    Attributes:
        environment: Where.
        settings: What was asked for.
        copy_rate: Bytes per second, read and written, of a large copy: what floors are computed from.
        results: One per case.
        latency: Results of the single-image case.
        host_overhead: Microseconds of the host by contestant and pass, on a tiny problem; a reason where there is none.
    """

    environment: dict[str, str]
    settings: AttentionSettings
    copy_rate: float
    results: list[CaseResult] = field(default_factory=list)
    latency: CaseResult | None = None
    host_overhead: dict[str, dict[str, float | str]] = field(default_factory=dict)

    @property
    def contestants(self) -> list[str]:
        """Everyone who took part, in a fixed order."""
        results = [*self.results, *([self.latency] if self.latency else [])]
        taking_part = {
            item.contestant for result in results for items in result.measurements.values() for item in items
        }
        return [name for name in contestants_of(self.settings.device) if name in taking_part]

    def as_json(self) -> dict[str, Any]:
        """Plain data, with the ratios that the tables show."""
        return {
            "environment": self.environment,
            "device": str(self.settings.device),
            "dtype": str(self.settings.dtype).removeprefix("torch."),
            "copy_bytes_per_second": self.copy_rate,
            "cases": [_case_as_json(result) for result in self.results],
            "latency": None if self.latency is None else _case_as_json(self.latency),
            "host_overhead_microseconds": self.host_overhead,
        }

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> AttentionReport:
        """Return the report that `as_json` has written, without latency and host overhead."""
        results = [
            CaseResult(
                build_dataclass(AttentionCase, case),
                case["floor_ms"],
                {
                    pass_: [build_dataclass(Measurement, item) for item in items]
                    for pass_, items in case["passes"].items()
                },
            )
            for case in content["cases"]
        ]
        cases = tuple(result.case for result in results)
        settings = AttentionSettings(torch.device(content["device"]), getattr(torch, content["dtype"]), cases)
        return cls(content["environment"], settings, content["copy_bytes_per_second"], results)


@dataclass(frozen=True)
class Inputs:
    """One set of arguments.

    Attributes:
        qkv: `[B, N, 3, H, D]`, a leaf.
        local_weight: `[B, H, D, 3, 3]`, a leaf, or None.
        grad: Gradient of the output, `[B, N, H, D]`.
        mask: Key padding mask `[B, N]`, or None.
        case: What they were made for.
    """

    qkv: torch.Tensor
    local_weight: torch.Tensor | None
    grad: torch.Tensor
    mask: torch.Tensor | None
    case: AttentionCase

    @classmethod
    def random(cls, case: AttentionCase, device: torch.device, dtype: torch.dtype, seed: int) -> Inputs:
        """Normally distributed, the same for the same seed."""
        generator = torch.Generator(device).manual_seed(seed)
        size = (case.batch, case.tokens, 3, case.heads, case.head_dim)
        options: dict[str, Any] = {"generator": generator, "device": device, "dtype": dtype}
        qkv = torch.randn(size, **options).requires_grad_()
        local_weight = None
        if case.local:
            local_weight = torch.randn(case.batch, case.heads, case.head_dim, 3, 3, **options).requires_grad_()
        grad = torch.randn(case.batch, case.tokens, case.heads, case.head_dim, **options)
        return cls(qkv, local_weight, grad, _padding_mask(case, device) if case.padded else None, case)

    def sample(self, index: int) -> Inputs:
        """One sample in float64."""
        one = slice(index, index + 1)
        return Inputs(
            self.qkv[one].detach().double().requires_grad_(),
            None if self.local_weight is None else self.local_weight[one].detach().double().requires_grad_(),
            self.grad[one].double(),
            None if self.mask is None else self.mask[one],
            self.case,
        )

    @property
    def leaves(self) -> tuple[torch.Tensor, ...]:
        """What gradients are taken with respect to."""
        return (self.qkv,) if self.local_weight is None else (self.qkv, self.local_weight)


SOFTMAX_KERNELS: dict[str, SDPBackend | None] = {
    "sdpa": None,  # whichever PyTorch picks
    "sdpa-flash": SDPBackend.FLASH_ATTENTION,
    "sdpa-cudnn": SDPBackend.CUDNN_ATTENTION,
    "sdpa-efficient": SDPBackend.EFFICIENT_ATTENTION,
}
COMPILED = "eager-compiled"


def default_cases(
    device: torch.device,
    *,
    tokens: Sequence[int] | None = None,
    channels: Sequence[int] | None = None,
    head_dims: Sequence[int] | None = None,
    elements: int | None = None,
    compiled: Compiled | None = None,
    quick: bool = False,
) -> tuple[AttentionCase, ...]:
    """Every combination of sizes, with a batch that makes B·N·C about `elements`.

    Args:
        device: Decides what is not given: a GPU gets the sizes of the published tables, a CPU smaller ones.
        tokens: Values of N.
        channels: Values of C.
        head_dims: Values of D.
        elements: B·N·C.
        compiled: Where to time compiled plain PyTorch: nowhere, at the first C and D only, or everywhere.
        quick: Fewer and smaller defaults.
    """
    on_gpu = device.type == "cuda"
    if quick:
        default_tokens: Sequence[int] = (196, 784)
        default_channels, default_head_dims = (192,), (32,)
    elif on_gpu:
        default_tokens, default_channels, default_head_dims = (196, 784, 3136, 16384, 65536), (192, 768), (32, 64)
    else:
        default_tokens, default_channels, default_head_dims = (196, 784, 3136), (192,), (32,)
    elements = elements or (25_000_000 if on_gpu else 600_000) // (8 if quick else 1)
    compiled = compiled or ("first" if on_gpu and not quick else "none")
    pairs = [(width, dim) for width in channels or default_channels for dim in head_dims or default_head_dims]
    return tuple(
        AttentionCase(
            size, width, dim,
            batch=max(1, round(elements / (size * width))),
            compiled=compiled == "all" or (compiled == "first" and (width, dim) == pairs[0]),
        )
        for width, dim in pairs
        for size in tokens or default_tokens
    )  # fmt: skip


def contestants_of(device: torch.device) -> list[str]:
    """Names of all contestants: softmax first, then plain InLine, then what the dispatch table holds, then "auto"."""
    softmax = ["sdpa-flash", "sdpa-cudnn"] if device.type == "cuda" else ["sdpa"]
    return [*softmax, "eager", COMPILED, *_fused_backends(), "auto"]


def measure_attention(
    settings: AttentionSettings,
    *,
    on_progress: Callable[[str], None] | None = None,
    on_result: Callable[[AttentionReport], None] | None = None,
) -> AttentionReport:
    """Measure every case; then, on a GPU, the latency of one image and the host's overhead.

    Args:
        settings: What to measure.
        on_progress: Called with what has just been done; `count_steps` says how often.
        on_result: Called with the report whenever something has been added to it.
    """

    def advance(text: str) -> None:
        if on_progress is not None:
            on_progress(text)
        if on_result is not None:
            on_result(report)

    report = AttentionReport(describe_environment(), settings, measure_copy_rate(settings.device))
    advance(f"copy rate {report.copy_rate / 1e12:.3g} TB/s")
    if settings.device.type == "cuda":
        report.host_overhead = _measure_host_overheads(settings)
        advance("host overhead")
    for result, text in _measure_case(settings.latency_case, settings, ("forward",), report.copy_rate):
        report.latency = result
        advance(f"single image: {text}")
    for case in settings.cases:
        report.results.append(CaseResult(case, 0.0, {}))
        for result, text in _measure_case(case, settings, settings.passes, report.copy_rate):
            report.results[-1] = result
            advance(text)
    return report


def count_steps(settings: AttentionSettings) -> int:
    """How often `measure_attention` reports progress."""
    on_gpu = settings.device.type == "cuda"
    return 1 + on_gpu + (settings.latency_case is not None) + len(settings.cases) * len(settings.passes)


def measure_case(case: AttentionCase, settings: AttentionSettings, copy_rate: float) -> CaseResult:
    """Measure every pass of one case, which need not be one of the settings."""
    *_, (result, _) = _measure_case(case, settings, settings.passes, copy_rate)
    return result


def compile_kernels(case: AttentionCase, settings: AttentionSettings) -> None:
    """Run two samples of a case once, so that later processes find the kernels on disk."""
    inputs = Inputs.random(replace(case, batch=min(2, case.batch)), settings.device, settings.dtype, seed=0)
    for pass_ in settings.passes:
        _evaluate(_contestant("auto"), inputs, pass_)


def _measure_case(
    case: AttentionCase | None, settings: AttentionSettings, passes: Sequence[Pass], copy_rate: float
) -> Iterator[tuple[CaseResult, str]]:
    """The result of a case after each pass, with a line that describes it."""
    if case is None:
        return
    device, dtype = settings.device, settings.dtype
    floor = 1e3 * 4 * case.elements * dtype.itemsize / copy_rate
    result = CaseResult(case, floor, {})
    torch._dynamo.reset()  # a compiled function keeps few shapes; beyond, it would silently run uncompiled
    for pass_ in passes:
        try:
            sets = _input_sets(case, device, dtype)
        except RuntimeError as error:
            result.measurements[pass_] = [Measurement.failure(name, error) for name in _taking_part(case, settings)]
        else:
            result.measurements[pass_] = _measure_pass(case, sets, pass_, settings)
            del sets
        release_memory(device)
        yield result, _describe(result, pass_)


def _measure_pass(
    case: AttentionCase, sets: Sequence[Inputs], pass_: Pass, settings: AttentionSettings
) -> list[Measurement]:
    device = settings.device
    exact: dict[int, list[torch.Tensor]] = {}
    works: dict[str, Work] = {}
    outcomes: dict[str, Measurement] = {}
    pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
    for name in _taking_part(case, settings):
        try:
            # SDPA says by warnings why a kernel cannot run, and by an error that none can.
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                attend = _contestant(name)
                error = None
                if name not in SOFTMAX_KERNELS:
                    exact = exact or _exact_results(sets[0], pass_)
                    error = _check(attend, sets[0], exact, pass_)
                works[name] = prepare_work([_call(attend, name, inputs, pass_) for inputs in sets], device, pool)
            outcomes[name] = Measurement(name, "timed", error=error)
        except Exception as failure:
            # Whatever one contestant may raise, compilers' own exceptions included, the others are to be measured.
            outcomes[name] = Measurement.failure(name, failure)
            release_memory(device)
    timings = interleaved_timings(works, seconds=settings.seconds, at_least=LEAST_ROUNDS)
    return [
        Measurement(name, outcome.status, timings.get(name), outcome.error, outcome.note)
        for name, outcome in outcomes.items()
    ]


def _taking_part(case: AttentionCase, settings: AttentionSettings) -> list[str]:
    if settings.contestants is not None:
        return list(settings.contestants)
    return [name for name in contestants_of(settings.device) if name != COMPILED or case.compiled]


def _fused_backends() -> list[str]:
    return [backend.name for backend in dispatch.AUTO_BACKENDS if backend.name != "eager"]


def _contestant(name: str) -> Attend:
    if name in SOFTMAX_KERNELS:
        return functools.partial(_softmax, kernel=SOFTMAX_KERNELS[name])
    if name == COMPILED:
        compiled = torch.compile(inline_attention_qkvpacked, dynamic=False)
        return lambda inputs: compiled(inputs.qkv, **_options(inputs), backend="eager")
    return functools.partial(_inline, backend=name)


def _inline(inputs: Inputs, *, backend: str) -> torch.Tensor:
    return inline_attention_qkvpacked(inputs.qkv, **_options(inputs), backend=backend)


def _options(inputs: Inputs) -> dict[str, Any]:
    return {
        "feature_map": inputs.case.feature_map,
        "normalization": inputs.case.normalization,
        "key_padding_mask": inputs.mask,
        "local_weight": inputs.local_weight,
        "grid_size": inputs.case.grid_size if inputs.case.local else None,
    }


def _softmax(inputs: Inputs, *, kernel: SDPBackend | None) -> torch.Tensor:
    q, k, v = inputs.qkv.permute(2, 0, 3, 1, 4)
    mask = None if inputs.mask is None else inputs.mask[:, None, None, :]
    with nullcontext() if kernel is None else sdpa_kernel(kernel):
        return F.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2)


def _call(attend: Attend, name: str, inputs: Inputs, pass_: Pass) -> Callable[[], object]:
    """One call to be timed. It keeps nothing, so that calls in one graph share their memory."""
    if pass_ == "forward":

        def forward() -> None:
            with torch.no_grad():
                attend(inputs)

        return forward
    leaves = (inputs.qkv,) if name in SOFTMAX_KERNELS else inputs.leaves

    def forward_backward() -> None:
        torch.autograd.grad(attend(inputs), leaves, inputs.grad)

    return forward_backward


def _input_sets(case: AttentionCase, device: torch.device, dtype: torch.dtype) -> list[Inputs]:
    count = 1
    if device.type == "cuda":
        cache = torch.cuda.get_device_properties(device).L2_cache_size
        count = max(1, math.ceil(CACHE_TURNOVERS * cache / (3 * case.elements * dtype.itemsize)))
    return [Inputs.random(case, device, dtype, seed) for seed in range(min(count, MOST_INPUT_SETS))]


def _padding_mask(case: AttentionCase, device: torch.device) -> torch.Tensor:
    """`[B, N]`: images of full width, each a row lower than the one before, from full height down to half."""
    height, width = case.grid_size
    index = torch.arange(case.batch, device=device)
    rows = height - index % (height // 2 + 1)
    return torch.arange(height, device=device).lt(rows[:, None]).repeat_interleave(width, dim=1)


def _evaluate(attend: Attend, inputs: Inputs, pass_: Pass) -> list[torch.Tensor]:
    """Output, and gradients where the pass has them."""
    if pass_ == "forward":
        with torch.no_grad():
            return [attend(inputs)]
    out = attend(inputs)
    return [out.detach(), *torch.autograd.grad(out, inputs.leaves, inputs.grad)]


def _exact_results(inputs: Inputs, pass_: Pass) -> dict[int, list[torch.Tensor]]:
    """Results in float64 of the first, the middle and the last sample."""
    batch = inputs.qkv.shape[0]
    indices = sorted({0, batch // 2, batch - 1})[:CHECKED_SAMPLES]
    attend = functools.partial(_inline, backend="eager")
    return {index: _evaluate(attend, inputs.sample(index), pass_) for index in indices}


def _check(attend: Attend, inputs: Inputs, exact: dict[int, list[torch.Tensor]], pass_: Pass) -> float:
    """Largest relative error of the samples known exactly; the whole batch runs, and all of it must be finite.

    Raises:
        WrongResultError: It is too large, or something is NaN or infinite.
    """
    _poison(inputs)
    results = _evaluate(attend, inputs, pass_)
    names = ("output", "gradient of qkv", "gradient of local_weight")[: len(results)]
    limit = _largest_error(inputs.qkv.dtype)
    worst = 0.0
    for position, (name, actual) in enumerate(zip(names, results, strict=True)):
        if not actual.isfinite().all():
            raise WrongResultError(f"the {name} is not finite")
        for index, sample in exact.items():
            error = relative_error(actual[index : index + 1], sample[position])
            if not error <= limit:
                raise WrongResultError(f"relative error {error:.1e} of the {name} exceeds {limit:.0e}")
            worst = max(worst, error)
    return worst


def _largest_error(dtype: torch.dtype) -> float:
    if dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32":
        return LARGEST_TF32_ERROR
    return LARGEST_ERROR[dtype]


def _poison(inputs: Inputs) -> None:
    """Leave NaN in the memory that the next outputs are likely to get: what a kernel forgets to write then shows."""
    for tensor in (inputs.grad, *inputs.leaves):
        torch.full_like(tensor, math.nan, requires_grad=False)


def _measure_host_overheads(settings: AttentionSettings) -> dict[str, dict[str, float | str]]:
    """By contestant and pass, on four tokens: nothing that a device could be late with."""
    case = AttentionCase(tokens=4, channels=32, head_dim=32, batch=1)
    inputs = Inputs.random(case, settings.device, settings.dtype, seed=0)
    names = ("sdpa", *_fused_backends(), "auto")
    overheads: dict[str, dict[str, float | str]] = {name: {} for name in names}
    for pass_ in settings.passes:
        calls: dict[str, Callable[[], object]] = {}
        for name in names:
            try:
                call = _call(_contestant(name), name, inputs, pass_)
                for _ in range(HOST_WARM_UP_CALLS):
                    call()
            except Exception as failure:  # as in `_measure_pass`
                overheads[name][pass_] = Measurement.failure(name, failure).note
            else:
                calls[name] = call
        for name, microseconds in measure_host_overheads(calls, settings.device).items():
            overheads[name][pass_] = microseconds
    return overheads


def _describe(result: CaseResult, pass_: str) -> str:
    case = result.case
    cells = [
        f"{item.contestant} {item.status if item.milliseconds is None else f'{item.milliseconds:.4g} ms'}"
        for item in result.measurements[pass_]
    ]
    sizes = f"N={case.tokens} C={case.channels} D={case.head_dim} B={case.batch}"
    return f"{sizes} {pass_}: {', '.join(cells)} (floor {result.floor:.3g} ms)"


def _case_as_json(result: CaseResult) -> dict[str, Any]:
    def row(pass_: str, item: Measurement) -> dict[str, Any]:
        is_inline = item.contestant not in SOFTMAX_KERNELS
        over_floor = ratio(item.milliseconds, result.floor) if pass_ == "forward" else None
        faster = ratio(result.best_softmax(pass_), item.milliseconds) if is_inline else None
        return {**asdict(item), "over_floor": over_floor, "times_faster_than_best_softmax": faster}

    passes = {pass_: [row(pass_, item) for item in items] for pass_, items in result.measurements.items()}
    return {**asdict(result.case), "grid_size": result.case.grid_size, "floor_ms": result.floor, "passes": passes}
