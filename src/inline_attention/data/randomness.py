"""Random numbers that depend on a key alone: not on the process, the order of calls, or what was drawn before."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


def derived_seed(*key: int | str) -> int:
    """Return a seed below 2⁶³ for a purpose, such as `("shuffle", seed, epoch)`; the same on every machine."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def seed_global_generators(*key: int | str) -> None:
    """Make Python's, NumPy's and torch's global random numbers on the CPU depend on the key alone, from here on."""
    seed = derived_seed(*key)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)  # `torch.manual_seed` would seed the GPUs too


@contextmanager
def preserve_global_generators() -> Iterator[None]:
    """Restore Python's, NumPy's and torch's global generators on the CPU at the end.

    Without it the dropout of a model would depend on whether its images are prepared in the same process.
    """
    states = random.getstate(), np.random.get_state(), torch.default_generator.get_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.default_generator.set_state(states[2])
