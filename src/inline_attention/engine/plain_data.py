"""Plain data: containers, scalars and tensors that can be read back without running code."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

SCALARS = (type(None), bool, int, float, str, bytes)
MAPPINGS = (dict, OrderedDict, Counter)  # Counter: torch's MultiStepLR keeps its milestones in one
SEQUENCES = (list, tuple, set)
DEEPEST = 100


def plain_copy(value: Any, name: str, depth: int = 0) -> Any:
    """Copy containers and scalars, with tensors detached and on the CPU. CPU tensors share their memory.

    Types must match exactly: a NumPy number that is a `float` could not be read back.

    Args:
        value: Scalars, strings, dense tensors, and dicts, lists, tuples and sets of them.
        name: Name in error messages, such as `state`; they continue it, as in `state['optimizer']['lr']`.
        depth: Number of containers around the value.

    Raises:
        TypeError: If it contains anything else. The message says where.
    """
    kind = type(value)
    if depth > DEEPEST:
        raise TypeError(f"{name[:200]}… is nested more than {DEEPEST} deep; does it contain itself?")
    if kind in SCALARS:
        return value
    if kind in (Tensor, nn.Parameter) and value.layout is torch.strided and not value.is_meta:
        return value.detach().cpu()
    if kind in MAPPINGS:
        keys = [plain_copy(key, f"the key {key!r} of {name}", depth + 1) for key in value]
        items = [plain_copy(item, f"{name}[{key!r}]", depth + 1) for key, item in value.items()]
        return kind(dict(zip(keys, items, strict=True)))
    if kind in SEQUENCES:
        return kind([plain_copy(item, f"{name}[{index}]", depth + 1) for index, item in enumerate(value)])
    described = f"a {kind.__module__}.{kind.__qualname__}".replace("a builtins.", "a ")
    if isinstance(value, Tensor):
        described += f" ({value.layout}, {value.device})"
    raise TypeError(
        f"{name} is {described}, expected None, a number, a string, a dense torch.Tensor, or a dict, list, tuple or "
        "set of these; convert it, as with .item(), .tolist(), torch.from_numpy() or .full_tensor(), or leave it out"
    )


def tensor_bytes(value: Any) -> int:
    """Return the bytes of all tensors in plain data. Shared memory counts once."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors_in(value)}
    return sum(storages.values())


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield all tensors in plain data."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (*MAPPINGS, *SEQUENCES)):
        for item in value.values() if isinstance(value, MAPPINGS) else value:
            yield from tensors_in(item)
