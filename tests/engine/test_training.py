"""Runs that are stopped, killed, damaged, poisoned and shared out: nothing is lost, and nothing is counted twice."""

import csv
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from typer.testing import CliRunner

import warm
from engine.runs import assert_same_end, checkpoints, command, config, final_weights
from inline_attention.cli.main import app
from inline_attention.engine import train, trainer
from inline_attention.engine.config import ConfigError, from_yaml, with_overrides
from inline_attention.engine.interruption import InterruptedBySignalError
from inline_attention.engine.reporting import RunReport
from inline_attention.models import create_model
from inline_attention.models.checkpoints import CheckpointError
from inline_attention.models.hub import from_pretrained, save_pretrained
from inline_attention.models.reading import find_weights, open_checkpoint
from inline_attention.recipes import get_recipe, list_recipes
from inline_attention.support.text import install_command
from inline_attention.tasks.classification import task
from inline_attention.tasks.classification.task import Objective

# Worker processes, timm's augmentation, mixing, accumulation and an average: everything that could lose its place.
ELABORATE = [
    "data.in_memory=false",
    "data.workers=2",
    "augmentation.crop=resized",
    "augmentation.auto_augment=rand-m5-mstd0.5",
    "augmentation.reprob=0.25",
    "augmentation.mixup=0.2",
    "training.batch_size=128",
    "training.grad_accum_steps=2",
    "training.total_batch_size=null",
    "ema.enabled=true",
]

# With two blocks, Muon updates matrices together.
ON_DEVICE = [
    "augmentation.auto_augment=rand-m9-mstd0.5-inc1",
    "augmentation.reprob=0.5",
    "optimizer.name=muon",
    "model.arguments={patch_size: 2, embed_dim: 32, num_heads: 1, depth: 2}",
]


@pytest.fixture
def stop_after(monkeypatch):
    """Send this process a signal after so many updates, once."""

    def arrange(updates: int, number: int = signal.SIGTERM):
        report_update = RunReport.update_done
        sent = []

        def update_done(self, update, *arguments):
            report_update(self, update, *arguments)
            if update == updates and not sent:
                sent.append(number)
                os.kill(os.getpid(), number)
                if number == signal.SIGTERM:
                    os.kill(os.getpid(), number)  # schedulers may repeat it

        monkeypatch.setattr(RunReport, "update_done", update_done)

    return arrange


def test_ctrl_c_saves_and_leaves_with_130(tmp_path, stop_after):
    stop_after(2, signal.SIGINT)
    with pytest.raises(InterruptedBySignalError) as stopped:
        train.train(config(tmp_path, "run.experiment=run"))
    assert stopped.value.exit_code == 130
    assert checkpoints(tmp_path / "run")


def test_a_padded_crop_needs_data_in_memory(tmp_path):
    with pytest.raises(ConfigError, match=r"augmentation\.crop: .*data\.in_memory=true"):
        train.train(config(tmp_path, "data.in_memory=false"))


@pytest.mark.parametrize("extra", [ON_DEVICE, ELABORATE], ids=["in_memory", "elaborate"])
@pytest.mark.parametrize("updates", [3, 5], ids=["mid_epoch", "end_of_epoch"])
def test_a_stopped_and_resumed_run_ends_in_the_same_bits(tmp_path, stop_after, updates, extra):
    whole, metrics = train.train(config(tmp_path, "run.experiment=whole", *extra))
    stop_after(updates)
    with pytest.raises(InterruptedBySignalError) as stopped:
        train.train(config(tmp_path, "run.experiment=parts", *extra))
    assert stopped.value.exit_code == 143
    parts, resumed_metrics = train.train(config(tmp_path, "run.experiment=parts", "run.resume=auto", *extra))
    assert_same_end(whole, parts)
    assert metrics == resumed_metrics
    assert metrics.count == 360


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_during_an_evaluation_is_answered_at_its_next_batch(tmp_path, monkeypatch, number, code):
    extra = ["training.validation_batch_size=36", "ema.enabled=true"]
    whole, _ = train.train(config(tmp_path, "run.experiment=whole", *extra))
    counted, count = [], task.ClassificationEvaluator.add

    def count_and_tell(evaluator, model, batch):
        counted.append(len(batch.targets))
        if len(counted) == 13:  # the third of ten batches by which the average is evaluated
            os.kill(os.getpid(), number)
        return count(evaluator, model, batch)

    monkeypatch.setattr(task.ClassificationEvaluator, "add", count_and_tell)
    with pytest.raises(InterruptedBySignalError) as stopped:
        train.train(config(tmp_path, "run.experiment=parts", *extra))
    assert stopped.value.exit_code == code
    assert len(counted) == 13
    parts, _ = train.train(config(tmp_path, "run.experiment=parts", "run.resume=auto", *extra))
    assert len(counted) == 13 + 2 * 20  # this epoch's evaluation again, from its start, and the next one's
    assert_same_end(whole, parts)


def test_a_damaged_checkpoint_is_passed_over(tmp_path, caplog):
    whole, _ = train.train(config(tmp_path, "run.experiment=whole"))
    parts, _ = train.train(config(tmp_path, "run.experiment=parts", "training.epochs=1"))
    # Longer again, as a run that was stopped after its first epoch.
    newest = (parts / "checkpoints" / "last").resolve()
    train.train(config(tmp_path, "run.experiment=parts", "run.resume=auto"))
    state = (parts / "checkpoints" / "last").resolve() / "state.pt"
    state.write_bytes(state.read_bytes()[:-10])
    train.train(config(tmp_path, "run.experiment=parts", "run.resume=auto"))
    assert "state.pt" in caplog.text
    assert newest.exists()
    assert len(list(csv.DictReader((parts / "summary.csv").open()))) == 2
    assert whole != parts


def test_an_average_that_is_asked_for_later_begins_with_the_weights_of_then(tmp_path, capsys):
    folder, _ = train.train(config(tmp_path, "run.experiment=run", "training.epochs=1"))
    weights = final_weights(folder)
    slow = ["ema.enabled=true", "ema.decay=0.999999", "ema.decay_base_size=null"]
    train.train(config(tmp_path, "run.experiment=run", "run.resume=auto", *slow))
    assert "averaging starts here" in capsys.readouterr().out
    torch.testing.assert_close(final_weights(folder, "model_ema.safetensors"), weights, rtol=0, atol=1e-4)


def test_nan_losses_are_skipped_and_counted_then_end_the_run(tmp_path, monkeypatch):
    loss = Objective.loss
    calls, bad_calls = [], [2, 3]

    def sometimes_nan(self, logits, targets):
        calls.append(None)
        value = loss(self, logits, targets)
        return value * torch.nan if len(calls) in bad_calls else value

    monkeypatch.setattr(Objective, "loss", sometimes_nan)
    folder, _ = train.train(config(tmp_path, "run.experiment=some"))
    rows = list(csv.DictReader((folder / "summary.csv").open()))
    assert rows[-1]["skipped_updates"] == "2"
    assert all(tensor.isfinite().all() for tensor in final_weights(folder).values())
    bad_calls[:] = range(len(calls) + 2, 1000)
    with pytest.raises(trainer.DivergedError, match=r"4 losses or gradients in a row.*optimizer\.lr"):
        train.train(config(tmp_path, "run.experiment=all", "limits.nan_losses_in_a_row=3"))


def test_everything_wrong_is_said_before_anything_is_written(tmp_path):
    with pytest.raises(ConfigError) as error:
        train.train(config(tmp_path / "runs", "data.dataset=folder", "data.dir=/nonexistent", "optimizer.name=adamm"))
    assert "adamm" in str(error.value)
    with pytest.raises(ConfigError, match="nonexistent"):
        train.train(config(tmp_path / "runs", "data.dataset=folder", "data.dir=/nonexistent"))
    with pytest.raises(ConfigError, match=r"--set training\.total_batch_size=null"):
        train.train(config(tmp_path / "runs", "training.batch_size=2000", "training.total_batch_size=2000"))
    assert not (tmp_path / "runs").exists()


def test_a_finished_run_is_not_overwritten(tmp_path):
    train.train(config(tmp_path, "run.experiment=one", "training.epochs=1"))
    with pytest.raises(ConfigError, match="--resume auto"):
        train.train(config(tmp_path, "run.experiment=one", "training.epochs=1"))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "model.arguments={patch_size: 2, embed_dim: 64, num_heads: 2, depth: 1}",
            r"run\.resume: .* is of another model",
        ),
        ("training.epochs=1", r"training\.epochs: expected at least the 2 epochs that .* has done, got 1"),
        ("training.updates=3", r"training\.updates: expected at least the 10 updates that .* has done, got 3"),
    ],
)
def test_what_cannot_be_resumed_is_said_and_the_record_stays(tmp_path, override, message):
    folder, _ = train.train(config(tmp_path, "run.experiment=one"))
    record = {name: (folder / name).read_text() for name in ("args.yaml", "environment.json", "summary.csv")}
    with pytest.raises(ConfigError, match=message):
        train.train(config(tmp_path, f"run.resume={folder}", override))
    assert record == {name: (folder / name).read_text() for name in record}


def test_resuming_where_nothing_is_says_so(tmp_path, capsys):
    train.train(config(tmp_path, "run.experiment=new", "run.resume=auto", "training.epochs=1"))
    assert f"nothing to resume in {tmp_path / 'new'}" in capsys.readouterr().out.replace("\n", "")


def test_killed_at_any_moment_and_resumed_it_ends_in_the_same_bits(tmp_path):
    arguments = ["--set", "checkpoints.interval_steps=1", "--set", "training.epochs=3"]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    # In a process of its own as well: the number of threads decides the last bits. It starts from nothing, with hashes
    # of its own, and the others do not.
    subprocess.run(
        command(tmp_path, "--experiment", "whole", *arguments), check=True, stdout=subprocess.DEVNULL, timeout=300
    )
    for kill_after in (0.05, 0.3):
        process = warm.Popen(
            command(tmp_path, "--experiment", "parts", "--resume", "auto", *arguments), stdout=subprocess.DEVNULL
        )
        known = checkpoints(parts)
        deadline = time.monotonic() + 120
        while process.poll() is None and checkpoints(parts) == known and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(kill_after)
        process.kill()
        process.wait()
    warm.run(
        command(tmp_path, "--experiment", "parts", "--resume", "auto", *arguments),
        check=True, stdout=subprocess.DEVNULL, timeout=300,
    )  # fmt: skip
    assert_same_end(whole, parts)


def test_sigterm_ends_the_command_with_143_and_a_checkpoint(tmp_path):
    process = warm.Popen(
        command(tmp_path, "--experiment", "run", "--set", "training.epochs=500"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("update"):
            break
    process.terminate()
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 143, errors
    assert f"--resume {tmp_path / 'run'}" in errors
    assert list((tmp_path / "run" / "checkpoints").glob("step-*"))


def test_two_processes_under_torchrun_count_every_sample_once(tmp_path):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    arguments = command(tmp_path, "--experiment", "two", "--epochs", "1", "--set", "training.batch_size=64")[2:]
    done = subprocess.run([*torchrun, *arguments], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "of 360 images" in done.stdout
    assert "64 images × 2 devices × 2 accumulated" in done.stdout


def test_a_run_is_evaluated_and_speaks_in_class_names(tmp_path):
    folder, metrics = train.train(config(tmp_path, "run.experiment=run"))
    results = tmp_path / "results.json"
    arguments = ["eval", "--checkpoint", folder / "checkpoints" / "last", "--dataset", "digits", "--workers", "0"]
    done = CliRunner().invoke(app, [str(word) for word in (*arguments, "--results-file", results)])
    assert done.exit_code == 0, done.output
    figures = json.loads(results.read_text())
    assert (figures["top1"], figures["top5"], figures["count"]) == (metrics.top1, metrics.top5, 360)
    metadata = open_checkpoint(folder / "checkpoints" / "last" / "model.safetensors").metadata
    assert json.loads(metadata["class_names"]) == [str(digit) for digit in range(10)]


def test_the_command_says_what_is_wrong():
    for arguments, message in (
        (["train", "digts"], "did you mean digits"),
        (["train", "digits", "--epocs", "3"], "did you mean --epochs"),
        (["train", "digits", "--set", "optimizer.lrr=3"], "did you mean optimizer.lr"),
        (["train", "deit_tiny", "--data-dir", "/nonexistent"], "/nonexistent"),
        (["train", "digits", "--device", "cuda:7"], "no GPU here"),
        (["recipes", "show", "deit_tyni"], "deit_tiny"),
        (["eval", "--checkpoint", "/nonexistent.safetensors", "--dataset", "digits"], "/nonexistent.safetensors"),
    ):
        done = CliRunner().invoke(app, arguments)
        assert done.exit_code == 1, arguments
        assert message in done.output, done.output


def test_recipes_are_listed_and_shown():
    *lines, advice = CliRunner().invoke(app, ["recipes"]).output.splitlines()
    assert "inline train RECIPE" in advice
    tasks = ("classification", "detection", "segmentation")
    headers = [line.split() for line in lines if not line.startswith(" ")]
    results = [["top-1", "%"], [], []]  # no detector or segmenter has one yet
    assert headers == [[f"{task}:", "data", *result, "needs"] for task, result in zip(tasks, results, strict=True)]
    recipes = [recipe for task in tasks for recipe in list_recipes() if recipe.config.task.name == task]
    assert recipes[0].name == "digits"
    for line, recipe in zip([line for line in lines if line.startswith(" ")], recipes, strict=True):
        assert line.startswith(f"  {recipe.name} ")
        assert f"  {recipe.data}  " in line
        assert line.rstrip().endswith(recipe.command.removeprefix(f"inline train {recipe.name}").strip() or "–")
        assert recipe.expected is None or f" {recipe.expected:.1f} (paper) " in line
    narrow = CliRunner(env={"COLUMNS": "80"}).invoke(app, ["recipes"]).output
    assert max(map(len, narrow.splitlines())) <= 80
    assert narrow.count("--initial-checkpoint FILE") == sum(
        recipe.config.model.require_checkpoint for recipe in recipes
    )
    shown = CliRunner().invoke(app, ["recipes", "show", "digits"]).output
    assert from_yaml(shown) == get_recipe("digits").config
    for recipe in ([], ["digits"]):
        assert "--batch-size, -b VALUE" in CliRunner().invoke(app, ["train", *recipe, "--flags"]).output


def test_predict_takes_a_run(tmp_path):
    folder, _ = train.train(config(tmp_path, "run.experiment=run", "training.epochs=1"))
    Image.new("RGB", (20, 30), "white").save(tmp_path / "picture.png")
    weights = folder / "checkpoints" / "best" / "model.safetensors"
    done = CliRunner().invoke(app, ["predict", str(tmp_path / "picture.png"), "--checkpoint", str(weights)])
    assert done.exit_code == 0, done.output


def test_finetune_starts_with_the_model_of_the_checkpoint(tmp_path):
    arguments = {"img_size": 32, "in_chans": 1, "patch_size": 8, "depth": 2, "embed_dim": 24, "num_heads": 2}
    model = create_model("softmax_deit_tiny", num_classes=3, **arguments)
    save_pretrained(model, tmp_path / "hub")
    found = with_overrides(get_recipe("finetune").config, train.settings_of_start(tmp_path / "hub")).model
    assert (found.name, found.num_classes, found.drop_path) == ("softmax_deit_tiny", None, 0.1)
    assert found.model_arguments().items() >= arguments.items()
    torch.save(model.state_dict(), tmp_path / "bare.pth")
    assert train.settings_of_start(tmp_path / "bare.pth") == [], "it does not say which model it is of"


def test_a_run_is_a_local_dir(tmp_path):
    folder, _ = train.train(config(tmp_path, "run.experiment=run", "training.epochs=1"))
    expected = open_checkpoint(find_weights(folder)).weights
    for created in (create_model(f"local-dir:{folder}", pretrained=True), from_pretrained(folder / "checkpoints")):
        weights = created.state_dict()
        assert weights.keys() == expected.keys()
        assert all(torch.equal(weights[name], value) for name, value in expected.items())
    with pytest.raises(CheckpointError, match=r"name a run of `inline train`, a checkpoint of it, or a file"):
        create_model(f"local-dir:{tmp_path}", pretrained=True)


def test_a_run_without_a_best_checkpoint_names_its_last(tmp_path, monkeypatch):
    save = trainer.Trainer.save
    monkeypatch.setattr(trainer.Trainer, "save", lambda self, metric=None: save(self))
    done = CliRunner().invoke(app, command(tmp_path, "--experiment", "run", "--set", "training.epochs=1")[3:])
    assert done.exit_code == 0, done.output
    run, place = tmp_path / "run", Path("checkpoints", "last", "model.safetensors")
    assert f"Last weights written to {run / place}: " in done.output
    assert find_weights(run) == find_weights(run / "checkpoints") == run / place
    with pytest.raises(CheckpointError, match="a folder without averaged weights"):
        find_weights(run, averaged=True)


def test_a_run_that_saved_nothing_says_so(tmp_path):
    done = CliRunner().invoke(app, command(tmp_path, "--set", "training.epochs=0")[3:])
    assert done.exit_code == 0, done.output
    assert "No weights were saved in" in done.output
    assert "Best weights" not in done.output


def test_a_run_starts_from_the_weights_of_another(tmp_path):
    first, _ = train.train(config(tmp_path, "run.experiment=first", "training.epochs=1"))
    still = ["--set", "optimizer.lr=0", "--set", "schedule.min_lr=0", "--set", "training.epochs=1"]
    arguments = command(tmp_path, "--experiment", "second", *still, "--initial-checkpoint", str(first))[3:]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    before, after = load_file(first / "checkpoints" / "best" / "model.safetensors"), final_weights(tmp_path / "second")
    assert all(torch.equal(before[name], after[name]) for name in after)
    wrong = CliRunner().invoke(app, command(tmp_path, "--initial-checkpoint", str(tmp_path))[3:])
    assert wrong.exit_code == 1
    assert "is a folder without weights" in wrong.output


def test_curves_reach_weights_and_biases_and_tensorboard(tmp_path, monkeypatch):
    logged, finished = [], []
    run = SimpleNamespace(log=lambda values, step: logged.append((step, values)), finish=lambda: finished.append(True))
    started = []
    fake = SimpleNamespace(init=lambda **options: started.append(options) or run)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    extra = ["logging.wandb=true", "logging.tensorboard=true", "logging.interval=2", "training.epochs=1"]
    folder, metrics = train.train(config(tmp_path, "run.experiment=curves", *extra))
    assert started[0]["name"] == "curves"
    assert started[0]["config"]["training"]["epochs"] == 1
    assert [step for step, _ in logged] == [2, 4, 5]
    assert logged[-1][1]["epoch/top1"] == metrics.top1
    assert finished
    if importlib.util.find_spec("tensorboard") is not None:
        assert list((folder / "tensorboard").iterdir())


def test_weights_and_biases_must_be_installed_to_be_asked_for(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match=rf"logging\.wandb.*{re.escape(install_command('wandb'))}"):
        train.train(config(tmp_path, "logging.wandb=true"))


def test_fine_tuning_keeps_the_body_and_starts_a_head_anew(tmp_path):
    first, _ = train.train(config(tmp_path, "run.experiment=first", "training.epochs=1"))
    pictures = tmp_path / "pictures"
    for split in ("train", "val"):
        for name, colour in (("dark", 20), ("light", 230)):
            (pictures / split / name).mkdir(parents=True)
            for number in range(8):
                Image.new("RGB", (8, 8), (colour + number,) * 3).save(pictures / split / name / f"{number}.png")
    weights = first / "checkpoints" / "last" / "model.safetensors"
    folder, metrics = train.train(
        config(
            tmp_path, "run.experiment=second", f"model.initial_checkpoint={weights}", "model.num_classes=null",
            "data.dataset=folder", f"data.dir={pictures}", "training.total_batch_size=4", "training.epochs=0",
        )
    )  # fmt: skip
    assert metrics is None
    folder, metrics = train.train(
        config(
            tmp_path, "run.experiment=third", f"model.initial_checkpoint={weights}", "model.num_classes=null",
            "data.dataset=folder", f"data.dir={pictures}", "training.total_batch_size=4", "optimizer.lr=0",
            "schedule.min_lr=0",
        )
    )  # fmt: skip
    assert metrics.count == 16
    before, after = load_file(weights), final_weights(folder)
    assert after["head.weight"].shape[0] == 2
    assert all(torch.equal(before[name], after[name]) for name in after if not name.startswith("head."))


def test_a_killed_data_worker_is_named_and_ends_the_run(tmp_path):
    extra = [word for setting in [*ELABORATE, "training.epochs=500"] for word in ("--set", setting)]
    process = warm.Popen(
        command(tmp_path, "--experiment", "run", *extra), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("update"):
            break
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    workers = [child for child in children if "tracker" not in Path(f"/proc/{child}/cmdline").read_text()]
    os.kill(int(workers[0]), signal.SIGKILL)
    _, errors = process.communicate(timeout=240)
    assert process.returncode == 1, errors
    assert "process that prepares images died" in errors


# What torchrun does, with processes that are forked: they start at once, the first time and again.
TORCHRUN = """
import sys
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from inline_attention.__main__ import main
import inline_attention.engine.train

def work(*arguments):
    sys.argv = ["inline", *arguments]
    main()

config = LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=2, max_restarts=1, start_method="fork",
                      rdzv_backend="c10d", rdzv_endpoint="localhost:0", run_id="test", monitor_interval=0.1)
elastic_launch(config, work)(*sys.argv[1:])
"""


def test_a_killed_process_is_restarted_by_torchrun_and_the_run_resumes(tmp_path):
    settings = ["training.epochs=12", "checkpoints.interval_steps=2", "training.batch_size=128"]
    extra = [word for setting in settings for word in ("--set", setting)]
    arguments = command(tmp_path, "--experiment", "run", "--resume", "auto", *extra)[3:]
    process = warm.Popen(
        [sys.executable, "-c", TORCHRUN, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 120
    while not checkpoints(tmp_path / "run") and time.monotonic() < deadline:
        time.sleep(0.02)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(children[-1]), signal.SIGKILL)
    output, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors[-3000:]
    assert "resumed from" in output
    assert "of 360 images" in output
    assert len(list(csv.DictReader((tmp_path / "run" / "summary.csv").open()))) == 12
