"""A first signal is noted, a second SIGINT ends the process at once, whatever it waits for."""

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from engine import locking
from engine.saving import Child
from inline_attention.engine.interruption import noted_interruptions


def tell(child, number=signal.SIGINT):
    os.kill(child.process.pid, number)


def exit_code(child):
    child.process.join(30)
    code = child.process.exitcode
    child.process.kill()
    return code


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
def test_a_second_sigint_ends_a_process_that_waits_in_python(first):
    child = Child(locking.wait_in_python)
    assert child.receive() == "waiting"
    tell(child, first)
    assert child.receive() == "noted"
    assert child.process.is_alive()
    tell(child)
    assert exit_code(child) == 130


def test_a_second_sigint_ends_a_process_that_waits_in_c():
    child = Child(locking.wait_in_c)
    assert child.receive() == "waiting"
    tell(child)
    time.sleep(0.5)
    assert child.process.is_alive()
    tell(child)
    assert exit_code(child) == 130


def test_a_second_sigterm_does_not():
    child = Child(locking.wait_in_python)
    assert child.receive() == "waiting"
    tell(child, signal.SIGTERM)
    assert child.receive() == "noted"
    tell(child, signal.SIGTERM)
    time.sleep(0.5)
    assert child.process.is_alive()
    child.kill()


def test_workers_end_with_it_and_their_signals_do_not_count():
    child = Child(locking.wait_with_workers)
    worker = child.receive()
    time.sleep(0.5)  # the worker has got one
    tell(child)
    assert child.receive() == "noted"
    time.sleep(0.3)
    assert child.process.is_alive()
    tell(child)
    assert exit_code(child) == 130
    deadline = time.monotonic() + 10
    while os.path.exists(f"/proc/{worker}") and " Z " not in Path(f"/proc/{worker}/stat").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_under_torchrun_a_signal_that_is_passed_on_is_not_a_second_one(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    with noted_interruptions() as interruption:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.2)
    assert interruption.number == signal.SIGINT


def test_handlers_and_threads_are_as_before_in_the_end():
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM), threading.active_count()
    with noted_interruptions():
        assert signal.getsignal(signal.SIGINT) != before[0]
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM), threading.active_count()) == before
    assert signal.set_wakeup_fd(-1) == -1
