"""Processes that work together as torchrun would have them, forked from one that has imported torch before."""

import multiprocessing
import os
import resource
import signal
import socket
from dataclasses import dataclass
from typing import Any

import torch

from engine import forks
from engine.dense import dense_config
from inline_attention.engine import evaluate, trainer
from inline_attention.engine import linearize as linearizing
from inline_attention.engine import train as training
from inline_attention.engine.config import with_overrides
from inline_attention.recipes import get_recipe
from inline_attention.tasks.classification import task


@dataclass
class Outcome:
    """What a function returned, or the name and text of what it raised."""

    value: Any = None
    error: str | None = None
    message: str = ""
    exit_code: int | None = None


def in_pair(function, *arguments, seconds=120, ranks=2):
    """Call a function in two or more processes, with their number as its last argument; all outcomes."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    children = []
    for rank in range(ranks):
        ours, theirs = forks.context.Pipe()
        process = forks.context.Process(target=_work, args=(rank, ranks, port, function, arguments, theirs))
        process.start()
        theirs.close()
        children.append((process, ours))
    try:
        for _, pipe in children:
            assert pipe.poll(seconds), f"a process said nothing for {seconds} s"
        return [_received(pipe) for _, pipe in children]
    finally:
        for process, _ in children:
            process.join(5)
            process.kill()


def _received(pipe):
    try:
        return pipe.recv()
    except EOFError:
        return Outcome(error="killed")


def _work(rank, ranks, port, function, arguments, pipe):
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    torch.set_num_threads(1)
    multiprocessing.set_start_method("fork", force=True)  # of data workers, as in any process that is not forked so
    with open(os.devnull, "w") as nowhere:
        for stream in (1, 2):
            os.dup2(nowhere.fileno(), stream)
    try:
        outcome = Outcome(function(*arguments, rank))
    except Exception as error:
        outcome = Outcome(None, type(error).__name__, str(error), getattr(error, "exit_code", None))
    pipe.send(outcome)


def train(overrides, rank):
    """The last evaluation of a run."""
    del rank
    return training.train(with_overrides(get_recipe("digits").config, overrides))[1]


def linearize(overrides, attention_epochs, rank):
    """The figures of each stage."""
    del rank
    config = with_overrides(get_recipe("digits").config, overrides)
    return linearizing.linearize(config, attention_epochs=attention_epochs).figures


def train_in_folders_of_their_own(overrides, folder, rank):
    """As on two machines that share no disk."""
    os.chdir(f"{folder}/{rank}")
    return train(overrides, rank)


def train_dense(head, data, output, overrides, rank):
    """The last evaluation of a run of detection or segmentation, in words."""
    del rank
    return str(training.train(dense_config(head, data, output, *overrides))[1])


def train_until_told_in_evaluation(overrides, rank):
    """The second process gets a signal after its first batch of the second evaluation; the first gets none."""
    counted = []
    count = task.ClassificationEvaluator.add

    def count_and_tell(evaluator, model, batch):
        counted.append(len(batch.targets))
        if rank == 1 and len(counted) == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return count(evaluator, model, batch)

    task.ClassificationEvaluator.add = count_and_tell
    return train(overrides, rank)


def train_until_killed(overrides, rank):
    """The second process is killed in its third update."""
    losses = []
    loss = task.Objective.loss

    def count_and_kill(self, logits, targets):
        losses.append(None)
        if rank == 1 and len(losses) == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return loss(self, logits, targets)

    task.Objective.loss = count_and_kill
    return train(overrides, rank)


def train_without_room(overrides, rank):
    """The first process, which saves, cannot write files of more than a few bytes."""
    if rank == 0:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    return train(overrides, rank)


def measure(path, data, batch_size, rank):
    """As `inline eval` does."""
    del rank
    metrics = evaluate.evaluate_checkpoint(path, data, batch_size=batch_size)
    return metrics and vars(metrics)


def train_with_a_bad_loss(overrides, rank):
    """In the second process the losses of updates 2 and 3 are not finite; the averages after each update."""
    averages, losses = [], []
    loss, apply, skip = task.Objective.loss, trainer.Trainer._update_weights, trainer.Trainer._skip

    def bad_loss(self, logits, targets):
        losses.append(None)
        factor = torch.nan if rank == 1 and len(losses) in (2, 3) else 1.0
        return loss(self, logits, targets) * factor

    def noting(function):
        def call(self, *arguments):
            function(self, *arguments)
            averages.append(self.ema.module.head.weight.tolist())

        return call

    task.Objective.loss = bad_loss
    trainer.Trainer._update_weights, trainer.Trainer._skip = noting(apply), noting(skip)
    train(overrides, rank)
    return averages
