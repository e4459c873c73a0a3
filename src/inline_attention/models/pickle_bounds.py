"""Read the opcodes of a pickle before it is built: how deep and how large its structures would become.

A few bytes can describe a tuple nested a million deep, whose hash overflows the C stack, one that shares its parts so
often that hashing it takes years, or calls that fill the memory: `bytearray(10**11)`, or a thousand copies of a text.
"""

from __future__ import annotations

import pickletools
from dataclasses import dataclass
from typing import BinaryIO

MAX_DEPTH = 100
MAX_HASHED = 1_000_000  # parts of a key, or of the arguments of a constructor, shared ones counted each time
MAX_COPIED = 2**30  # bytes of the arguments of all constructors, which may copy them


class PickleBoundsError(ValueError):
    """A pickle describes structures that are too deep or too large."""


@dataclass(eq=False)
class _Item:
    """What is known of an object on the unpickler's stack.

    `text` is the value of a string. `cost` is about the bytes of a copy, shared parts counted each time. The flags say
    if a whole number, or a type that allocates as many bytes as a number says, is in it.
    """

    depth: int = 0
    size: int = 1
    text: str = ""
    cost: int = 64
    has_number: bool = False
    allocates: bool = False

    def take(self, parts: list[_Item]) -> _Item:
        """Put parts into the object, and return it."""
        depth = 1 + max((part.depth for part in parts), default=0)
        if depth > MAX_DEPTH:
            raise PickleBoundsError(f"it is nested more than {MAX_DEPTH} deep")
        self.depth = max(self.depth, depth)
        self.size = min(self.size + 1 + sum(part.size for part in parts), _MAX_SIZE)
        self.cost = min(self.cost + 64 + sum(part.cost for part in parts), _MAX_SIZE)
        self.has_number |= any(part.has_number for part in parts)
        self.allocates |= any(part.allocates for part in parts)
        return self


_ALLOCATES = ("builtins.bytearray", "__builtin__.bytearray")
_COPIES = "torch._utils._rebuild_device_tensor_from_cpu_tensor"  # of a tensor that may repeat its memory
_MAX_SIZE = 10**12  # sizes saturate, else sharing would make them numbers of a million digits
_CONTAINERS = {"TUPLE": None, "LIST": None, "DICT": None, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_INTO = {"APPEND": 1, "SETITEM": 2, "APPENDS": None, "SETITEMS": None, "ADDITEMS": None}
_CALLS = {"REDUCE": 2, "NEWOBJ": 2, "NEWOBJ_EX": 3, "OBJ": None, "INST": None, "FROZENSET": None}
_GETS = ("GET", "BINGET", "LONG_BINGET")
_PUTS = ("PUT", "BINPUT", "LONG_BINPUT")


def check_pickle(stream: BinaryIO) -> list[str]:
    """Read one pickle's opcodes, up to and including its end; return the names that it would import.

    `PickleBoundsError` if it would become nested more than `MAX_DEPTH` deep, hash more than `MAX_HASHED` parts, or
    allocate more than it holds; another `ValueError` if it is not a pickle.
    """
    names: list[str] = []
    stack: list[_Item] = []
    marks: list[int] = []  # heights of the stack
    memo: dict[int, _Item] = {}
    copied = 0

    def pop(count: int | None) -> list[_Item]:
        """Take items from the stack: as many as said, or those above the last mark."""
        start = max(len(stack) - count, 0) if count is not None else marks.pop() if marks else 0
        items = stack[start:]
        del stack[start:]
        return items

    for opcode, argument, _ in pickletools.genops(stream):
        name = opcode.name
        if name == "MARK":
            marks.append(len(stack))
        elif name in _CONTAINERS:
            parts = pop(_CONTAINERS[name])
            if name == "DICT":
                _check_hashed(parts[::2])
            stack.append(_container(parts))
        elif name in _INTO:
            parts = pop(_INTO[name])
            if name in ("SETITEM", "SETITEMS"):
                _check_hashed(parts[::2])
            elif name == "ADDITEMS":
                _check_hashed(parts)
            if stack:
                stack[-1].take(parts)
        elif name in _CALLS:
            if name == "INST":
                names.append(str(argument).replace(" ", "."))
            parts = pop(_CALLS[name])
            _check_hashed(parts)
            stack.append(called := _container(parts))
            copied += called.cost
            if copied > MAX_COPIED or (called.allocates and called.has_number):
                raise PickleBoundsError("it would take far more memory than it holds")
            called.allocates = False
        elif name == "BUILD":  # sets attributes of the object below
            _container(pop(1))
        elif name in ("POP", "POP_MARK"):
            pop(1 if name == "POP" else None)
        elif name == "DUP":
            stack.append(stack[-1] if stack else _Item())
        elif name in _GETS:
            stack.append(memo.get(int(argument or 0), _Item()))
        elif name in _PUTS or name == "MEMOIZE":
            if stack:
                memo[len(memo) if name == "MEMOIZE" else int(argument or 0)] = stack[-1]
        elif name == "STACK_GLOBAL":  # module and name are on the stack
            names.append(".".join(item.text for item in pop(2)))
            stack.append(_Item(allocates=names[-1] in _ALLOCATES))
        elif name == "BINPERSID":
            stack.append(_container(pop(1)))
        elif opcode.stack_after:
            text = argument if isinstance(argument, str) else ""
            item = _Item(text=text, has_number=isinstance(argument, int))
            item.cost += len(argument) if isinstance(argument, str | bytes) else 0
            if name == "GLOBAL":
                names.append(text.replace(" ", "."))
                item.allocates = names[-1] in _ALLOCATES
            stack.append(item)
        if names and names[-1] == _COPIES:
            raise PickleBoundsError(f"it asks for {_COPIES}, which weights on a CPU do not need")
    return names


def _container(parts: list[_Item]) -> _Item:
    return _Item(size=0, cost=0).take(parts)


def _check_hashed(parts: list[_Item]) -> None:
    if sum(part.size for part in parts) > MAX_HASHED and any(part.depth for part in parts):
        raise PickleBoundsError(f"it has a key or an object of more than {MAX_HASHED:,} parts")
