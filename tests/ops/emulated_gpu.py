"""The CUDA backend on a CPU: kernels.cu compiled by the system's C++ compiler, with emulated_gpu.h in place of a GPU.

`install` makes `backend="cuda"` accept half tensors on the CPU. Everything else is the real thing: the plans, the
packed structs, the kernels' own code. Only small calls end in bearable time.
"""

from __future__ import annotations

import ctypes
import re
import shutil
import struct
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from inline_attention.ops.backends import cuda
from inline_attention.ops.backends.cuda import compiler, launch

COMPILER = shutil.which("g++") or shutil.which("clang++")
PROCESSORS = 4  # few, so that small calls are split over several blocks as large ones are on a GPU
_SHIM = Path(__file__).with_name("emulated_gpu.h")


def install(monkeypatch) -> None:
    """Let the CUDA backend run on the CPU until the test ends."""
    for plan in (launch.plan_forward, launch.plan_backward):
        plan.cache_clear()
    monkeypatch.setattr(launch, "load_kernels", lambda _, *options: _kernels(tuple(launch.defines(*options).items())))
    monkeypatch.setattr(launch, "processors", lambda _: PROCESSORS)
    monkeypatch.setattr(launch, "current_stream", lambda _: 0)
    monkeypatch.setattr(cuda, "device_reason", lambda _: None)
    monkeypatch.setattr(cuda, "build_reason", lambda *_: None)


class _EmulatedKernel:
    """Has `launch` as `compiler.Kernel`."""

    def __init__(self, library: ctypes.CDLL, name: str, threads: int, parameter: struct.Struct) -> None:
        self._library, self._name, self._threads, self._parameter = library, name.encode(), threads, parameter

    def launch(self, grid: tuple[int, int], shared_bytes: int, stream: int, *fields: float) -> None:
        del stream
        parameter = self._parameter.pack(*fields)
        if self._library.run(self._name, *grid, self._threads, shared_bytes, parameter) != 0:
            raise LookupError(f"kernels.cu has no kernel {self._name.decode()}")


@cache
def _kernels(defines: tuple[tuple[str, int], ...]) -> dict[str, _EmulatedKernel]:
    library = ctypes.CDLL(str(_build(dict(defines))))
    return {
        name: _EmulatedKernel(library, name, dict(defines)[signature.threads], compiler.struct_of(signature.struct))
        for name, signature in compiler.signatures().items()
    }


def _build(defines: dict[str, int]) -> Path:
    source = compiler.SOURCE.read_text()
    source = source.replace(
        "extern __shared__ __align__(128) unsigned char memory[];",
        "unsigned char* const memory = emulated::dynamic_memory;",
    )
    kernels = re.findall(r"(\w+)\(const __grid_constant__ (\w+) p\)", source)
    cases = "\n".join(
        f'  if (!std::strcmp(name, "{name}")) {{ const {struct}& p = *(const {struct}*)parameters; '
        f"emulated::launch([&] {{ {name}(p); }}, grid_x, grid_y, threads, shared_bytes); return 0; }}"
        for name, struct in kernels
    )
    entry = f"""
extern "C" int run(const char* name, int grid_x, int grid_y, int threads, int shared_bytes, const void* parameters) {{
{cases}
  return 1;
}}
"""
    folder = Path(tempfile.mkdtemp())
    file, library = folder / "kernels.cpp", folder / "kernels.so"
    file.write_text("#define EMULATED\n" + _SHIM.read_text() + source + entry)
    options = [f"-D{name}={value}" for name, value in defines.items()]
    command = [
        COMPILER,
        "-O1",
        "-std=c++17",
        "-w",
        "-shared",
        "-fPIC",
        "-ffp-contract=off",
        "-fno-gnu-unique",
        "-fvisibility-inlines-hidden",
        *options,
        file,
        "-o",
        library,
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-5000:]
    return library
