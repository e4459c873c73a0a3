"""Compile-only gate: every Triton kernel, as the launchers launch it, for GPUs this machine does not have.

The launchers run on CPU tensors with a recorder in the place of each kernel; what they would have launched is compiled
for the target. In a process of its own: where the interpreter is on, there is nothing to compile.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from functools import cache
from unittest import mock

import pytest

TARGETS = {
    "sm80": ("cuda", 80, 32),
    "sm90": ("cuda", 90, 32),
    "sm100": ("cuda", 100, 32),
    "gfx942": ("hip", "gfx942", 64),
}
# The least a GPU of compute capability 8.6, 8.9 or 12.0 offers to a block; gfx942 has 64 KiB.
LARGEST_SHARED = {"cuda": 99 * 1024, "hip": 64 * 1024}

MAIN = {"dtype": "bfloat16", "head_dim": 32, "value_dim": 32, "local": True}
CASES = {
    "main": MAIN,
    "float16": MAIN | {"dtype": "float16"},
    "float32": MAIN | {"dtype": "float32"},
    "head_dim_64": MAIN | {"head_dim": 64, "value_dim": 64},
    "head_dim_128": MAIN | {"head_dim": 128, "value_dim": 128},
    "float32_head_dim_128": MAIN | {"dtype": "float32", "head_dim": 128, "value_dim": 128},
    "odd": MAIN | {"head_dim": 33, "value_dim": 7, "local": False},
    "masked": MAIN | {"masked": True},
    "divide_exp": MAIN | {"feature_map": "exp", "normalization": "divide", "masked": True},
    "magnitude_relu": MAIN | {"feature_map": "relu", "normalization": "magnitude"},
    "chunked": MAIN | {"batch": 1, "grid": [64, 64]},
}
QUICK = [(target, "main") for target in TARGETS] + [("sm90", "chunked"), ("sm90", "divide_exp")]


@cache
def in_a_fresh_process(*arguments: str) -> list:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    result = subprocess.run(
        [sys.executable, __file__, *arguments], capture_output=True, text=True, check=False, env=environment
    )
    assert result.returncode == 0, result.stderr[-4000:]
    return json.loads(result.stdout.splitlines()[-1])


def check(target: str, case: str, kernels: list[dict]) -> None:
    assert len(kernels) >= 4
    for kernel in kernels:
        assert kernel["shared"] <= LARGEST_SHARED[TARGETS[target][0]], kernel
        if case == "main" and kernel["stack"] is not None:
            assert kernel["stack"] == 0, f"registers spill: {kernel}"


@pytest.mark.xdist_group("triton_compiles")  # one process compiles for all of these tests
@pytest.mark.parametrize(("target", "case"), QUICK)
def test_main_kernels_compile(target, case):
    compiled = in_a_fresh_process("compile", json.dumps(QUICK))
    check(target, case, compiled[QUICK.index((target, case))])


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("case", CASES)
def test_every_kernel_compiles(target, case):
    check(target, case, in_a_fresh_process("compile", json.dumps([(target, case)]))[0])


def test_another_size_needs_no_other_binary():
    """Images of any size: compiling takes seconds."""
    cases = [MAIN | {"masked": True, "grid": grid} for grid in ([40, 40], [37, 43], [1, 1601])]
    binaries = in_a_fresh_process("specialize", json.dumps(cases))
    assert len(binaries[0]) >= 6
    assert all(binary == binaries[0] for binary in binaries)


def recorded_launches(case: dict) -> list[tuple]:
    """(kernel, arguments, options) of a forward and a backward pass."""
    import torch

    from inline_attention.ops.backends.triton import backward, forward
    from inline_attention.ops.call import AttentionCall

    launches = []

    class Recorder:
        def __init__(self, kernel):
            self.kernel = kernel

        def __getitem__(self, grid):
            return lambda *arguments, **options: launches.append((self.kernel, arguments, options))

    patches = [
        mock.patch.object(module, name, Recorder(kernel))
        for module in (forward, backward)
        for name, kernel in vars(module).items()
        if name.endswith("_kernel")
    ]

    dtype = getattr(torch, case["dtype"])
    B, H, D, DV = case.get("batch", 64), 6, case["head_dim"], case["value_dim"]
    grid = case.get("grid", [14, 14])
    N = grid[0] * grid[1]
    if D == DV:
        q, k, v = torch.empty(B, N, 3, H, D, dtype=dtype).unbind(2)
        grads = torch.empty(B, N, 3, H, D, dtype=dtype).unbind(2)
    else:
        q, k, v = (torch.empty(B, N, H, dim, dtype=dtype) for dim in (D, D, DV))
        grads = [torch.empty_like(tensor) for tensor in (q, k, v)]
    mask = torch.ones(B, N, dtype=torch.bool) if case.get("masked") else None
    local_weight = torch.empty(B, H, DV, 3, 3, dtype=dtype) if case["local"] else None
    call = AttentionCall(
        q, k, v, None, D**-0.5, case.get("feature_map", "identity"), case.get("normalization", "subtract"),
        mask, local_weight, tuple(grid), 0,
    )  # fmt: skip
    with ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        out, state = forward.forward(call, keep_state=True)
        backward.backward(call, torch.empty_like(out), state, grads)
    return launches


def specialization(kernel, arguments: tuple) -> tuple[dict, dict, dict]:
    """Signature, constants and attributes that Triton compiles a launch for: one binary serves all that agree in them.

    Ones are constants, multiples of 16 are marked, and sizes are neither.
    """
    import torch

    names = {
        torch.bfloat16: "*bf16",
        torch.float16: "*fp16",
        torch.float32: "*fp32",
        torch.bool: "*i1",
        torch.int32: "*i32",
    }
    signature, constants, attributes = {}, {}, {}
    for index, (parameter, value) in enumerate(zip(kernel.params, arguments, strict=True)):
        is_special = isinstance(value, int) and not parameter.do_not_specialize
        if parameter.is_constexpr or value is None or (is_special and value == 1):
            signature[parameter.name] = "constexpr"
            constants[(index,)] = value
        elif isinstance(value, torch.Tensor):
            signature[parameter.name] = names[value.dtype]
            attributes[(index,)] = [["tt.divisibility", 16]]
        elif isinstance(value, float):
            signature[parameter.name] = "fp32"
        else:
            signature[parameter.name] = "i32"
            if is_special and value % 16 == 0:
                attributes[(index,)] = [["tt.divisibility", 16]]
    return signature, constants, attributes


def compile_launch(kernel, arguments: tuple, options: dict, target: str):
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    source = ASTSource(kernel, *specialization(kernel, arguments))
    return triton.compile(source, target=GPUTarget(*TARGETS[target]), options=options)


def resource_usage(cubin: bytes | None) -> dict[str, int]:
    """Registers and stack bytes (spills) of a thread, by the tool that comes with Triton."""
    from triton import knobs

    if cubin is None:
        return {}
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", report).groups()
    return {"registers": int(registers), "stack": int(stack)}


def compiled_kernels(target: str, case: str) -> list[dict]:
    """What each kernel of a case needs on a target."""
    figures = []
    for kernel, arguments, options in recorded_launches(CASES[case]):
        compiled = compile_launch(kernel, arguments, options, target)
        figures.append(
            {
                "kernel": kernel.__name__,
                "shared": compiled.metadata.shared,
                **dict.fromkeys(("registers", "stack")),
                **resource_usage(compiled.asm.get("cubin")),
            }
        )
    return figures


def specializations(case: dict) -> list[str]:
    return [repr((kernel.__name__, *specialization(kernel, given))) for kernel, given, _ in recorded_launches(case)]


def main(job: str, cases: str) -> None:
    if job == "specialize":
        results = [specializations(case) for case in json.loads(cases)]
    else:
        results = [compiled_kernels(*case) for case in json.loads(cases)]
    print(json.dumps(results))


if __name__ == "__main__":
    main(*sys.argv[1:])
