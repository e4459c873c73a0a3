"""One run of a comparison, in its own process.

    python -m inline_attention.ablation.one_run SETTINGS.yaml [--alone]

`--alone` says that no other run takes its share of the machine, so that its speed is worth noting.
"""

from __future__ import annotations

import sys
from pathlib import Path

from inline_attention.ablation.runs import finish_run
from inline_attention.engine.config import read_config
from inline_attention.engine.interruption import InterruptedBySignalError


def main(settings: Path, *, is_alone: bool) -> int:
    """Train to the end, or go on; the status of the process."""
    try:
        finish_run(
            read_config(settings),
            is_alone=is_alone,
            on_epoch=lambda row: print(f"epoch {row['epoch']}, loss {row['train_loss']:.3f}", flush=True),
        )
    except InterruptedBySignalError as error:
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), is_alone="--alone" in sys.argv[2:]))
