"""Time attention from packed qkv: every backend of InLine, with its 3×3 term, against PyTorch's softmax.

Outputs and gradients are checked against float64 before anything is timed. The floor is the time to read q, k and v
and write the output at the rate of a plain copy.

Shapes: `B` batch, `N` tokens, `H` heads, `D` head dim, `C` = H·D.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, TypeAlias, get_args

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from inline_attention.benchmark import results, timing
from inline_attention.benchmark.cost import squarest_grid
from inline_attention.benchmark.environment import describe_environment
from inline_attention.benchmark.results import Measurement, check_close, check_finite, dtype_name, ratio
from inline_attention.benchmark.timing import Work, measure_copy_rate, release_memory
from inline_attention.ops import dispatch, inline_attention_qkvpacked
from inline_attention.ops.call import Normalization
from inline_attention.support.untrusted import build_dataclass, build_value

Pass = Literal["forward", "forward+backward"]
PASSES: tuple[Pass, ...] = get_args(Pass)
Compiled = Literal["none", "first", "all"]
Attend: TypeAlias = Callable[["Inputs"], torch.Tensor]

SOFTMAX_KERNELS: dict[str, SDPBackend | None] = {
    "sdpa": None,  # PyTorch's choice
    "sdpa-flash": SDPBackend.FLASH_ATTENTION,
    "sdpa-cudnn": SDPBackend.CUDNN_ATTENTION,
    "sdpa-efficient": SDPBackend.EFFICIENT_ATTENTION,
}
COMPILED = "eager-compiled"
# Values of N, C and D, and B·N·C.
GPU_SIZES = (196, 784, 3136, 16384, 65536), (192, 768), (32, 64), 25_000_000
CPU_SIZES = (196, 784, 3136), (192,), (32,), 600_000
QUICK_SIZES = (196, 784), (192,), (32,)
LARGEST_ERROR = {torch.float32: 1e-4, torch.bfloat16: 1e-2, torch.float16: 1e-2}  # relative, against float64
LARGEST_TF32_ERROR = 2e-3
CACHE_TURNOVERS = 4  # inputs rotate until they have filled the GPU's cache this often, so that none is still there
MOST_INPUT_SETS = 64  # reached only by problems so small that a model, too, would find them in the cache
LEAST_ROUNDS = 9
HOST_WARM_UP_CALLS, HOST_ROUNDS = 10, 15


@dataclass(frozen=True)
class AttentionCase:
    """One size, and the options of InLine."""

    tokens: int
    channels: int
    head_dim: int
    batch: int
    compiled: bool = False  # time plain PyTorch under `torch.compile` too, which takes seconds to compile
    grid: tuple[int, int] | None = None  # `(h, w)` with h·w = N; None for the squarest
    local: bool = True  # add the 3×3 term
    padded: bool = False  # images of unequal height, with a key padding mask
    feature_map: str = "identity"
    normalization: Normalization = "subtract"

    def __str__(self) -> str:
        return f"N={self.tokens} C={self.channels} D={self.head_dim} B={self.batch}"

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
        return self.grid or squarest_grid(self.tokens)

    def floor(self, dtype: torch.dtype, copy_rate: float) -> float:
        """Return the milliseconds to read q, k and v and write the output, at a rate in bytes per second."""
        return 1e3 * 4 * self.elements * dtype.itemsize / copy_rate


# One 1024² image in 16² patches.
LATENCY_CASE = AttentionCase(tokens=4096, channels=192, head_dim=32, batch=1)


@dataclass(frozen=True)
class AttentionSettings:
    """What to measure; `contestants` are all by default, `seconds` are spent on each pass of each case."""

    device: torch.device
    dtype: torch.dtype
    cases: tuple[AttentionCase, ...]
    passes: tuple[Pass, ...] = PASSES
    latency_case: AttentionCase | None = LATENCY_CASE
    contestants: tuple[str, ...] | None = None
    seconds: float = 1.0

    def __post_init__(self) -> None:
        if self.dtype not in LARGEST_ERROR:
            raise ValueError(f"dtype must be one of {', '.join(map(dtype_name, LARGEST_ERROR))}, got {self.dtype}")
        for case in self.cases:
            if case.channels % case.head_dim != 0:
                raise ValueError(
                    f"channels must be divisible by the head dim, got {case.channels} and {case.head_dim}; "
                    f"try a head dim of {math.gcd(case.channels, case.head_dim)}"
                )


@dataclass(frozen=True)
class CaseResult:
    """Measurements of one case by pass, and the floor of its forward pass in milliseconds."""

    case: AttentionCase
    floor: float
    measurements: dict[str, list[Measurement]] = field(default_factory=dict)

    def milliseconds(self, pass_: str, contestant: str) -> float | None:
        """Return the median of a contestant, or None if it was not timed."""
        found = [item for item in self.measurements.get(pass_, ()) if item.contestant == contestant]
        return found[0].milliseconds if found else None

    def best_softmax(self, pass_: str) -> float | None:
        """Return the milliseconds of the fastest softmax."""
        times = (self.milliseconds(pass_, name) for name in SOFTMAX_KERNELS)
        return min((time for time in times if time is not None), default=None)

    def as_json(self) -> dict[str, Any]:
        """Return plain data, with the ratios that the tables show."""

        def row(pass_: str, item: Measurement) -> dict[str, Any]:
            is_inline = item.contestant not in SOFTMAX_KERNELS
            over_floor = ratio(item.milliseconds, self.floor) if pass_ == "forward" else None
            faster = ratio(self.best_softmax(pass_), item.milliseconds) if is_inline else None
            return {**asdict(item), "over_floor": over_floor, "times_faster_than_best_softmax": faster}

        passes = {pass_: [row(pass_, item) for item in items] for pass_, items in self.measurements.items()}
        return {**asdict(self.case), "grid_size": self.case.grid_size, "floor_ms": self.floor, "passes": passes}


@dataclass
class AttentionReport:
    """The results so far."""

    environment: dict[str, str]
    settings: AttentionSettings
    copy_rate: float  # bytes per second, read and written, of a large copy; floors are computed from it
    results: list[CaseResult] = field(default_factory=list)
    latency: CaseResult | None = None
    # Host microseconds on a tiny problem, by contestant and pass; a string says why there are none.
    host_overhead: dict[str, dict[str, float | str]] = field(default_factory=dict)

    @property
    def contestants(self) -> list[str]:
        """Measured contestants, in a fixed order."""
        results = [*self.results, *([self.latency] if self.latency else [])]
        measured = {item.contestant for result in results for items in result.measurements.values() for item in items}
        return [name for name in contestants_of(self.settings.device) if name in measured]

    def as_json(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            "environment": self.environment,
            "device": str(self.settings.device),
            "dtype": dtype_name(self.settings.dtype),
            "copy_bytes_per_second": self.copy_rate,
            "cases": [result.as_json() for result in self.results],
            "latency": None if self.latency is None else self.latency.as_json(),
            "host_overhead_microseconds": self.host_overhead,
        }

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> AttentionReport:
        """Return the report that `as_json` has written, without latency and host overhead."""
        results = []
        for case in content["cases"]:
            passes = build_value(dict[str, list[Measurement]], case["passes"])
            results.append(CaseResult(build_dataclass(AttentionCase, case), case["floor_ms"], passes))
        cases = tuple(result.case for result in results)
        settings = AttentionSettings(torch.device(content["device"]), getattr(torch, content["dtype"]), cases)
        return cls(content["environment"], settings, content["copy_bytes_per_second"], results)


@dataclass(frozen=True)
class Inputs:
    """One set of arguments: leaves qkv `[B, N, 3, H, D]` and local_weight `[B, H, D, 3, 3]`, output gradient, mask."""

    case: AttentionCase
    qkv: torch.Tensor
    local_weight: torch.Tensor | None
    grad: torch.Tensor
    mask: torch.Tensor | None

    @classmethod
    def random(cls, case: AttentionCase, device: torch.device, dtype: torch.dtype, seed: int) -> Inputs:
        """Return normally distributed arguments."""
        generator = torch.Generator(device).manual_seed(seed)
        draw = functools.partial(torch.randn, generator=generator, device=device, dtype=dtype)
        qkv = draw(case.batch, case.tokens, 3, case.heads, case.head_dim).requires_grad_()
        local_weight = draw(case.batch, case.heads, case.head_dim, 3, 3).requires_grad_() if case.local else None
        grad = draw(case.batch, case.tokens, case.heads, case.head_dim)
        return cls(case, qkv, local_weight, grad, _padding_mask(case, device) if case.padded else None)

    def sample(self, index: int) -> Inputs:
        """Return one sample in float64."""
        one = slice(index, index + 1)
        qkv, *local_weight = (leaf[one].detach().double().requires_grad_() for leaf in self.leaves)
        mask = None if self.mask is None else self.mask[one]
        return Inputs(self.case, qkv, local_weight[0] if local_weight else None, self.grad[one].double(), mask)

    @property
    def leaves(self) -> tuple[torch.Tensor, ...]:
        """Tensors that get gradients."""
        return (self.qkv,) if self.local_weight is None else (self.qkv, self.local_weight)


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
    """Return every combination of sizes, with a batch that makes B·N·C about `elements`.

    A GPU gets the sizes of the published tables by default, a CPU smaller ones.
    """
    on_gpu = device.type == "cuda"
    *sizes, default_elements = GPU_SIZES if on_gpu else CPU_SIZES
    if quick:
        sizes, default_elements = QUICK_SIZES, default_elements // 8
    elements = elements or default_elements
    compiled = compiled or ("first" if on_gpu and not quick else "none")
    pairs = [(width, dim) for width in channels or sizes[1] for dim in head_dims or sizes[2]]
    return tuple(
        AttentionCase(
            count, width, dim,
            batch=max(1, round(elements / (count * width))),
            compiled=compiled == "all" or (compiled == "first" and (width, dim) == pairs[0]),
        )
        for width, dim in pairs
        for count in tokens or sizes[0]
    )  # fmt: skip


def contestants_of(device: torch.device) -> list[str]:
    """Return all contestants: softmax, plain InLine, the fused backends of the dispatch table, "auto"."""
    softmax = ["sdpa-flash", "sdpa-cudnn"] if device.type == "cuda" else ["sdpa"]
    return [*softmax, "eager", COMPILED, *_fused_backends(), "auto"]


def measure_attention(
    settings: AttentionSettings, on_step: Callable[[AttentionReport, str], None] = lambda *_: None
) -> AttentionReport:
    """Measure every case and, on a GPU, the latency of one image and the host's overhead.

    `on_step` is called after each of `count_steps` steps with the report so far and a line about the step.
    """
    report = AttentionReport(describe_environment(), settings, measure_copy_rate(settings.device))
    on_step(report, f"copy rate {report.copy_rate / 1e12:.3g} TB/s")
    if settings.device.type == "cuda":
        report.host_overhead = _measure_host_overheads(settings)
        on_step(report, "host overhead")
    if (case := settings.latency_case) is not None:
        report.latency = CaseResult(case, case.floor(settings.dtype, report.copy_rate))
        on_step(report, f"single image: {measure_pass(report.latency, 'forward', settings)}")
    for case in settings.cases:
        report.results.append(CaseResult(case, case.floor(settings.dtype, report.copy_rate)))
        for pass_ in settings.passes:
            on_step(report, measure_pass(report.results[-1], pass_, settings))
    return report


def count_steps(settings: AttentionSettings) -> int:
    """Return the number of steps of `measure_attention`."""
    on_gpu = settings.device.type == "cuda"
    return 1 + on_gpu + (settings.latency_case is not None) + len(settings.cases) * len(settings.passes)


def compile_kernels(case: AttentionCase, settings: AttentionSettings) -> None:
    """Run two samples of a case once, so that later processes find the kernels on disk."""
    inputs = Inputs.random(replace(case, batch=min(2, case.batch)), settings.device, settings.dtype, seed=0)
    for pass_ in settings.passes:
        _evaluate(_contestant("auto"), inputs, pass_)


def measure_pass(result: CaseResult, pass_: Pass, settings: AttentionSettings) -> str:
    """Add the measurements of a pass to a result, whose case need not be in the settings; return a line about them."""
    result.measurements[pass_] = _measure_contestants(result.case, pass_, settings)
    release_memory(settings.device)
    return f"{result.case} {pass_}: {results.describe(result.measurements[pass_])} (floor {result.floor:.3g} ms)"


def _measure_contestants(case: AttentionCase, pass_: Pass, settings: AttentionSettings) -> list[Measurement]:
    device = settings.device
    names = settings.contestants or [name for name in contestants_of(device) if name != COMPILED or case.compiled]
    torch._dynamo.reset()  # compiled code keeps few shapes; beyond that it would silently run uncompiled
    try:
        sets = _input_sets(case, device, settings.dtype)
    except RuntimeError as error:
        return [Measurement.failure(name, error) for name in names]
    exact = functools.cache(lambda: _exact_results(sets[0], pass_))
    pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None

    def prepare(name: str) -> tuple[Work, float | None, None]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # SDPA warns about kernels that cannot run, then raises an error
            attend = _contestant(name)
            error = None if name in SOFTMAX_KERNELS else _check(attend, sets[0], exact(), pass_)
            calls = [functools.partial(_evaluate, attend, inputs, pass_) for inputs in sets]
            return timing.prepare_work(calls, device, pool), error, None

    return results.measure_contestants(names, prepare, device, seconds=settings.seconds, at_least=LEAST_ROUNDS)


def _fused_backends() -> list[str]:
    return [backend.name for backend in dispatch.AUTO_BACKENDS if backend.name != "eager"]


def _contestant(name: str) -> Attend:
    if name in SOFTMAX_KERNELS:
        return functools.partial(_softmax, kernel=SOFTMAX_KERNELS[name])
    if name == COMPILED:
        compiled = torch.compile(inline_attention_qkvpacked, dynamic=False)
        return functools.partial(_inline, backend="eager", attention=compiled)
    return functools.partial(_inline, backend=name)


def _inline(inputs: Inputs, *, backend: str, attention: Callable[..., Any] = inline_attention_qkvpacked) -> Any:
    case = inputs.case
    return attention(
        inputs.qkv,
        feature_map=case.feature_map,
        normalization=case.normalization,
        key_padding_mask=inputs.mask,
        local_weight=inputs.local_weight,
        grid_size=case.grid_size if case.local else None,
        backend=backend,
    )


def _softmax(inputs: Inputs, *, kernel: SDPBackend | None) -> torch.Tensor:
    q, k, v = inputs.qkv.permute(2, 0, 3, 1, 4)
    mask = None if inputs.mask is None else inputs.mask[:, None, None, :]
    with nullcontext() if kernel is None else sdpa_kernel(kernel):
        return F.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2)


def _evaluate(attend: Attend, inputs: Inputs, pass_: Pass) -> list[torch.Tensor]:
    """Return the output, and the gradients if the pass has them; softmax has none of local_weight."""
    if pass_ == "forward":
        with torch.no_grad():
            return [attend(inputs)]
    out = attend(inputs)
    return [out, *torch.autograd.grad(out, inputs.leaves, inputs.grad, allow_unused=True)]


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


def _exact_results(inputs: Inputs, pass_: Pass) -> dict[int, list[torch.Tensor]]:
    """Return float64 results of the first, the middle and the last sample."""
    batch = inputs.qkv.shape[0]
    attend = _contestant("eager")
    return {index: _evaluate(attend, inputs.sample(index), pass_) for index in sorted({0, batch // 2, batch - 1})}


def _check(attend: Attend, inputs: Inputs, exact: dict[int, list[torch.Tensor]], pass_: Pass) -> float:
    """Return the largest relative error of the samples known exactly. The whole batch must be finite."""
    for tensor in (inputs.grad, *inputs.leaves):
        # NaN in the memory that outputs are likely to get shows what a kernel forgets to write.
        torch.full_like(tensor, math.nan, requires_grad=False)
    results = _evaluate(attend, inputs, pass_)
    limit = LARGEST_ERROR[inputs.qkv.dtype]
    if inputs.qkv.dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32":
        limit = LARGEST_TF32_ERROR
    worst = 0.0
    for position, actual in enumerate(results):
        name = ("output", "gradient of qkv", "gradient of local_weight")[position]
        check_finite(name, actual)
        for index, sample in exact.items():
            worst = max(worst, check_close(name, actual[index : index + 1], sample[position], limit))
    return worst


def _measure_host_overheads(settings: AttentionSettings) -> dict[str, dict[str, float | str]]:
    """Return host microseconds by contestant and pass, on four tokens, so that the device is never late."""
    device, names = settings.device, ("sdpa", *_fused_backends(), "auto")
    inputs = Inputs.random(AttentionCase(tokens=4, channels=32, head_dim=32, batch=1), device, settings.dtype, seed=0)
    overheads: dict[str, dict[str, float | str]] = {name: {} for name in names}
    for pass_ in settings.passes:

        def prepare(name: str, pass_: Pass = pass_) -> tuple[Work, None, None]:
            call = functools.partial(_evaluate, _contestant(name), inputs, pass_)
            for _ in range(HOST_WARM_UP_CALLS):
                call()
            return timing.host_work(call, device), None, None

        for item in results.measure_contestants(names, prepare, device, seconds=0, at_least=HOST_ROUNDS):
            overheads[item.contestant][pass_] = item.note if item.timing is None else 1e3 * item.timing.milliseconds
    return overheads
