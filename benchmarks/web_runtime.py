"""Update the copy of onnxruntime-web that `inline export --format web` puts into pages.

    python benchmarks/web_runtime.py VERSION

Needs npm for the runtime, and pip for the license texts, which the npm package lacks.
"""

from __future__ import annotations

import hashlib
import json
import lzma
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

import inline_attention

TARGET = Path(inline_attention.__file__).parent / "analysis" / "web" / "runtime"
SCRIPT, BINARY = "ort.wasm.bundle.min.mjs", "ort-wasm-simd-threaded.wasm"  # the smallest build: CPU only


def main(version: Annotated[str, typer.Argument(help="Version of onnxruntime-web.")]) -> None:
    with TemporaryDirectory() as folder:
        subprocess.run(["npm", "pack", "--silent", f"onnxruntime-web@{version}"], cwd=folder, check=True)
        (package,) = Path(folder).glob("*.tgz")
        with tarfile.open(package) as archive:
            contents = {name: _read(archive, f"package/dist/{name}") for name in (SCRIPT, BINARY)}
        download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", f"onnxruntime=={version}"]
        subprocess.run(download, cwd=folder, check=True)
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            (TARGET / "LICENSE").write_bytes(archive.read("onnxruntime/LICENSE"))
            notices = archive.read("onnxruntime/ThirdPartyNotices.txt")
            (TARGET / "ThirdPartyNotices.txt.xz").write_bytes(lzma.compress(notices, preset=9))
    (TARGET / SCRIPT).write_bytes(contents[SCRIPT])
    (TARGET / f"{BINARY}.xz").write_bytes(lzma.compress(contents[BINARY], preset=9 | lzma.PRESET_EXTREME))
    facts = {
        "name": "onnxruntime-web",
        "version": version,
        "license": "MIT",
        "sha256": {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()},
    }
    (TARGET / "runtime.json").write_text(json.dumps(facts, indent=2) + "\n")
    print(TARGET)


def _read(archive: tarfile.TarFile, name: str) -> bytes:
    file = archive.extractfile(name)
    assert file is not None, f"{name} is missing"
    return file.read()


if __name__ == "__main__":
    typer.run(main)
