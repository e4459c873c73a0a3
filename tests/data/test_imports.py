"""A check of data imports no model."""

import subprocess
import sys

PROGRAM = """
import sys
from inline_attention.data.coco.checks import open_and_check_coco
from inline_attention.data.segmentation import open_and_check_pairs
assert open_and_check_coco(".").problems and open_and_check_pairs(".").problems
models = ("timm", "inline_attention.models")
print(sorted(name for name in sys.modules if name.startswith(models)))
"""


def test_checks_need_neither_timm_nor_our_models(tmp_path):
    command = [sys.executable, "-c", PROGRAM]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert result.stdout == "[]\n", result.stdout + result.stderr
