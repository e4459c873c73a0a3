"""`python -m inline_attention.analysis.ablation.one_run SETTINGS.yaml`: one run of a comparison, in its own process."""

from __future__ import annotations

import sys
from pathlib import Path

from inline_attention.analysis.ablation.runs import finish_run
from inline_attention.engine.config import read_config
from inline_attention.engine.interruption import InterruptedBySignalError


def main(settings: Path) -> int:
    """Train to the end, or go on; the status of the process."""
    try:
        finish_run(
            read_config(settings),
            is_alone=False,
            on_epoch=lambda row: print(f"epoch {row['epoch']}, loss {row['train_loss']:.3f}", flush=True),
        )
    except InterruptedBySignalError as error:
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
