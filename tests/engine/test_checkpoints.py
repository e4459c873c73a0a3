"""Checkpoints that survive: kills at every moment, damage of every kind, full and forbidden disks, races."""

import hashlib
import json
import logging
import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from engine import saving
from engine.saving import Child, assert_holds, save
from inline_attention.engine import checkpoint_format, checkpoints
from inline_attention.engine.checkpoints import (
    CheckpointError,
    CheckpointStore,
    CheckpointWriteError,
    open_training_checkpoint,
)
from inline_attention.models import create_model, load_checkpoint
from inline_attention.models.reading import UnsafeCheckpointError
from inline_attention.support import files
from inline_attention.support.files import UNFINISHED
from inline_attention.tasks.classification import ImageClassifier

FILES = ("manifest.json", "model.safetensors", "model_ema.safetensors", "state.pt")


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "run" / "checkpoints"


@pytest.fixture
def store(folder):
    return CheckpointStore(folder, keep_last=2, keep_best=1)


@pytest.fixture
def skipped(caplog):
    """The warnings so far."""
    caplog.set_level(logging.WARNING)
    return lambda: [record.getMessage() for record in caplog.records]


def names(folder):
    """Names of all that is there but the lock."""
    return {path.name for path in folder.iterdir()} - {files.LOCK_FILE}


# Saving and finding


def test_what_is_saved_is_loaded(store, folder, skipped):
    assert store.latest_valid() is None
    assert store.best() is None
    saved = save(store, 12, metric=0.5)
    assert saved.path == folder / "step-00000012"
    assert names(saved.path) == set(FILES)
    found = store.latest_valid()
    assert found == saved
    assert (found.step, found.epoch, found.metric, found.model) == (12, 1, 0.5, "inline_deit_tiny")
    assert found.load().metadata["model"] == "inline_deit_tiny"
    assert_holds(found, 12)
    assert not skipped()


def test_averaged_weights_are_optional(store):
    saved = save(store, 1, ema_weights=None)
    assert names(saved.path) == set(FILES) - {"model_ema.safetensors"}
    assert saved.load().ema_weights is None


def test_numbers_may_be_of_numpy_or_torch(store):
    saved = save(store, 1, epoch=np.int64(3), metric=torch.tensor(0.25))
    assert (saved.epoch, saved.metric) == (3, 0.25)
    assert json.loads((saved.path / "manifest.json").read_text())["epoch"] == 3


def test_weights_are_read_by_everything_that_reads_weights(store):
    model = create_model("inline_deit_tiny", num_classes=3, depth=1)
    wrapped = {f"module._orig_mod.{name}": value for name, value in model.state_dict().items()}
    notes = {"model": "inline_deit_tiny", "class_names": json.dumps(["ant", "bee", "cat"])}
    halves = {name: value / 2 for name, value in model.state_dict().items()}
    saved = store.save(step=1, epoch=0, weights=wrapped, ema_weights=halves, state={}, metadata=notes)
    other = create_model("inline_deit_tiny", num_classes=3, depth=1)
    load_checkpoint(other, saved.path / "model.safetensors")
    assert torch.equal(other.head.weight, model.head.weight)
    load_checkpoint(other, store.folder / "last" / "model_ema.safetensors")
    assert torch.equal(other.head.weight, model.head.weight / 2)
    timm_made = create_model(
        "inline_deit_tiny", num_classes=3, depth=1, checkpoint_path=str(saved.path / "model.safetensors")
    )
    assert torch.equal(timm_made.head.weight, model.head.weight)


def test_prediction_knows_model_and_class_names(store):
    model = create_model("inline_deit_tiny", num_classes=3)
    notes = {"model": "inline_deit_tiny", "class_names": json.dumps(["ant", "bee", "cat"])}
    store.save(step=1, epoch=0, weights=model.state_dict(), state={}, metric=0.1, metadata=notes)
    classifier = ImageClassifier.from_checkpoint(store.folder / "best" / "model.safetensors", device="cpu")
    assert classifier.class_names == ["ant", "bee", "cat"]


def test_saving_a_step_again_replaces_it(store, folder, skipped):
    save(store, 5, metric=0.9)
    for metric in (0.1, 0.2, 0.3):
        saved = save(store, 5, metric=metric)
        steps = [path for path in folder.iterdir() if path.name.startswith("step-")]
        assert [path for path in steps if not path.is_symlink()] == [saved.path]
        assert store.latest_valid().metric == metric
        assert store.best().metric == metric
        assert (folder / "last").resolve() == saved.path
    assert not skipped()


def test_after_going_back_the_newest_is_what_was_saved_last(store):
    for step in (100, 200, 300):
        save(store, step)
    assert save(store, 150).path.exists()
    assert_holds(store.latest_valid(), 150)


def test_the_state_takes_plain_data_only(store):
    save(store, 1)
    with pytest.raises(TypeError, match=r"state\['rng'\]\['numpy'\]\[1\] is a numpy.ndarray"):
        save(store, 2, state={"rng": {"numpy": np.random.RandomState(0).get_state()}})
    with pytest.raises(CheckpointError, match="expected named dense tensors"):
        save(store, 2, weights={"name": "a string"})
    assert names(store.folder) == {"step-00000001", "last"}


@pytest.mark.parametrize(("keep_last", "keep_best"), [(0, 1), (1, -1)])
def test_senseless_counts_are_refused(folder, keep_last, keep_best):
    with pytest.raises(ValueError, match=f"keep_last={keep_last}, keep_best={keep_best}"):
        CheckpointStore(folder, keep_last=keep_last, keep_best=keep_best)


# Keeping


def kept_steps(folder):
    return sorted(int(path.name.split("-")[1]) for path in folder.glob("step-*"))


def test_the_newest_and_the_best_are_kept(folder):
    store = CheckpointStore(folder, keep_last=2, keep_best=2)
    for step, metric in enumerate([0.1, 0.9, 0.3, 0.8, 0.2, 0.0, None]):
        save(store, step, metric=metric)
    assert kept_steps(folder) == [1, 3, 5, 6]
    assert_holds(store.best(), 1)
    assert os.readlink(folder / "best") == "step-00000001"
    assert os.readlink(folder / "last") == "step-00000006"


def test_a_lower_metric_may_be_better(folder):
    store = CheckpointStore(folder, keep_last=1, higher_is_better=False)
    for step, loss in enumerate([2.0, 1.0, 1.0, 3.0, float("-inf")]):
        save(store, step, metric=loss)
    assert kept_steps(folder) == [1, 4]  # of equals the earlier
    assert store.best().step == 1


def test_without_keeping_the_best_there_is_no_pointer_to_it(folder):
    store = CheckpointStore(folder, keep_last=1, keep_best=0)
    save(store, 1, metric=0.5)
    save(store, 2, metric=0.1)
    assert names(folder) == {"step-00000002", "last"}


@pytest.mark.parametrize("not_finite", [float("nan"), float("inf")])
def test_a_metric_that_is_not_finite_is_never_best(store, folder, not_finite):
    assert str(save(store, 0, metric=not_finite).metric) == str(not_finite)
    assert store.best() is None
    assert not (folder / "best").exists()
    save(store, 1, metric=0.1)
    save(store, 2, metric=not_finite)
    assert store.best().step == 1
    assert str(store.latest_valid().metric) == str(not_finite)
    save(store, 1, metric=not_finite)
    assert store.best() is None
    assert not os.path.lexists(folder / "best")


def test_damaged_ones_do_not_count_among_those_kept(store, folder, skipped):
    save(store, 1)
    save(store, 2)
    (save(store, 3).path / "state.pt").unlink()
    save(store, 4)
    assert kept_steps(folder) == [2, 3, 4]
    save(store, 3)
    assert kept_steps(folder) == [3, 4]
    assert_holds(store.latest_valid(), 3)
    assert not skipped()


# Pointers


def test_pointers_are_text_where_there_are_no_links(store, folder, monkeypatch):
    def refuse(self, target):
        raise OSError("no links here")

    monkeypatch.setattr(Path, "symlink_to", refuse)
    save(store, 1, metric=0.5)
    save(store, 2, metric=0.1)
    assert (folder / "best").read_text() == "step-00000001\n"
    assert_holds(open_training_checkpoint(folder / "best"), 1)
    assert_holds(open_training_checkpoint(folder / "last"), 2)


def test_pointers_can_be_opened_and_moved(store, folder, tmp_path):
    save(store, 1, metric=0.5)
    save(store, 2, metric=0.1)
    folder.rename(tmp_path / "moved")
    assert_holds(open_training_checkpoint(tmp_path / "moved" / "best"), 1)
    assert_holds(open_training_checkpoint(tmp_path / "moved" / "last"), 2)


def test_something_else_in_the_pointers_place_stops_neither_saving_nor_pruning(store, folder, skipped):
    (folder / "last" / "mine").mkdir(parents=True)
    for step in range(4):
        save(store, step)
    assert kept_steps(folder) == [2, 3]
    assert "step-00000003 was saved, but" in skipped()[-1]
    assert (folder / "last" / "mine").exists()


@pytest.mark.parametrize("content", ["", "nonsense", "../..", "x" * 300])
def test_what_is_no_checkpoint_says_so(tmp_path, content):
    (tmp_path / "last").write_text(content)
    for path in (tmp_path / "last", tmp_path, tmp_path / "absent"):
        with pytest.raises(CheckpointError, match="is no complete checkpoint"):
            open_training_checkpoint(path)


# Damage


def flip(path, position):
    content = bytearray(path.read_bytes())
    content[position] ^= 0x10
    path.write_bytes(content)


def damages():
    for name in FILES:
        yield pytest.param(name, lambda path: path.unlink(), id=f"{name} deleted")
        yield pytest.param(name, lambda path: path.write_bytes(b""), id=f"{name} emptied")
        yield pytest.param(name, lambda path: os.truncate(path, path.stat().st_size - 1), id=f"{name} truncated")
        yield pytest.param(name, lambda path: os.truncate(path, path.stat().st_size // 2), id=f"{name} halved")
        yield pytest.param(name, lambda path: path.write_bytes(bytes(path.stat().st_size)), id=f"{name} zeroed")
        for part in (0.0, 0.01, 0.3, 0.7, 1.0):
            yield pytest.param(
                name,
                lambda path, part=part: flip(path, int(part * (path.stat().st_size - 1))),
                id=f"{name} flipped at {part:.0%}",
            )


@pytest.mark.parametrize(("name", "damage"), list(damages()))
def test_a_damaged_checkpoint_is_named_and_the_one_before_taken(store, skipped, name, damage):
    save(store, 1, metric=0.1)
    damaged = save(store, 2, metric=0.9)
    damage(damaged.path / name)
    for found in (store.latest_valid(), store.best()):
        assert_holds(found, 1)
        (message,) = skipped()[-1:]
        assert str(damaged.path) in message
        assert name in message or name == "manifest.json"
    with pytest.raises(CheckpointError, match=name):
        open_training_checkpoint(damaged.path).load()


def test_a_manifest_cannot_be_altered_anywhere(store):
    manifest = save(store, 1).path / "manifest.json"
    original = manifest.read_bytes()
    for position in range(0, len(original), 7):
        flip(manifest, position)
        with pytest.raises(CheckpointError, match=r"manifest\.json is damaged|has the format"):
            open_training_checkpoint(manifest.parent)
        manifest.write_bytes(original)
    assert_holds(open_training_checkpoint(manifest.parent), 1)


def test_all_damaged_is_none(store, skipped):
    for step in (1, 2):
        flip(save(store, step).path / "state.pt", 500)
    assert store.latest_valid() is None
    assert len(skipped()) == 2


def test_a_later_format_is_refused_with_advice(store, skipped):
    saved = save(store, 1)
    manifest = saved.path / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"format": 1', '"format": 2'))
    assert store.latest_valid() is None
    assert "has the format 2, expected 1 or less; install" in skipped()[0]


class Attack:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return (open, (self.path, "w"))


def test_nothing_in_a_state_is_run(folder, tmp_path, monkeypatch):
    """Not even with a manifest made for it."""
    monkeypatch.setattr(checkpoints, "plain_copy", lambda value, name: {"harmless": Attack(tmp_path / "attacked")})
    monkeypatch.setattr(checkpoints, "tensor_bytes", lambda value: 0)
    saved = save(CheckpointStore(folder), 1)
    saved.verify()
    with pytest.raises(UnsafeCheckpointError, match=r"state\.pt asks for more than plain data.*nothing in it was run"):
        saved.load()
    assert not (tmp_path / "attacked").exists()


# Kills


@pytest.mark.slow
def test_kills_at_random_moments_lose_nothing(folder, skipped):
    chance = random.Random(0)
    store = CheckpointStore(folder)
    acknowledged = -1
    mid_save = 0
    for _ in range(40):
        child = Child(saving.save_for_ever, folder, acknowledged + 1)
        assert child.receive() == "ready"
        time.sleep(chance.uniform(0, 0.08))
        child.kill()
        steps = child.received()
        mid_save += any(name.startswith(UNFINISHED) for name in names(folder)) if folder.exists() else 0
        found = store.latest_valid()
        step = -1 if found is None else found.step
        assert step >= max(steps, default=acknowledged)
        assert step >= acknowledged
        if found is not None:
            assert_holds(found, step)
            assert_holds(open_training_checkpoint(folder / "last"), open_training_checkpoint(folder / "last").step)
        acknowledged = step
    assert acknowledged > 0
    assert mid_save > 0
    assert not skipped()
    save(store, acknowledged + 1)
    assert not any(name.startswith(UNFINISHED) for name in names(folder))


@pytest.mark.parametrize("second", [1, 2], ids=["the same step again", "the next step"])
def test_a_kill_at_any_step_of_a_save_leaves_old_or_new(folder, skipped, second):
    store = CheckpointStore(folder, keep_last=1)
    outcomes = []
    for number in range(1, 100):
        shutil.rmtree(folder, ignore_errors=True)
        save(store, 1, metric=0.5)
        if Child(saving.save_and_die_at_call, folder, second, number).received() == ["survived"]:
            break
        found = store.latest_valid()
        assert_holds(found, found.step)
        outcomes.append(found.sequence)
        assert_holds(open_training_checkpoint(folder / "last"), open_training_checkpoint(folder / "last").step)
        store.best().verify()
        save(store, 3, metric=9.0)
        assert names(folder) == {"step-00000003", "last", "best"}
        assert_holds(store.latest_valid(), 3)
    else:
        pytest.fail("the child never survived")
    assert outcomes == sorted(outcomes)  # once the new one is there it stays
    assert set(outcomes) == {1, 2}
    assert len(outcomes) > 12
    assert not skipped()


# Disks that refuse


def assert_clear(error, folder):
    assert isinstance(error, CheckpointWriteError)
    assert str(folder) in str(error)
    assert error.needed > 64 * 256 * 4 * 3
    for part in ("could not be written", "MB are free", "as they were", "Free some space"):
        assert part in str(error)


@pytest.mark.parametrize("limit", [0, 100, 30_000, 66_900])
def test_a_file_that_cannot_grow_is_a_clear_error(store, folder, limit):
    save(store, 1)
    save(store, 2)
    before = names(folder)
    (error,) = Child(saving.save_with_file_limit, folder, 3, limit).received()
    assert_clear(error, folder)
    assert "too large" in str(error)
    assert names(folder) == before
    assert_holds(store.latest_valid(), 2)


def test_too_little_space_is_found_out_before_writing(store, folder, monkeypatch):
    save(store, 1)
    usage = shutil.disk_usage(folder)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1_200_000))
    monkeypatch.setattr(checkpoints, "write_training_checkpoint", lambda *_, **__: pytest.fail("it was written"))
    with pytest.raises(CheckpointWriteError, match=r"No space left.*needs 1\.2 MB, 1\.2 MB are free") as caught:
        save(store, 2)
    assert caught.value.free == 1_200_000
    assert_clear(caught.value, folder)
    assert_holds(store.latest_valid(), 1)


FULL_DISK = """
import sys
from pathlib import Path
from engine import saving
from inline_attention.engine import checkpoints
from inline_attention.engine.checkpoints import CheckpointStore, CheckpointWriteError
if sys.argv[2] == "unforeseen":
    checkpoints.free_bytes = lambda path: None
class Pipe:
    def send(self, message):
        self.message = message
pipe = Pipe()
saving.save_until_full(Path(sys.argv[1]), pipe)
saved, error = pipe.message
assert len(saved) >= 3, saved
assert "No space left" in str(error), error
store = CheckpointStore(sys.argv[1])
saving.assert_holds(store.latest_valid(), saved[-1])
assert not list(Path(sys.argv[1]).glob(".unfinished*"))
print("fine")
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["foreseen", "unforeseen"])
def test_a_full_disk(tmp_path, kind):
    """On a disk of 3 MB, in a process that sees its own mounts."""
    mount = f"mount -t tmpfs -o size=3m none {tmp_path}"
    if (
        not shutil.which("unshare")
        or subprocess.run(["unshare", "-m", "sh", "-c", mount], capture_output=True).returncode
    ):
        pytest.skip("may not mount a small disk")
    paths = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    result = subprocess.run(
        [
            "unshare",
            "-m",
            "sh",
            "-c",
            f'{mount} && exec "$0" "$@"',
            sys.executable,
            "-c",
            FULL_DISK,
            tmp_path / "c",
            kind,
        ],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
    )
    assert result.stdout == "fine\n", result.stderr


def test_a_file_in_the_folders_place_is_a_clear_error(tmp_path):
    (tmp_path / "run").write_text("in the way")
    for folder in (tmp_path / "run", tmp_path / "run" / "checkpoints"):
        with pytest.raises(CheckpointWriteError, match=r"(File exists|Not a directory)\.") as caught:
            save(CheckpointStore(folder), 1)
        assert_clear(caught.value, folder)


def test_a_forbidden_folder_is_a_clear_error():
    with tempfile.TemporaryDirectory() as outer:
        os.chmod(outer, 0o755)
        folder = Path(outer, "checkpoints")
        store = CheckpointStore(folder)
        save(store, 1)
        os.chmod(folder, 0o555)
        if os.geteuid() == 0:
            (error,) = Child(saving.save_as_nobody, folder, 2).received()
        else:
            with pytest.raises(CheckpointWriteError) as caught:
                save(store, 2)
            error = caught.value
        assert_clear(error, folder)
        assert "Permission denied" in str(error)
        assert_holds(store.latest_valid(), 1)
        os.chmod(folder, 0o755)


def test_an_error_that_is_not_the_disks_passes_as_it_is(store, monkeypatch):
    """Also in a save that is made because the disk, or something else, failed before."""

    def fail(*arguments):
        raise RuntimeError("CUDA error")

    monkeypatch.setattr(torch, "save", fail)
    try:
        raise OSError("the data cannot be read")
    except OSError:
        with pytest.raises(RuntimeError, match=r"^CUDA error$"):
            save(store, 1)
    assert names(store.folder) == set()


# Several at once


def test_a_save_leaves_that_of_another_living_process_alone(store, folder):
    save(store, 1)
    (folder / f"{UNFINISHED}step-00000000-dead").mkdir()
    child = Child(saving.save_slowly, folder, 2)
    assert child.receive() == "saving"
    waiting = threading.Thread(target=save, args=(store, 3))
    waiting.start()
    waiting.join(0.3)
    assert waiting.is_alive()  # and removes nothing meanwhile
    child.pipe.send("go on")
    assert child.received() == ["saved"]
    waiting.join(60)
    assert names(folder) == {"step-00000002", "step-00000003", "last"}
    assert_holds(open_training_checkpoint(folder / "step-00000002"), 2)
    assert_holds(store.latest_valid(), 3)


def test_a_killed_save_does_not_block_others(store, folder):
    child = Child(saving.save_slowly, folder, 2)
    assert child.receive() == "saving"
    child.kill()
    start = time.monotonic()
    save(store, 3)
    assert time.monotonic() - start < files.LOCK_TIMEOUT / 2
    assert names(folder) == {"step-00000003", "last"}


def test_waiting_for_another_save_ends(store, folder, monkeypatch):
    monkeypatch.setattr(files, "LOCK_TIMEOUT", 0.1)
    folder.mkdir(parents=True)
    with files.exclusive(folder), pytest.raises(CheckpointWriteError, match="another process has been writing"):
        save(store, 1)


def test_without_locks_saves_work_and_leftovers_stay(store, folder, monkeypatch):
    monkeypatch.setattr(files, "try_lock", lambda descriptor: None)
    leftover = folder / f"{UNFINISHED}whose"
    leftover.mkdir(parents=True)
    save(store, 1)
    assert_holds(store.latest_valid(), 1)
    assert leftover.exists()


@pytest.mark.parametrize("steps", [(range(0, 10), range(10, 20)), (range(5), range(5))], ids=["different", "same"])
def test_two_processes_racing(folder, skipped, steps):
    children = [Child(saving.save_many, folder, each) for each in steps]
    for child in children:
        assert child.received() == ["done"]
    store = CheckpointStore(folder, keep_last=3)
    assert len(kept_steps(folder)) == 3
    assert_holds(store.latest_valid(), store.latest_valid().step)
    for path in folder.glob("step-*"):
        open_training_checkpoint(path).verify()
    assert not any(name.startswith(UNFINISHED) for name in names(folder))
    assert not skipped()


# What strangers write


def forge(manifest, **changes):
    """Change a manifest and give it the checksum that goes with it."""
    content = json.loads(manifest.read_text())
    del content["sha256"]
    manifest.write_bytes(checkpoint_format._render(content | changes))


STORED = {"size": 1, "sha256": "0" * 64}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"epoch": -5}, "epoch must be a whole number"),
        ({"epoch": 10**30}, "epoch must be a whole number"),
        ({"epoch": True}, "epoch must be a whole number"),
        ({"epoch": 1.5}, "epoch must be a whole number"),
        ({"step": "1"}, "step must be a whole number"),
        ({"step": float("nan")}, "step must be a whole number"),
        ({"sequence": None}, "sequence must be a whole number"),
        ({"metric": "1e5"}, "metric must be a number"),
        ({"metric": [1]}, "metric must be a number"),
        ({"model": "a\x1b[31mb"}, "model must be a short name"),
        ({"model": "a" * 1000}, "model must be a short name"),
        ({"model": 3}, "model must be a short name"),
        ({"files": {}}, "it must name"),
        ({"files": [1]}, "damaged"),
        ({"files": {"../../other": STORED}}, r"it names the file '\.\./\.\./other'"),
        ({"files": {"model.safetensors": STORED | {"size": -1}, "state.pt": STORED}}, "size of model"),
        ({"files": {"model.safetensors": STORED | {"sha256": 3}, "state.pt": STORED}}, "checksum of model"),
        ({"files": {"model.safetensors": {}, "state.pt": STORED}}, "damaged"),
        ({"format": "one"}, "damaged"),
        ({"deep": json.loads("[" * 100 + "]" * 100)}, "nested more than 50 deep"),
        ({"long": "x" * 2_000_000}, "more than"),
    ],
)
def test_a_forged_manifest_is_refused_in_a_sentence(store, changes, message):
    saved = save(store, 1)
    forge(saved.path / "manifest.json", **changes)
    with pytest.raises(CheckpointError, match=message) as refused:
        open_training_checkpoint(saved.path)
    assert "\n" not in str(refused.value)
    assert "\x1b" not in str(refused.value)
    assert store.latest_valid() is None
    assert store.names() == [saved.path.name]


@pytest.mark.parametrize("content", [b"[" * 100_000, b"9" * 10_000, b"\xff", b"", b"null", b"[]", b'{"format": 1}'])
def test_nonsense_in_place_of_a_manifest_is_refused_in_a_sentence(store, content):
    saved = save(store, 1)
    (saved.path / "manifest.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"manifest\.json is damaged") as refused:
        open_training_checkpoint(saved.path)
    assert "\n" not in str(refused.value)


def test_a_pipe_in_place_of_a_manifest_is_refused_at_once(store):
    saved = save(store, 1)
    (saved.path / "manifest.json").unlink()
    os.mkfifo(saved.path / "manifest.json")
    with pytest.raises(CheckpointError, match="not a regular file"):
        open_training_checkpoint(saved.path)


@pytest.mark.parametrize("target", ["step-00000002", ".", "..", "../..", "step-00000001", "/tmp"])
def test_a_link_in_place_of_a_checkpoint_is_refused(store, skipped, target):
    save(store, 1)
    (store.folder / "step-00000002").symlink_to(target)
    assert_holds(store.latest_valid(), 1)
    assert any("step-00000002" in message for message in skipped())
    save(store, 2)
    assert_holds(store.latest_valid(), 2)
    assert (store.folder / "step-00000002").is_symlink()


@pytest.mark.parametrize("name", FILES[1:])
def test_a_link_in_place_of_a_file_is_refused(store, tmp_path, name):
    saved = save(store, 1)
    (saved.path / name).rename(tmp_path / name)
    (saved.path / name).symlink_to(tmp_path / name)
    with pytest.raises(CheckpointError, match=f"{name} is a link"):
        open_training_checkpoint(saved.path).load()


def test_a_pointer_out_of_the_folder_is_not_followed(store, tmp_path):
    other = save(CheckpointStore(tmp_path / "other"), 5)
    save(store, 1)
    (store.folder / "last").unlink()
    (store.folder / "last").symlink_to(other.path)
    with pytest.raises(CheckpointError, match="is a link to"):
        open_training_checkpoint(store.folder / "last")


def replace_state(saved, state):
    """Write another state, with a manifest to go with it."""
    torch.save(state, saved.path / "state.pt")
    content = (saved.path / "state.pt").read_bytes()
    stored = json.loads((saved.path / "manifest.json").read_text())["files"]
    stored["state.pt"] = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    forge(saved.path / "manifest.json", files=stored)


def test_a_tensor_that_claims_more_than_there_is_is_refused(store):
    saved = save(store, 1)
    replace_state(saved, {"optimizer": [{"exp_avg": torch.zeros(1).as_strided((2**36,), (0,))}]})
    with pytest.raises(CheckpointError, match="larger than its data"):
        open_training_checkpoint(saved.path).load()


def test_a_state_that_is_nested_too_deeply_is_refused(store):
    saved, deep = save(store, 1), ()
    for _ in range(200):
        deep = (deep,)
    replace_state(saved, {"position": deep})
    with pytest.raises(CheckpointError, match="nested more than 100 deep"):
        open_training_checkpoint(saved.path).load()


def test_equal_contents_give_equal_files(tmp_path):
    first, second = (save(CheckpointStore(tmp_path / name), 3) for name in ("first", "second"))
    for name in FILES:
        assert (first.path / name).read_bytes() == (second.path / name).read_bytes()


def test_a_folder_that_cannot_be_read_is_no_empty_one(store, monkeypatch):
    save(store, 1)

    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(os, "scandir", refuse)
    for find in (store.latest_valid, store.best, store.names):
        with pytest.raises(CheckpointError, match=r"checkpoints cannot be read \(Permission denied\)"):
            find()
