"""One run per folder: a second one is refused, and what a dead one left behind stops nobody."""

import json
import os
import socket
import threading
import time

import pytest

from engine import locking, pair
from engine.pair import in_pair
from engine.runs import TINY, config
from engine.saving import Child
from inline_attention.engine import run_folder, train
from inline_attention.engine.config import ConfigError
from inline_attention.engine.run_folder import LOCK_FILE, FolderInUseError
from inline_attention.support import files


@pytest.fixture(autouse=True)
def _impatient(monkeypatch):
    monkeypatch.setattr(run_folder, "HEARTBEAT", 0.1)
    monkeypatch.setattr(run_folder, "PATIENCE", 1.0)


def note(folder, **changes):
    """Write the note of a process that does not exist."""
    content = {"host": socket.gethostname(), "pid": 2**30, "started": "yesterday"} | changes
    (folder / LOCK_FILE).write_text(json.dumps(content))


def is_free(folder):
    try:
        with run_folder.run_lock(folder):
            return True
    except FolderInUseError:
        return False


@pytest.fixture
def touched(tmp_path):
    """Another machine that touches the lock file."""
    is_over = threading.Event()

    def touch():
        while not is_over.wait(0.05):
            if (tmp_path / LOCK_FILE).exists():
                os.utime(tmp_path / LOCK_FILE)

    thread = threading.Thread(target=touch)
    thread.start()
    yield
    is_over.set()
    thread.join()


def test_a_second_run_is_refused_with_host_and_process_of_the_first(tmp_path):
    (tmp_path / "run").mkdir()
    child = Child(locking.hold, tmp_path / "run")
    assert child.receive() == "holding"
    for overrides in (["run.experiment=run"], ["run.experiment=run", "run.resume=auto"]):
        with pytest.raises(ConfigError, match=f"process {child.process.pid} on {socket.gethostname()}"):
            train.train(config(tmp_path, *overrides))
    assert os.listdir(tmp_path / "run") == [LOCK_FILE]
    child.kill()
    folder, _ = train.train(config(tmp_path, "run.experiment=run", "training.epochs=1"))
    assert not (folder / LOCK_FILE).exists()


def test_a_lock_is_held_while_a_run_trains(tmp_path):
    refusals = []

    def try_again(row):
        with pytest.raises(ConfigError, match=f"in use by process {os.getpid()}") as refused:
            train.train(config(tmp_path, "run.experiment=run", f"run.resume={tmp_path / 'run'}"))
        refusals.append(refused)

    train.train(config(tmp_path, "run.experiment=run", "checkpoints.interval_steps=1"), on_epoch=try_again)
    assert len(refusals) == 2


def test_both_ranks_of_a_second_run_are_refused_and_those_of_one_run_share_a_lock(tmp_path):
    settings = [*TINY, f"run.output={tmp_path}", "run.experiment=run", "training.batch_size=128", "training.epochs=1"]
    (tmp_path / "run").mkdir()
    with run_folder.run_lock(tmp_path / "run"):
        outcomes = in_pair(pair.train, settings)
    assert [outcome.error for outcome in outcomes] == ["ConfigError"] * 2
    assert all(f"in use by process {os.getpid()}" in outcome.message for outcome in outcomes)
    assert [outcome.error for outcome in in_pair(pair.train, settings)] == [None] * 2


def test_processes_that_a_killed_run_has_forked_do_not_keep_its_lock(tmp_path):
    child = Child(locking.hold_and_fork, tmp_path)
    orphan = child.receive()
    child.kill()
    try:
        assert is_free(tmp_path)
    finally:
        os.kill(orphan, 9)


def test_settings_that_are_refused_leave_no_folder_and_no_lock(tmp_path):
    with pytest.raises(ConfigError):
        train.train(config(tmp_path / "runs", "run.experiment=a/b", "training.total_batch_size=100000"))
    with pytest.raises(Exception, match=r"nowhere\.safetensors"):
        train.train(config(tmp_path / "runs", "run.experiment=a/b", "model.initial_checkpoint=nowhere.safetensors"))
    assert not (tmp_path / "runs").exists()


def test_notes_of_the_dead_do_not_count(tmp_path):
    note(tmp_path)
    assert is_free(tmp_path)


@pytest.mark.parametrize("content", [b"", b"{", b"[" * 4000, b'{"host": 3}', b"\xff", b'{"pid": -1, "host": "a"}'])
def test_nonsense_in_the_lock_file_does_not_count(tmp_path, content):
    (tmp_path / LOCK_FILE).write_bytes(content)
    assert is_free(tmp_path)


def test_a_lock_file_that_is_a_link_is_refused(tmp_path):
    (tmp_path / "precious").write_text("content")
    (tmp_path / LOCK_FILE).symlink_to(tmp_path / "precious")
    with pytest.raises(OSError, match=LOCK_FILE):
        is_free(tmp_path)
    assert (tmp_path / "precious").read_text() == "content"


@pytest.mark.parametrize("name", [LOCK_FILE, files.LOCK_FILE])
@pytest.mark.parametrize("kind", ["FIFO", "link"])
def test_lock_files_are_not_waited_for_and_no_link_is_followed(tmp_path, name, kind):
    outside = tmp_path / "outside"
    folder = tmp_path / "run"
    folder.mkdir()
    os.mkfifo(folder / name) if kind == "FIFO" else (folder / name).symlink_to(outside)
    lock = run_folder.run_lock if name == LOCK_FILE else files.exclusive
    with pytest.raises(OSError, match=name), lock(folder):
        pass
    assert not outside.exists()


@pytest.mark.parametrize("has_locks", [True, False])
def test_another_machine_that_shows_signs_of_life_holds_its_lock(tmp_path, monkeypatch, touched, has_locks):
    if not has_locks:
        monkeypatch.setattr(run_folder, "try_lock", lambda descriptor: None)
    note(tmp_path, host="elsewhere", pid=7)
    with (
        pytest.raises(FolderInUseError, match="process 7 on elsewhere, started yesterday"),
        run_folder.run_lock(tmp_path),
    ):
        pass


@pytest.mark.parametrize("has_locks", [True, False])
def test_another_machine_that_shows_none_is_taken_for_dead(tmp_path, monkeypatch, has_locks):
    if not has_locks:
        monkeypatch.setattr(run_folder, "try_lock", lambda descriptor: None)
    note(tmp_path, host="elsewhere")
    assert is_free(tmp_path)


def test_without_locks_the_note_of_a_live_process_holds(tmp_path, monkeypatch):
    monkeypatch.setattr(run_folder, "try_lock", lambda descriptor: None)
    with run_folder.run_lock(tmp_path):
        assert not is_free(tmp_path)
        assert (tmp_path / LOCK_FILE).exists()
    assert is_free(tmp_path)
    note(tmp_path)  # dead
    assert is_free(tmp_path)
    note(tmp_path, pid=os.getpid(), process="another boot")  # dead, and its number given to another
    assert is_free(tmp_path)


def test_a_holder_touches_its_lock(tmp_path):
    with run_folder.run_lock(tmp_path):
        before = (tmp_path / LOCK_FILE).stat().st_mtime_ns
        deadline = time.monotonic() + 20
        while (tmp_path / LOCK_FILE).stat().st_mtime_ns == before:
            assert time.monotonic() < deadline
            time.sleep(0.05)
