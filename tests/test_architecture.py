"""The house rules that a machine can check: which package may import which, and what needs what."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import inline_attention

SOURCE = Path(inline_attention.__file__).parent
# Upper packages may import lower ones, never the other way; packages of one rank ignore each other.
RANKS = {
    "cli": 9,
    "report": 8,
    "ablation": 7,
    "analysis": 6,
    "recipes": 6,
    "engine": 5,
    "benchmark": 5,
    "tasks": 4,
    "data": 3,
    "models": 2,
    "layers": 1,
    "ops": 0,
    "support": -1,
}
FILES = sorted(SOURCE.rglob("*.py"))


def imported_modules(file: Path) -> set[str]:
    """Absolute names of all modules a file imports, wherever in the file it does."""
    names = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative imports hide where a name comes from"
            names |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module or ""}
    return names


def package_of(module: str) -> str | None:
    parts = module.split(".")
    return parts[1] if parts[0] == "inline_attention" and len(parts) > 1 and parts[1] in RANKS else None


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(SOURCE)))
def test_imports_point_downwards(file):
    package = package_of(".".join(["inline_attention", *file.relative_to(SOURCE).parts]))
    if package is None:
        return  # the package root gathers the public names of all
    for module in imported_modules(file):
        other = package_of(module)
        if other is not None and other != package:
            assert RANKS[other] < RANKS[package], f"{package} must not import {module}"


def test_every_package_has_a_rank():
    packages = {path.parent.name for path in SOURCE.glob("*/*.py")}
    assert packages <= set(RANKS)


def test_backends_know_neither_each_other_nor_the_reference():
    backends = SOURCE / "ops" / "backends"
    for file in backends.rglob("*.py"):
        own = file.relative_to(backends).parts[0].removesuffix(".py")
        for module in imported_modules(file):
            assert not module.startswith("inline_attention.ops.reference"), file
            if module.startswith("inline_attention.ops.backends."):
                assert module.split(".")[3] == own, f"{file} imports {module}"


def test_the_reference_imports_no_fast_path():
    for module in imported_modules(SOURCE / "ops" / "reference.py"):
        assert not module.startswith("inline_attention.ops.backends")


def test_reference_and_eager_need_no_triton_and_no_extras():
    """In a fresh process in which importing triton, matplotlib, rich or typer fails."""
    program = """
import sys
for name in ("triton", "matplotlib", "rich", "typer"):
    sys.modules[name] = None
import torch
from inline_attention import InLineAttention, inline_attention
q, k, v = torch.randn(3, 1, 6, 2, 4)
for backend in ("auto", "eager", "reference"):
    assert inline_attention(q, k, v, backend=backend).shape == (1, 6, 2, 4)
InLineAttention(8, 2)(torch.randn(1, 9, 8))
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_public_names_exist_and_are_documented():
    for name in inline_attention.__all__:
        assert getattr(inline_attention, name).__doc__, name
