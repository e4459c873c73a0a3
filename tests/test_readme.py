"""The README is true: its Python runs, its links and commands exist."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
SNIPPETS = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


@pytest.mark.parametrize("index", range(len(SNIPPETS)))
def test_snippet_runs(index, tmp_path):
    if "load_checkpoint" in SNIPPETS[index]:
        from inline_attention import create_model
        from inline_attention.models.checkpoints import save_weights

        save_weights(create_model("inline_deit_tiny"), tmp_path / "inline_deit_tiny.safetensors")
    program = tmp_path / "snippet.py"
    program.write_text(SNIPPETS[index])
    subprocess.run([sys.executable, program], cwd=tmp_path, check=True)


def test_links_lead_somewhere():
    for document in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\((?!http)([^)#]+)", document.read_text()):
            assert (document.parent / target).exists(), f"{document.name} links to {target}"


def test_every_command_is_named():
    from typer.main import get_command

    from inline_attention.cli.main import app

    for command in get_command(app).commands:
        assert f"`inline {command}`" in README or f"`{command}`" in README or f"inline {command} " in README
