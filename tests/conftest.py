"""What all tests share: Triton's interpreter where there is no GPU, one thread count, one seed."""

import gc
import os
import signal
from pathlib import Path
from shutil import which

# Before anything imports Triton, and without importing torch, which may: kernels are interpreted or compiled from the
# moment they are defined. On a machine with a GPU the real compiler is what is to be tested.
if not any(Path(device).exists() for device in ("/dev/nvidia0", "/dev/kfd", "/dev/dxg")):
    os.environ["TRITON_INTERPRET"] = "1"

# xdist sets it, and tables would leave columns out.
os.environ.pop("COLUMNS", None)

import pytest
import torch

# A shell's background jobs ignore Ctrl-C, and so would the processes that tests start and interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Several workers on few cores: without this every worker would start a thread per core.
if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def browser():
    """A Chromium; tests of pages are skipped where none can be started. Mark them `xdist_group("browser")`."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with playwright.sync_playwright() as started:
        system = which("chromium") or which("chromium-browser") or which("google-chrome")
        try:
            opened = started.chromium.launch(executable_path=system, args=["--no-sandbox"])
        except playwright.Error as error:
            pytest.skip(f"no Chromium to start: {error.message.splitlines()[0]}")
        yield opened
        opened.close()


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def pytest_collection_finish():
    """All modules are imported and stay: to look for garbage among them takes a tenth of the time."""
    gc.freeze()


def pytest_sessionfinish():
    gc.unfreeze()


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu") is not None:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
