"""Ctrl-C and SIGTERM: quiet, with the exit code that shells expect, and at once when repeated."""

import os
import signal
import subprocess
import sys
import time

import pytest

from cli.processes import end_of, start_command, start_waiting

SIGNALS = pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["ctrl-c", "terminated"]
)


@SIGNALS
@pytest.mark.parametrize("seconds", [0.3, 0.6, 1.2, 2.0])
def test_imports_end_quietly(number, code, seconds):
    """`inline eval` imports torch and timm for seconds: wherever the signal arrives, there is no traceback."""
    process = start_command("eval", "--checkpoint", "no such file", "--data-dir", ".")
    time.sleep(seconds)
    process.send_signal(number)
    assert end_of(process) == (code, "")


def test_an_import_is_ended_even_where_code_swallows_interrupts(tmp_path):
    (tmp_path / "swallowing.py").write_text(
        "import time\nprint('ready', flush=True)\ntry:\n    time.sleep(60)\nexcept BaseException:\n    time.sleep(60)\n"
    )
    process = start_waiting(f"sys.path.insert(0, {str(tmp_path)!r}); import swallowing")
    process.send_signal(signal.SIGINT)
    assert end_of(process) == (130, "")


@SIGNALS
def test_a_command_ends_quietly(number, code):
    process = start_waiting()
    process.send_signal(number)
    assert end_of(process) == (code, "")


@SIGNALS
def test_an_error_that_a_signal_causes_is_not_shown(number, code):
    """As when a data worker dies of Ctrl-C before the command does."""
    process = start_waiting("try: time.sleep(60)\n    except BaseException: raise RuntimeError('a worker died')")
    process.send_signal(number)
    assert end_of(process) == (code, "")


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere Python alone can end the process")
@pytest.mark.parametrize(
    "blocking",
    [
        "import ctypes; [ctypes.CDLL(None).sleep(60) for _ in range(2)]",
        "import ctypes; [ctypes.PyDLL(None).sleep(60) for _ in range(2)]",
        "signal = __import__('signal'); [signal.pthread_sigmask(signal.SIG_BLOCK, []) or time.sleep(60)]",
    ],
    ids=["in C", "in C with Python's lock", "in Python"],
)
def test_the_second_signal_ends_a_blocked_process_at_once(blocking):
    process = start_waiting(f"{blocking}")
    process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    returncode, errors = end_of(process)
    assert returncode in (130, -signal.SIGINT)
    assert "Traceback" not in errors


def test_waiting_for_a_pipe_is_interrupted(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    process = start_waiting(f"open({str(tmp_path / 'pipe')!r})")
    process.send_signal(signal.SIGTERM)
    assert end_of(process) == (143, "")


def test_an_ignored_signal_stays_ignored():
    """A command in the background, or under nohup, is not ended by Ctrl-C."""
    program = """
import signal
signal.signal(signal.SIGINT, signal.SIG_IGN)
from inline_attention.support.signals import stop_on_signal
stop_on_signal.install()
assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_children_do_not_see_ctrl_c():
    """The interrupt that a terminal sends to all processes reaches the parent alone, which ends the others."""
    program = """
import os, signal, subprocess, sys, time
from inline_attention.support.signals import children_ignore_interrupts
with children_ignore_interrupts():
    child = subprocess.Popen([sys.executable, "-c", "import time; print('ready', flush=True); time.sleep(60)"],
                             stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
assert child.stdout.readline() == "ready\\n"
child.send_signal(signal.SIGINT)
time.sleep(0.5)
assert child.poll() is None
child.terminate()
assert child.communicate()[1] == ""
assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])
"""
    subprocess.run([sys.executable, "-c", program], check=True)
