"""CUDA C++ without a compiler on the user's machine: NVRTC, which comes with PyTorch, builds the kernels at first use.

`binary_cache` keeps the binaries, under a key that covers the source, the options and NVRTC's version. The names of the
kernels, their threads and the fields of their parameter structs are read from kernels.cu: they are written down once.
"""

from __future__ import annotations

import ctypes
import hashlib
import re
import struct
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch

from inline_attention.ops.backends.cuda import binary_cache

SOURCE = Path(__file__).with_name("kernels.cu")
# How Python packs the fields of a parameter struct. Pointers are "Q", and structs with pointers end at a multiple of
# eight bytes.
_FORMATS = {"int": "i", "u32": "I", "i64": "q", "float": "f"}
_ALIGNED_END = "0q"
# Members of the driver's CUfunction_attribute.
_SHARED_SIZE_BYTES = 1
_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8
_INVALID_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT


class CompilerUnavailableError(RuntimeError):
    """NVRTC or the driver cannot be loaded, or refuses the source; the message says which and why."""


class Signature(NamedTuple):
    """A `__global__` function of kernels.cu."""

    threads: str  # the constant that says how many a block has
    struct: str  # its only parameter


@cache
def signatures() -> dict[str, Signature]:
    """Return the kernels of kernels.cu by name."""
    found = re.findall(r"__launch_bounds__\((\w+).*?\) (\w+)\(const __grid_constant__ (\w+) p\)", _source())
    return {name: Signature(threads, parameter) for threads, name, parameter in found}


@cache
def struct_of(name: str) -> struct.Struct:
    """Return how Python packs a struct of kernels.cu: as `nvcc` lays it out, nested structs included."""
    return struct.Struct("".join(form for _, form in fields_of(name)) + _ALIGNED_END)


def fields_of(name: str) -> list[tuple[str, str]]:
    """Return names and formats of a struct's fields, in order; those of a nested struct as "outer.inner"."""
    definition = re.search(rf"^struct {name} {{(.*?)}};", _source(), re.MULTILINE | re.DOTALL)
    if definition is None:
        raise LookupError(f"kernels.cu defines no struct {name}")
    fields: list[tuple[str, str]] = []
    for kind, names in re.findall(r"(\w+\*?) (\w[^;*]*);", re.sub(r"//.*", "", definition[1])):
        if kind in _FORMATS or kind.endswith("*"):
            fields += [(field, _FORMATS.get(kind, "Q")) for field in names.split(", ")]
            continue
        nested = fields_of(kind)
        fields += [(f"{names}.{field}", form) for field, form in nested]
        if any(form == "Q" for _, form in nested):
            fields[-1] = (fields[-1][0], fields[-1][1] + _ALIGNED_END)
    return fields


@cache
def _source() -> str:
    return SOURCE.read_text(encoding="utf-8")


class Kernel:
    """A compiled `__global__` function whose only parameter is a struct."""

    def __init__(self, function: ctypes.c_void_p, threads: int, parameter: struct.Struct, device_index: int) -> None:
        self._function = function
        self._threads = threads
        self._parameter = parameter
        self._device_index = device_index
        self._launch = _driver().cuLaunchKernel

    def launch(self, grid: tuple[int, int], shared_bytes: int, stream: int, *fields: float) -> None:
        """Launch on `stream`, with the fields of the kernel's struct in their order."""
        parameter = ctypes.c_char_p(self._parameter.pack(*fields))
        pointers = ctypes.byref(parameter)  # an array of one pointer, to the one parameter
        arguments = (
            self._function, grid[0], grid[1], 1, self._threads, 1, 1, shared_bytes, stream, pointers, None
        )  # fmt: skip
        result = self._launch(*arguments)
        if result == _INVALID_CONTEXT:
            # A thread that has not touched the GPU yet, as autograd's has not in its first backward pass.
            _enter_primary_context(self._device_index)
            result = self._launch(*arguments)
        if result != 0:
            raise RuntimeError(f"a CUDA kernel of inline_attention could not be launched: driver error {result}")


def load(device_index: int, defines: Mapping[str, int]) -> dict[str, Kernel]:
    """Compile the kernels for a device, load them and return them by name."""
    properties = cast(Any, torch.cuda.get_device_properties(device_index))  # pyright: ignore[reportUnknownMemberType]
    binary = compile_binary(f"sm_{properties.major}{properties.minor}", defines)
    shared_bytes: int = properties.shared_memory_per_block_optin
    driver = _driver()
    module = ctypes.c_void_p()
    loaded: dict[str, Kernel] = {}
    with torch.cuda.device(device_index):
        _enter_primary_context(device_index)
        _check(driver.cuModuleLoadData(ctypes.byref(module), binary), "load the compiled kernels")
        for name, signature in signatures().items():
            function = ctypes.c_void_p()
            _check(driver.cuModuleGetFunction(ctypes.byref(function), module, name.encode()), f"find kernel {name}")
            static_bytes = ctypes.c_int()
            driver.cuFuncGetAttribute(ctypes.byref(static_bytes), _SHARED_SIZE_BYTES, function)
            _check(
                driver.cuFuncSetAttribute(function, _MAX_DYNAMIC_SHARED_SIZE_BYTES, shared_bytes - static_bytes.value),
                f"reserve shared memory for {name}",
            )
            loaded[name] = Kernel(function, defines[signature.threads], struct_of(signature.struct), device_index)
    return loaded


def _enter_primary_context(device_index: int) -> None:
    """Make the context that PyTorch uses on a device current in this thread."""
    driver, device, context = _driver(), ctypes.c_int(), ctypes.c_void_p()
    _check(driver.cuDeviceGet(ctypes.byref(device), device_index), "find the device")
    _check(driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device), "reach the device's context")
    _check(driver.cuCtxSetCurrent(context), "enter the device's context")


def compile_binary(architecture: str, defines: Mapping[str, int]) -> bytes:
    """The kernels as a binary for `architecture` ("sm_90"), from the cache or fresh. Needs no GPU."""
    nvrtc = _nvrtc()
    major, minor = ctypes.c_int(), ctypes.c_int()
    nvrtc.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    options = [f"--gpu-architecture={architecture}", "--std=c++17"]
    options += [f"-D{name}={value}" for name, value in sorted(defines.items())]
    source = _source().encode()
    key = hashlib.sha256(b"\0".join([source, *map(str.encode, options), f"{major.value}.{minor.value}".encode()]))
    binary = binary_cache.read(key.hexdigest())
    if binary is None:
        binary = _compile(nvrtc, source, options)
        binary_cache.write(key.hexdigest(), binary)
    return binary


def _compile(nvrtc: Any, source: bytes, options: list[str]) -> bytes:
    program = ctypes.c_void_p()
    _check_nvrtc(nvrtc, nvrtc.nvrtcCreateProgram(ctypes.byref(program), source, b"kernels.cu", 0, None, None))
    try:
        arguments = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        if nvrtc.nvrtcCompileProgram(program, len(options), arguments) != 0:
            size = ctypes.c_size_t()
            nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
            log = ctypes.create_string_buffer(size.value)
            nvrtc.nvrtcGetProgramLog(program, log)
            raise CompilerUnavailableError(
                f"NVRTC refused kernels.cu with {' '.join(options)}: {log.value.decode(errors='replace').strip()}"
            )
        size = ctypes.c_size_t()
        _check_nvrtc(nvrtc, nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size)))
        binary = ctypes.create_string_buffer(size.value)
        _check_nvrtc(nvrtc, nvrtc.nvrtcGetCUBIN(program, binary))
        return binary.raw
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


@cache
def _driver() -> Any:
    try:
        driver = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    except OSError as error:
        raise CompilerUnavailableError(f"the CUDA driver cannot be loaded: {error}") from error
    driver.cuLaunchKernel.argtypes = [ctypes.c_void_p, *[ctypes.c_uint] * 7, *[ctypes.c_void_p] * 3]
    driver.cuModuleLoadData.argtypes = [ctypes.c_void_p, ctypes.c_char_p]
    driver.cuModuleGetFunction.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p]
    driver.cuCtxSetCurrent.argtypes = [ctypes.c_void_p]
    driver.cuFuncGetAttribute.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p]
    driver.cuFuncSetAttribute.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_int]
    return driver


@cache
def _nvrtc() -> Any:
    """NVRTC as PyTorch's own packages install it, or as the system has it."""
    version = torch.version.cuda
    if version is None:
        raise CompilerUnavailableError("this PyTorch is built without CUDA")
    major = version.split(".")[0]
    name = f"nvrtc64_{major}0_0.dll" if sys.platform == "win32" else f"libnvrtc.so.{major}"
    site_packages = Path(torch.__file__).parent.parent
    candidates = [name, *map(str, sorted(site_packages.glob(f"nvidia/*/lib/{name}")))]
    candidates += map(str, sorted(site_packages.glob(f"nvidia/*/bin/**/{name}")))
    for candidate in candidates:
        try:
            return ctypes.CDLL(candidate)
        except OSError:
            continue
    raise CompilerUnavailableError(
        f"{name}, CUDA's run-time compiler, was found neither with PyTorch nor on the system"
    )


def _check(result: int, attempt: str) -> None:
    if result != 0:
        raise CompilerUnavailableError(f"the CUDA driver could not {attempt}: error {result}")


def _check_nvrtc(nvrtc: Any, result: int) -> None:
    if result != 0:
        nvrtc.nvrtcGetErrorString.restype = ctypes.c_char_p
        raise CompilerUnavailableError(f"NVRTC failed: {nvrtc.nvrtcGetErrorString(result).decode()}")
