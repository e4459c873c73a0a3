"""Runs that are stopped, get bad numbers, or resume with other settings: what is kept, refused and reported."""

import dataclasses
import math
import multiprocessing
import os
import signal
import threading

import pytest
import torch

from engine.runs import assert_same_end, config, final_weights, from_files, last_checkpoint, rows
from inline_attention.engine import train, trainer
from inline_attention.engine.checkpoints import TrainingCheckpoint
from inline_attention.engine.config import ConfigError
from inline_attention.engine.interruption import InterruptedBySignalError
from inline_attention.engine.reporting import RunReport
from inline_attention.engine.trainer import DivergedError, Trainer
from inline_attention.models.reading import find_weights

RESNET = [
    "model.name=resnet10t",
    "model.arguments={pretrained_cfg_overlay: {input_size: [3, 32, 32]}}",  # else 176 pixels
    "model.img_size=null",
    "model.drop_path=null",
]


def after_update(monkeypatch, number, act):
    """Do something once, after so many updates."""
    update_done, done = RunReport.update_done, []

    def update_done_and_act(self, update, *facts):
        update_done(self, update, *facts)
        if update == number and not done:
            done.append(None)
            act()

    monkeypatch.setattr(RunReport, "update_done", update_done_and_act)


def stop(tmp_path, monkeypatch, updates, *overrides):
    after_update(monkeypatch, updates, lambda: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(InterruptedBySignalError):
        train.train(config(tmp_path, "run.experiment=run", *overrides))
    monkeypatch.undo()


def test_a_signal_to_every_process_ends_the_run_after_saving(tmp_path, pictures, monkeypatch):
    """As Slurm and systemd send it: to those that read images, too."""
    whole, _ = train.train(from_files(tmp_path, pictures, "whole"))

    def tell_all():
        for worker in multiprocessing.active_children():
            os.kill(worker.pid, signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)

    after_update(monkeypatch, 2, tell_all)
    with pytest.raises(InterruptedBySignalError):
        train.train(from_files(tmp_path, pictures, "parts"))
    monkeypatch.undo()
    assert not multiprocessing.active_children()
    parts, _ = train.train(from_files(tmp_path, pictures, "parts", "run.resume=auto"))
    assert_same_end(whole, parts)


def test_a_stop_between_epochs_leaves_the_measured_checkpoint_in_place(tmp_path, monkeypatch):
    epoch_done = RunReport.epoch_done

    def epoch_done_and_stop(self, *facts):
        epoch_done(self, *facts)
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(RunReport, "epoch_done", epoch_done_and_stop)
    with pytest.raises(InterruptedBySignalError):
        train.train(config(tmp_path, "run.experiment=run"))
    monkeypatch.undo()
    folder = tmp_path / "run"
    measured = last_checkpoint(folder)
    assert (measured.step, measured.epoch, measured.metric is None) == (5, 1, False)
    assert (folder / "checkpoints" / "best").resolve() == (folder / "checkpoints" / "last").resolve()
    # Resumed, and stopped before its first update: the same.
    read = trainer.RankSync.agree

    def stop_first(self):
        os.kill(os.getpid(), signal.SIGTERM)
        read(self)

    monkeypatch.setattr(trainer.RankSync, "agree", stop_first)
    with pytest.raises(InterruptedBySignalError):
        train.train(config(tmp_path, "run.experiment=run", "run.resume=auto"))
    assert last_checkpoint(folder).metric == measured.metric


def test_a_poisoned_batch_leaves_no_trace_in_batch_norms(tmp_path, monkeypatch):
    accumulate, calls = Trainer._accumulate_gradients, []

    def poisoned(self, batches):
        calls.append(None)
        if len(calls) == 2:
            batches = [dataclasses.replace(batch, images=batch.images * torch.inf) for batch in batches]
        return accumulate(self, batches)

    monkeypatch.setattr(Trainer, "_accumulate_gradients", poisoned)
    overrides = [*RESNET, "training.epochs=1", "ema.enabled=true", "run.experiment=run"]
    folder, _ = train.train(config(tmp_path, *overrides))
    assert rows(folder)[-1]["skipped_updates"] == "1"
    for name in ("model.safetensors", "model_ema.safetensors"):
        weights = final_weights(folder, name)
        assert any("running_mean" in key for key in weights)
        assert all(tensor.isfinite().all() for tensor in weights.values() if tensor.is_floating_point())


@pytest.mark.parametrize("clip", ["null", "1.0"])
def test_gradients_that_are_not_finite_are_skipped_even_with_a_finite_loss(tmp_path, monkeypatch, clip):
    accumulate, update_done, calls, losses = Trainer._accumulate_gradients, RunReport.update_done, [], []

    def poisoned(self, batches):
        total = accumulate(self, batches)
        calls.append(None)
        if len(calls) == 3:
            self.model.head.weight.grad[0, 0] = torch.nan
        return total

    def noting(self, update, epoch, images, loss, lr):
        losses.append(loss)
        update_done(self, update, epoch, images, loss, lr)

    monkeypatch.setattr(Trainer, "_accumulate_gradients", poisoned)
    monkeypatch.setattr(RunReport, "update_done", noting)
    overrides = ["run.experiment=run", "training.epochs=1", f"training.clip_grad={clip}", "ema.enabled=true"]
    folder, _ = train.train(config(tmp_path, *overrides))
    (row,) = rows(folder)
    assert row["skipped_updates"] == "1"
    for name in ("model.safetensors", "model_ema.safetensors"):
        assert all(tensor.isfinite().all() for tensor in final_weights(folder, name).values())
    made = [loss for number, loss in enumerate(losses) if number != 2]
    assert float(row["train_loss"]) == pytest.approx(math.fsum(made) / len(made), rel=1e-3)


class Scaled(trainer.Precision):
    """Scales losses, as amp=auto does on a GPU without bfloat16; the CPU's scaler stands in for the GPU's."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)


@pytest.mark.parametrize("clip", ["null", "1.0"])
def test_gradients_that_overflow_where_losses_are_scaled_are_skipped_and_counted(tmp_path, monkeypatch, clip):
    accumulate, calls, overflowing = Trainer._accumulate_gradients, [], [3]

    def poisoned(self, batches):
        total = accumulate(self, batches)
        calls.append(None)
        if len(calls) in overflowing:
            self.model.head.weight.grad[0, 0] = torch.inf
        return total

    monkeypatch.setattr(trainer, "Precision", Scaled)
    monkeypatch.setattr(Trainer, "_accumulate_gradients", poisoned)
    overrides = ["training.epochs=1", f"training.clip_grad={clip}", "ema.enabled=true"]
    folder, _ = train.train(config(tmp_path, "run.experiment=once", *overrides))
    assert rows(folder)[0]["skipped_updates"] == "1"
    assert last_checkpoint(folder).load().state["scaler"]["scale"] == 4.0
    for name in ("model.safetensors", "model_ema.safetensors"):
        assert all(tensor.isfinite().all() for tensor in final_weights(folder, name).values())
    overflowing.extend(range(1, 100))
    with pytest.raises(DivergedError, match="3 losses or gradients in a row"):
        train.train(config(tmp_path, "run.experiment=always", *overrides, "limits.nan_losses_in_a_row=2"))


def test_a_run_resumes_with_loss_scaling_switched_on(tmp_path, monkeypatch):
    train.train(config(tmp_path, "run.experiment=run", "training.epochs=1"))
    monkeypatch.setattr(trainer, "Precision", Scaled)
    folder, _ = train.train(config(tmp_path, "run.experiment=run", "run.resume=auto"))
    assert last_checkpoint(folder).load().state["scaler"]["scale"] == 8.0


def test_another_optimiser_cannot_take_up_a_run(tmp_path):
    train.train(config(tmp_path, "run.experiment=run", "training.epochs=1"))
    with pytest.raises(
        ConfigError, match=r"optimizer\.name: expected adamw, as in .*, got sgd; .*--initial-checkpoint"
    ):
        train.train(config(tmp_path, "run.experiment=run", "run.resume=auto", "optimizer.name=sgd"))


def test_a_checkpoint_that_notes_less_is_refused(tmp_path, monkeypatch):
    train.train(config(tmp_path, "run.experiment=run", "training.epochs=1"))
    load = TrainingCheckpoint.load

    def load_less(self):
        loaded = load(self)
        del loaded.state["deal"]
        return loaded

    monkeypatch.setattr(TrainingCheckpoint, "load", load_less)
    with pytest.raises(ConfigError, match=r"run\.resume: .* of an earlier version .*--initial-checkpoint"):
        train.train(config(tmp_path, "run.experiment=run", "run.resume=auto"))


def test_settings_of_the_optimiser_are_those_of_now(tmp_path):
    train.train(config(tmp_path, "run.experiment=run", "training.epochs=1"))
    changed = ["optimizer.weight_decay=0.7", "optimizer.betas=[0.8, 0.99]"]
    folder, _ = train.train(config(tmp_path, "run.experiment=run", "run.resume=auto", *changed))
    groups = last_checkpoint(folder).load().state["optimizer"]["param_groups"]
    assert sorted(group["weight_decay"] for group in groups) == [0.0, 0.7]
    assert all(tuple(group["betas"]) == (0.8, 0.99) for group in groups)


def test_a_run_by_updates_can_be_made_longer(tmp_path):
    """Its last epoch was cut short, at 3 of 5 updates."""
    train.train(config(tmp_path, "run.experiment=run", "training.updates=8"))
    folder, _ = train.train(config(tmp_path, "run.experiment=run", "run.resume=auto", "training.updates=20"))
    assert last_checkpoint(folder).step == 20
    assert [row["epoch"] for row in rows(folder)] == ["1", "2", "3", "4", "5"]


def test_an_epoch_begins_again_where_samples_are_dealt_out_otherwise(tmp_path, monkeypatch, capsys):
    stop(tmp_path, monkeypatch, 3)
    folder, _ = train.train(config(tmp_path, "run.experiment=run", "run.resume=auto", "training.seed=1"))
    assert "seed 42 before, 1 now: epoch 1 begins again" in " ".join(capsys.readouterr().out.split())
    assert last_checkpoint(folder).step == 10


def test_between_epochs_there_is_nothing_to_begin_again(tmp_path, capsys):
    train.train(config(tmp_path, "run.experiment=run", "training.epochs=1"))
    folder, _ = train.train(config(tmp_path, "run.experiment=run", "run.resume=auto", "training.seed=1"))
    assert "begins again" not in capsys.readouterr().out
    assert last_checkpoint(folder).step == 10


@pytest.mark.parametrize(
    ("batch_size", "message"), [(64, "one step takes 64"), (32, "expected enough readable images")]
)
def test_too_few_readable_pictures_for_an_update_are_said(tmp_path, pictures, batch_size, message):
    first = next(iter(sorted((pictures / "train").rglob("*.png"))))
    first.write_bytes(b"")
    overrides = [
        "data.in_memory=true",
        "augmentation.crop=padded",
        f"training.batch_size={batch_size}",
        "limits.broken_image_share=1",
    ]
    with pytest.raises(ConfigError, match=message):
        train.train(from_files(tmp_path, pictures, "run", *overrides, "training.total_batch_size=64"))


def test_weights_are_found_where_links_are_files(tmp_path):
    folder, _ = train.train(config(tmp_path, "run.experiment=run", "training.epochs=1"))
    best = folder / "checkpoints" / "best"
    target = best.resolve()
    best.unlink()
    best.write_text(f"{target.name}\n")
    for path in (folder, folder / "checkpoints"):
        assert find_weights(path) == target / "model.safetensors"


def test_a_thread_may_train(tmp_path):
    outcomes = []

    def work():
        outcomes.append(train.train(config(tmp_path, "run.experiment=run", "training.epochs=1"))[1].count)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert outcomes == [360]
