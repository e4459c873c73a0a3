"""Processes that hold the lock of a run's folder, or that nothing but a second SIGINT ends."""

import ctypes
import multiprocessing
import os
import signal
import threading
import time

from inline_attention.engine.interruption import noted_interruptions
from inline_attention.engine.run_folder import run_lock


def hold(folder, pipe):
    with run_lock(folder):
        pipe.send("holding")
        time.sleep(600)


def hold_and_fork(folder, pipe):
    with run_lock(folder):
        orphan = os.fork()
        if orphan == 0:
            time.sleep(600)
        pipe.send(orphan)
        time.sleep(600)


def wait_in_python(pipe):
    with noted_interruptions() as interruption:
        pipe.send("waiting")
        while True:
            threading.Event().wait(0.05)
            if interruption.number is not None:
                pipe.send("noted")
                threading.Event().wait()


def wait_in_c(pipe):
    """As in a collective whose peer is gone: the main thread runs no Python, and no signal wakes it."""
    with noted_interruptions():
        mutex = ctypes.create_string_buffer(64)
        library = ctypes.CDLL(None)
        library.pthread_mutex_lock(mutex)
        pipe.send("waiting")
        library.pthread_mutex_lock(mutex)


def wait_with_workers(pipe):
    """A worker that gets the signals of the terminal too, and waits for ever."""
    multiprocessing.set_start_method("fork", force=True)
    with noted_interruptions() as interruption:
        multiprocessing.current_process()._config["daemon"] = False  # else it may have no children
        worker = multiprocessing.Process(target=_sleep, daemon=True)
        worker.start()
        pipe.send(worker.pid)
        os.kill(worker.pid, signal.SIGINT)
        while True:
            time.sleep(0.05)
            if interruption.number is not None:
                pipe.send("noted")
                threading.Event().wait()


def _sleep():
    signal.signal(signal.SIGINT, lambda *_: None)
    while True:
        time.sleep(1)
