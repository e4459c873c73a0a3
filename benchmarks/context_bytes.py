"""Count what the ranks of context parallelism send, for images of any size: tensors without memory, no other process.

    python benchmarks/context_bytes.py

Writes benchmarks/results/context_bytes.json and .md: bytes that the middle rank sends in one forward and one backward
pass of one image in float32, and an estimate of the time that they take.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from inline_attention import create_model
from inline_attention.benchmark.environment import describe_environment
from inline_attention.parallel import parallelize_context
from inline_attention.support.files import write_atomically

MODELS = ("inline_deit_tiny", "inline_pvt_tiny", "inline_swin_tiny", "inline_cswin_tiny")
RANKS = (8, 64)
SIDE = 32768
RESULTS = Path(__file__).parent / "results" / "context_bytes.json"
# Assumptions of the estimate, not measurements: a network card of 400 Gbit/s per GPU, and the start of a collective.
BYTES_PER_SECOND = 50e9
SECONDS_PER_COLLECTIVE = 20e-6


class CollectiveBytes(TorchDispatchMode):
    """Counts collectives, and the bytes that this rank sends to others or passes on."""

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self.ranks, self.calls, self.sent = ranks, {"states": 0, "rows": 0}, {"states": 0, "rows": 0}

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        """Count a collective and run it."""
        name = str(func)
        if "c10d_functional" in name and "wait" not in name:
            kind = "rows" if "all_to_all" in name else "states"
            # A ring passes on the shares of all others, in all-gather and in its transpose, reduce-scatter.
            share = args[0].nbytes // (self.ranks if "reduce_scatter" in name else 1)
            self.calls[kind] += 1
            self.sent[kind] += args[0].nbytes if kind == "rows" else share * (self.ranks - 1)
        return func(*args, **(kwargs or {}))


def count(name: str, ranks: int) -> dict[str, Any]:
    """Return calls and bytes of the middle rank, forward and backward."""
    dist.init_process_group("fake", rank=ranks // 2, world_size=ranks, store=FakeStore())
    try:
        model = create_model(name)
        parallelize_context(model, init_device_mesh("cpu", (ranks,), mesh_dim_names=("context",)))
        found: dict[str, Any] = {"model": name, "ranks": ranks, "side": SIDE}
        with FakeTensorMode(allow_non_fake_inputs=True):
            with CollectiveBytes(ranks) as forward:
                logits = model(torch.empty(1, 3, SIDE, SIDE))
            with CollectiveBytes(ranks) as backward:
                logits.sum().backward()
        for direction, counted in (("forward", forward), ("backward", backward)):
            calls, sent = sum(counted.calls.values()), sum(counted.sent.values())
            seconds = calls * SECONDS_PER_COLLECTIVE + sent / BYTES_PER_SECOND
            found[direction] = {"calls": counted.calls, "bytes": counted.sent, "estimated_milliseconds": 1e3 * seconds}
        return found
    finally:
        dist.destroy_process_group()


def main() -> None:
    cases = []
    for name in MODELS:
        for ranks in RANKS:
            cases.append(count(name, ranks))
            print(json.dumps(cases[-1]), flush=True)
    assumptions = {"bytes_per_second": BYTES_PER_SECOND, "seconds_per_collective": SECONDS_PER_COLLECTIVE}
    environment = describe_environment()
    content = {"environment": environment, "assumptions": assumptions, "cases": cases}
    write_atomically(RESULTS, json.dumps(content, indent=2).encode() + b"\n")
    lines = [
        f"One image of {SIDE}², float32, the middle rank; states and rows in MB sent (number of collectives).",
        "",
        "| model | ranks | pass | states | rows | estimated ms |",
        "|---|---|---|---|---|---|",
    ]
    for case in cases:
        for direction in ("forward", "backward"):
            found = case[direction]
            shown = [f"{found['bytes'][kind] / 1e6:.2f} ({found['calls'][kind]})" for kind in ("states", "rows")]
            cells = [case["model"], str(case["ranks"]), direction, *shown, f"{found['estimated_milliseconds']:.2f}"]
            lines.append(f"| {' | '.join(cells)} |")
    write_atomically(RESULTS.with_suffix(".md"), ("\n".join(lines) + "\n").encode())


if __name__ == "__main__":
    main()
