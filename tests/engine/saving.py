"""Checkpoints whose content follows from their step, and processes that are stopped while they save them."""

import os
import resource
import shutil
import signal
import time
from pathlib import Path

import torch

from engine import forks
from inline_attention.engine.checkpoints import CheckpointStore, CheckpointWriteError


def weights_of(step, scale=1.0):
    generator = torch.Generator().manual_seed(step)
    return {
        "embed.weight": scale * torch.randn(64, 256, generator=generator),
        "head.bias": scale * torch.randn(10, generator=generator).bfloat16(),
        "steps": torch.tensor(step),
    }


def state_of(step):
    return {
        "step": step,
        "optimizer": {"state": {0: {"exp_avg": torch.full((64, 256), float(step))}}},
        "lr": [0.5, None],
    }


def save(store, step, **options):
    arguments = {
        "epoch": step // 10,
        "weights": weights_of(step),
        "ema_weights": weights_of(step, 0.5),
        "state": state_of(step),
        "metadata": {"model": "inline_deit_tiny"},
    }
    return store.save(step=step, **(arguments | options))


def assert_holds(checkpoint, step):
    """It loads, and every value is that of the step."""
    loaded = checkpoint.load()
    assert checkpoint.step == step
    for found, expected in ((loaded.weights, weights_of(step)), (loaded.ema_weights, weights_of(step, 0.5))):
        assert set(found) == set(expected)
        assert all(torch.equal(found[name], expected[name]) for name in expected)
    expected = state_of(step)
    exp_avg = loaded.state["optimizer"]["state"][0].pop("exp_avg")
    assert torch.equal(exp_avg, expected["optimizer"]["state"][0].pop("exp_avg"))
    assert loaded.state == expected


class Child:
    """A process that runs a function of this module, which gets a pipe to report through as its last argument."""

    def __init__(self, function, *arguments):
        self.pipe, theirs = forks.context.Pipe()
        self.process = forks.context.Process(target=function, args=(*arguments, theirs), daemon=True)
        self.process.start()
        theirs.close()

    def receive(self):
        assert self.pipe.poll(60), "the child said nothing for a minute"
        return self.pipe.recv()

    def kill(self):
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.join(60)

    def received(self):
        """All that it sent before it ended."""
        messages = []
        while self.pipe.poll(60):
            try:
                messages.append(self.pipe.recv())
            except EOFError:
                break
        self.process.join(60)
        return messages


def save_for_ever(folder, first_step, pipe):
    """Report each step when its save has returned."""
    store = CheckpointStore(folder, keep_last=1, keep_best=1)
    pipe.send("ready")
    step = first_step
    while True:
        save(store, step, metric=float(step % 7))
        pipe.send(step)
        step += 1


def save_and_die_at_call(folder, step, number, pipe):
    """Save once, and be killed just before the n-th call that changes something on the disk."""
    calls = 0

    def counted(function):
        def call(*arguments, **options):
            nonlocal calls
            calls += 1
            if calls == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*arguments, **options)

        return call

    for module, name in (
        *((os, name) for name in ("fsync", "rename", "replace", "mkdir", "unlink", "rmdir", "symlink")),
        (torch, "save"),
        (shutil, "rmtree"),
    ):
        setattr(module, name, counted(getattr(module, name)))
    save(CheckpointStore(folder, keep_last=1), step, metric=float(step))
    pipe.send("survived")


def save_with_file_limit(folder, step, limit, pipe):
    """Save where no file can grow beyond a limit in bytes; report the error."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    pipe.send(_error_of_save(folder, step))


def save_as_nobody(folder, step, pipe):
    """Save without the rights of root; report the error."""
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
    pipe.send(_error_of_save(folder, step))


def save_until_full(folder, pipe):
    """Save ever new steps on a small disk, keeping all; report the steps that were saved, and the error."""
    store = CheckpointStore(folder, keep_last=1000)
    saved = []
    try:
        for step in range(1000):
            save(store, step)
            saved.append(step)
    except CheckpointWriteError as error:
        pipe.send((saved, error))


def save_slowly(folder, step, pipe):
    """Save, and stay in the middle of it until told to go on."""
    original = torch.save

    def slow(*arguments):
        pipe.send("saving")
        pipe.recv()
        original(*arguments)

    torch.save = slow
    save(CheckpointStore(folder), step)
    pipe.send("saved")


def save_many(folder, steps, pipe):
    store = CheckpointStore(folder, keep_last=3)
    for step in steps:
        save(store, step)
    pipe.send("done")


def _error_of_save(folder, step):
    start = time.monotonic()
    try:
        save(CheckpointStore(Path(folder)), step)
    except CheckpointWriteError as error:
        assert time.monotonic() - start < 30
        return error
    return None
