"""The parameter structs of kernels.cu, read from its source: their fields are written down once."""

from __future__ import annotations

import re
import struct
from functools import cache

from inline_attention.ops.backends.cuda.compiler import SOURCE

_FORMATS = {"int": "i", "u32": "I", "i64": "q", "float": "f"}
_ALIGNED_END = "0q"  # structs with pointers end at a multiple of eight bytes


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
    for declaration in re.sub(r"//[^\n]*", "", definition[1]).split(";"):
        words = declaration.split(None, 1)
        if not words:
            continue
        kind, names = declaration.removesuffix(words[-1]).strip(), words[-1]
        if "*" in declaration:
            kind, _, names = declaration.strip().rpartition("*")
            fields += [(field.strip(), "Q") for field in names.split(",")]
        elif kind in _FORMATS:
            fields += [(field.strip(), _FORMATS[kind]) for field in names.split(",")]
        else:
            inner = fields_of(kind)
            fields += [(f"{names.strip()}.{field}", form) for field, form in inner]
            if any(form in "Qq" for _, form in inner):
                fields[-1] = (fields[-1][0], fields[-1][1] + _ALIGNED_END)
    return fields


@cache
def _source() -> str:
    return SOURCE.read_text(encoding="utf-8")
