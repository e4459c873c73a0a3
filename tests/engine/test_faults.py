"""What a run answers when its disk, its data or its checkpoints fail it: a clear error, and nothing lost."""

import os
import shutil
import signal
import tempfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from engine import commands
from engine.runs import TINY, assert_same_end, checkpoints, config, from_files
from engine.saving import Child
from inline_attention.data.broken import BrokenImagesError
from inline_attention.engine import train
from inline_attention.engine.checkpoints import CheckpointStore
from inline_attention.engine.config import ConfigError
from inline_attention.engine.interruption import InterruptedBySignalError
from inline_attention.engine.reporting import RunReport
from inline_attention.models.checkpoints import CheckpointError
from inline_attention.support.files import free_bytes


def train_without(denied, output, *arguments):
    """Exit code and output of `inline train digits` where something is denied."""
    settings = [word for setting in TINY for word in ("--set", setting)]
    command = ["train", "digits", "--output", str(output), "--experiment", "run", *settings, *map(str, arguments)]
    (result,) = Child(commands.run_command, command, denied).received()
    return result


def test_a_full_disk_ends_the_run_and_keeps_what_was_saved(tmp_path):
    folder, _ = train.train(config(tmp_path, "run.experiment=run", "training.epochs=1"))
    before = checkpoints(folder)
    code, output = train_without("large files", tmp_path, "--resume", "auto")
    assert (code, "Traceback" in output) == (1, False)
    assert "could not be written" in output
    assert "Checkpoints from before are as they were" in output
    assert checkpoints(folder) == before
    # With room again, it goes on from there.
    assert CheckpointStore(folder / "checkpoints").latest_valid().epoch == 1
    train.train(config(tmp_path, "run.experiment=run", "run.resume=auto"))
    assert len((folder / "summary.csv").read_text().splitlines()) == 1 + 2


def test_not_even_a_table_fits_on_the_disk(tmp_path):
    code, output = train_without("files", tmp_path)
    assert code == 1
    assert "Traceback" not in output
    assert "File too large" in output
    assert "make room" in output


def test_a_folder_that_may_not_be_written_is_refused_before_anything_is_trained():
    with tempfile.TemporaryDirectory() as outer:
        os.chmod(outer, 0o555)
        if os.geteuid() == 0:
            code, output = train_without("root", outer)
        else:
            code, output = train_without("nothing", outer)
        assert code == 1
        assert "--output (run.output): may not write to" in output
        assert "--output" in output
        assert not list(Path(outer).iterdir())


def test_a_file_in_the_folder_s_place_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"run\.output: expected a folder, but .*file is a file"):
        train.train(config(tmp_path / "file", "run.experiment=run"))


def test_too_small_a_disk_is_refused_before_anything_is_trained(tmp_path, monkeypatch):
    monkeypatch.setattr("inline_attention.engine.run_folder.free_bytes", lambda path: 100_000)
    assert free_bytes(tmp_path) != 100_000
    with pytest.raises(ConfigError, match=r"run\.output: .* has 0 MB free, the run's checkpoints will take"):
        train.train(config(tmp_path / "runs", "checkpoints.keep_last=50"))
    assert not (tmp_path / "runs").exists()


def test_a_signal_while_it_saves_changes_nothing(tmp_path, monkeypatch):
    whole, _ = train.train(config(tmp_path, "run.experiment=whole"))
    save, update_done, sent = torch.save, RunReport.update_done, []

    def tell():
        sent.append(None)
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(RunReport, "update_done", lambda self, *facts: (update_done(self, *facts), sent or tell()))
    monkeypatch.setattr(torch, "save", lambda *content: (tell(), save(*content), tell()))
    with pytest.raises(InterruptedBySignalError) as stopped:
        train.train(config(tmp_path, "run.experiment=parts"))
    monkeypatch.undo()
    assert (stopped.value.exit_code, len(sent)) == (143, 3)
    parts, _ = train.train(config(tmp_path, "run.experiment=parts", "run.resume=auto"))
    assert_same_end(whole, parts)


def test_a_run_whose_data_vanish_ends_with_a_count_and_resumes_when_they_return(tmp_path, pictures, monkeypatch):
    # Sixteen batches per epoch: the dataloader reads a few ahead, and must not have read all when the data vanish.
    batches = ["training.batch_size=4", "training.total_batch_size=4"]
    whole, _ = train.train(from_files(tmp_path, pictures, "whole", *batches))
    update_done = RunReport.update_done

    def unplug(self, update, *facts):
        update_done(self, update, *facts)
        if update == 17:  # the first of the second epoch
            pictures.rename(tmp_path / "elsewhere")

    monkeypatch.setattr(RunReport, "update_done", unplug)
    with pytest.raises(BrokenImagesError, match=r"of 64 images cannot be read(?s:.*)No such file"):
        train.train(from_files(tmp_path, pictures, "parts", *batches))
    monkeypatch.undo()
    assert "No such file" in (tmp_path / "parts" / "broken_images.csv").read_text()
    with pytest.raises(ConfigError, match="does not exist"):
        train.train(from_files(tmp_path, pictures, "parts", "run.resume=auto", *batches))
    (tmp_path / "elsewhere").rename(pictures)
    parts, _ = train.train(from_files(tmp_path, pictures, "parts", "run.resume=auto", *batches))
    assert_same_end(whole, parts)


def test_broken_pictures_met_before_a_stop_are_still_known_after_it(tmp_path, pictures, monkeypatch):
    spoiled = sorted(pictures.rglob("*.png"))[::12]
    for path in spoiled:
        path.write_bytes(path.read_bytes()[:60])
    allowed = ["limits.broken_image_share=0.5"]
    whole, _ = train.train(from_files(tmp_path, pictures, "whole", *allowed))
    update_done = RunReport.update_done

    def stop(self, update, *facts):
        update_done(self, update, *facts)
        if update == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(RunReport, "update_done", stop)
    with pytest.raises(InterruptedBySignalError):
        train.train(from_files(tmp_path, pictures, "parts", *allowed))
    monkeypatch.undo()
    parts, _ = train.train(from_files(tmp_path, pictures, "parts", "run.resume=auto", *allowed))
    assert_same_end(whole, parts)
    lists = [sorted((run / "broken_images.csv").read_text().splitlines()) for run in (whole, parts)]
    assert lists[0] == lists[1]
    assert len(lists[0]) == 1 + len(spoiled)


def test_all_pictures_broken_is_said_before_the_first_update(tmp_path, pictures):
    for path in pictures.rglob("*.png"):
        path.write_bytes(b"no picture")
    with pytest.raises(ConfigError, match="none of 16 images tried can be read"):
        train.train(from_files(tmp_path / "runs", pictures, "run"))
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "val" / "3").rename(folder / "val" / "three"), "not in"),
        (lambda folder: (folder / "train" / "none").mkdir(), "1 empty class"),
        (lambda folder: shutil.rmtree(folder / "val"), "none for the split"),
    ],
    ids=["another_class", "empty_class", "no_validation"],
)
def test_wrong_data_are_said_before_the_first_update(tmp_path, pictures, damage, message):
    damage(pictures)
    with pytest.raises(ConfigError, match=message):
        train.train(from_files(tmp_path / "runs", pictures, "run", "model.num_classes=null"))
    assert not (tmp_path / "runs").exists()


def test_another_number_of_classes_is_said_before_the_first_update(tmp_path):
    with pytest.raises(ConfigError, match="has 10 classes, the model 7; leave --num-classes out"):
        train.train(config(tmp_path / "runs", "model.num_classes=7"))


def test_a_checkpoint_that_is_named_must_be_whole(tmp_path):
    folder, _ = train.train(config(tmp_path, "run.experiment=run", "training.epochs=1"))
    (checkpoint,) = (folder / "checkpoints").glob("step-*")
    weights = checkpoint / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"model\.safetensors is damaged: its contents do not match"):
        train.train(config(tmp_path, f"run.resume={checkpoint}"))


@pytest.mark.parametrize(
    ("weights", "message"),
    [({"blocks.0.other": torch.ones(3)}, r"blocks\.0\.other"), ({"head.weight": torch.ones(10, 7)}, r"head\.weight")],
    ids=["names", "shapes"],
)
def test_weights_that_do_not_fit_are_refused_before_anything_is_written(tmp_path, weights, message):
    save_file(weights, tmp_path / "foreign.safetensors")
    with pytest.raises(CheckpointError, match=message):
        train.train(config(tmp_path / "runs", f"model.initial_checkpoint={tmp_path / 'foreign.safetensors'}"))
    assert not (tmp_path / "runs").exists()


class Attack:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return (open, (self.path, "w"))


def test_nothing_in_foreign_weights_is_run(tmp_path):
    torch.save({"model": Attack(tmp_path / "attacked")}, tmp_path / "foreign.pth")
    with pytest.raises(CheckpointError, match=r"foreign\.pth"):
        train.train(config(tmp_path / "runs", f"model.initial_checkpoint={tmp_path / 'foreign.pth'}"))
    assert not (tmp_path / "attacked").exists()


def damage_all(folder):
    for state in folder.glob("checkpoints/step-*/state.pt"):
        state.write_bytes(state.read_bytes()[:-1])


def test_nothing_is_overwritten_if_every_checkpoint_is_damaged(tmp_path):
    folder, _ = train.train(config(tmp_path, "run.experiment=run", "training.epochs=1"))
    damage_all(folder)
    summary, names = (folder / "summary.csv").read_text(), checkpoints(folder)
    for resumed in ("auto", folder, folder / "checkpoints"):
        with pytest.raises(ConfigError, match=r"run\.resume: none of the 1 checkpoints in .* is intact"):
            train.train(config(tmp_path, "run.experiment=run", f"run.resume={resumed}"))
    assert ((folder / "summary.csv").read_text(), checkpoints(folder)) == (summary, names)
    # Told to, the run starts from zero, and what was there is set aside.
    anew = ["run.experiment=run", "run.resume=auto", "run.start_anew=true"]
    train.train(config(tmp_path, *anew, "training.epochs=1"))
    assert (folder / "previous-1" / "summary.csv").read_text() == summary
    assert checkpoints(folder / "previous-1") == names
    # And goes on from there, whatever it was told: torchrun restarts with the same command.
    train.train(config(tmp_path, *anew))
    assert len((folder / "summary.csv").read_text().splitlines()) == 1 + 2
    assert not (folder / "previous-2").exists()


def test_start_anew_sets_aside_what_is_there(tmp_path):
    folder, _ = train.train(config(tmp_path, "run.experiment=run", "training.epochs=1"))
    with pytest.raises(ConfigError, match=r"holds checkpoints already; .*--start-anew"):
        train.train(config(tmp_path, "run.experiment=run"))
    train.train(config(tmp_path, "run.experiment=run", "run.start_anew=true"))
    assert len((folder / "summary.csv").read_text().splitlines()) == 1 + 2
    assert checkpoints(folder / "previous-1") == {"step-00000005"}


@pytest.mark.parametrize("resumed", ["auto", "null"])
def test_a_table_without_its_checkpoints_is_not_overwritten(tmp_path, resumed):
    folder, _ = train.train(config(tmp_path, "run.experiment=run", "training.epochs=1"))
    summary = (folder / "summary.csv").read_text()
    shutil.rmtree(folder / "checkpoints")
    train.train(config(tmp_path, "run.experiment=run", f"run.resume={resumed}"))
    assert (folder / "previous-1" / "summary.csv").read_text() == summary
    assert len((folder / "summary.csv").read_text().splitlines()) == 1 + 2


def test_a_fifo_in_place_of_the_lock_of_checkpoints_is_found_before_the_first_update(tmp_path):
    folder, _ = train.train(config(tmp_path, "run.experiment=run", "training.epochs=1"))
    summary = (folder / "summary.csv").read_text()
    (folder / "checkpoints" / ".lock").unlink()
    os.mkfifo(folder / "checkpoints" / ".lock")
    with pytest.raises(ConfigError, match="not a regular file"):
        train.train(config(tmp_path, "run.experiment=run", "run.resume=auto"))
    assert (folder / "summary.csv").read_text() == summary


@pytest.mark.parametrize("mode", [0o000, 0o444, 0o555], ids=["unreadable", "unsearchable", "unwritable"])
def test_checkpoints_that_may_not_be_read_or_written_are_found_before_the_first_update(mode):
    with tempfile.TemporaryDirectory() as outer:
        folder, _ = train.train(config(Path(outer), "run.experiment=run", "training.epochs=1"))
        summary = (folder / "summary.csv").read_text()
        for path in (Path(outer), *Path(outer).rglob("*")):
            if not path.is_symlink():
                os.chmod(path, 0o777 if path.is_dir() else 0o666)
        os.chmod(folder / "checkpoints", mode)
        denied = "root" if os.geteuid() == 0 else "nothing"
        code, output = train_without(denied, outer, "--resume", "auto", "--epochs", "3")
        os.chmod(folder / "checkpoints", 0o777)
        assert (code, "Traceback" in output) == (1, False), output
        assert "checkpoints" in output
        assert "Permission denied" in output
        assert (folder / "summary.csv").read_text() == summary


@pytest.mark.parametrize("folder", ["checkpoints", "tensorboard", "wandb"])
def test_a_link_or_a_file_in_place_of_a_folder_is_found_before_the_first_update(tmp_path, folder):
    for name in ("link", "file"):
        (tmp_path / name).mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "link" / folder).symlink_to(tmp_path / "elsewhere")
    (tmp_path / "file" / folder).write_text("")
    for name in ("link", "file"):
        with pytest.raises(ConfigError, match=f"{folder} cannot be written"):
            train.train(config(tmp_path, f"run.experiment={name}"))
        assert os.listdir(tmp_path / name) == [folder]
    assert not os.listdir(tmp_path / "elsewhere")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state["position"].update(epoch=-5), "epoch is impossible"),
        (lambda state: state["position"].update(updates=10**30), "updates is impossible"),
        (lambda state: state["position"].update(loss_sum=float("nan")), "loss_sum is impossible"),
        (lambda state: state["position"].update(rows=[3]), "rows is impossible"),
        (lambda state: state["position"].update(epoch=7), "not the manifest's"),
        (lambda state: state["position"].update(unknown=1), "TypeError"),
        (lambda state: state.pop("broken"), "KeyError"),
        (lambda state: state.update(generators=[{"cpu": torch.zeros(3)}]), "cannot be resumed"),
        (lambda state: state.update(generators=3), "cannot be resumed"),
        (lambda state: state.update(optimizer={"state": {}, "param_groups": []}), "cannot be resumed"),
        (lambda state: state.update(optimizer=[]), "cannot be resumed"),
        (lambda state: state.update(deal={}), "cannot be resumed"),
    ],
)
def test_a_forged_state_is_refused_in_a_sentence(tmp_path, change, message):
    folder, _ = train.train(config(tmp_path, "run.experiment=run", "training.epochs=1"))
    store = CheckpointStore(folder / "checkpoints")
    last = store.latest_valid()
    loaded = last.load()
    change(loaded.state)
    store.save(step=last.step, epoch=last.epoch, weights=loaded.weights, state=loaded.state, metadata=loaded.metadata)
    with pytest.raises(CheckpointError, match=message) as refused:
        train.train(config(tmp_path, "run.experiment=run", "run.resume=auto"))
    assert "\n" not in str(refused.value)


def test_names_that_are_not_utf8_are_refused_in_a_sentence(tmp_path):
    with pytest.raises(ConfigError, match=r"run\.experiment: expected a name in UTF-8.*\\udcff"):
        train.train(config(tmp_path, "run.experiment=a\udcff"))
    with pytest.raises(ConfigError, match=r"run\.experiment: expected text without NUL"):
        train.train(config(tmp_path, "run.experiment=a\0b"))
    assert not list(tmp_path.iterdir())
