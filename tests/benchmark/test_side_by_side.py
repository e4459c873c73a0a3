"""Commands at the same time: what each writes and how it ends, and that nothing runs on."""

import os
import signal
import sys
import threading
import time

import pytest

from inline_attention.benchmark import side_by_side
from inline_attention.benchmark.side_by_side import Command, run_side_by_side
from inline_attention.support.signals import StoppedError


@pytest.fixture
def python(tmp_path):
    """Makes a command of a name and a program."""
    return lambda name, program: Command(name, (sys.executable, "-c", program), tmp_path / "logs" / f"{name}.log")


def has_ended(process_id):
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return True
    return False


def waiting_program(ready, on_sigterm="signal.SIG_DFL"):
    waits = f"open({str(ready)!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    return f"import os, signal, time; signal.signal(signal.SIGTERM, {on_sigterm}); {waits}"


def wait_for(path):
    deadline = time.monotonic() + 20
    while not (path.is_file() and path.read_text()):
        assert time.monotonic() < deadline, "the process did not start"
        time.sleep(0.02)
    return int(path.read_text())


def test_each_command_has_its_outcome_and_its_output(python):
    commands = [python("good", "print('fine')"), python("bad", "print('before'); raise SystemExit('no such luck')")]
    ended = {one.command.name: one for one in run_side_by_side(commands, at_once=2)}
    assert {name: one.outcome for name, one in ended.items()} == {"good": "done", "bad": "failed"}
    assert commands[0].output.read_text() == "fine\n"
    assert set(commands[1].last_lines().splitlines()) == {"before", "no such luck"}
    assert commands[1].last_lines(1) in ("before", "no such luck")


def test_commands_run_at_the_same_time(python, tmp_path):
    """The first one ends only after the second has started."""
    sign = str(tmp_path / "sign")
    waits = (
        "import os, time\n"
        "for _ in range(1000):\n"
        f"    if os.path.exists({sign!r}): raise SystemExit(0)\n"
        "    time.sleep(0.02)\n"
        "raise SystemExit(1)\n"
    )
    commands = [python("waits", waits), python("signs", f"open({sign!r}, 'w')")]
    assert [one.outcome for one in run_side_by_side(commands, at_once=2)] == ["done", "done"]


def test_no_more_run_at_once_than_may(python, tmp_path):
    """Each of three would fail beside another, as one of them would find its folder there."""
    alone = (
        f"import os, time; os.mkdir({str(tmp_path / 'mine')!r}); time.sleep(0.1); os.rmdir({str(tmp_path / 'mine')!r})"
    )
    commands = [python(str(number), alone) for number in range(3)]
    assert [one.outcome for one in run_side_by_side(commands, at_once=1)] == ["done"] * 3


def test_the_time_limit_stops_what_runs_and_starts_no_more(python, tmp_path, monkeypatch):
    monkeypatch.setattr(side_by_side, "GRACE", 0.5)
    pids = [tmp_path / name for name in ("obeys", "deaf", "finishes")]
    reactions = ["signal.SIG_DFL", "signal.SIG_IGN", "lambda *_: os._exit(0)"]
    commands = [python(pid.name, waiting_program(pid, reaction)) for pid, reaction in zip(pids, reactions, strict=True)]
    late = python("late", "print('never')")
    ended = list(run_side_by_side([*commands, late], at_once=3, time_limit=3))
    outcomes = {one.command.name: one.outcome for one in ended}
    assert outcomes == {"obeys": "stopped", "deaf": "stopped", "finishes": "done", "late": "not started"}
    assert all(has_ended(int(path.read_text())) for path in pids)
    assert not late.output.exists()


def test_a_closed_iterator_leaves_no_process(python, tmp_path):
    ready = tmp_path / "pid"
    outcomes = run_side_by_side([python("quick", ""), python("slow", waiting_program(ready))], at_once=2)
    assert next(outcomes).command.name == "quick"
    process_id = wait_for(ready)
    outcomes.close()
    assert has_ended(process_id)


@pytest.mark.parametrize(
    ("own", "at_once", "expected"), [(None, 1, None), (None, 4, "2"), (None, 99, "1"), ("3", 4, "3")]
)
def test_processes_share_the_processors(python, monkeypatch, own, at_once, expected):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if own is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", own)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    command = python("environment", "import os; print(os.environ.get('OMP_NUM_THREADS'))")
    list(run_side_by_side([command], at_once=at_once))
    assert command.output.read_text() == f"{expected}\n"


def test_none_at_once_is_refused(python):
    with pytest.raises(ValueError, match="at least one command must run at a time, got at_once=0"):
        next(run_side_by_side([python("any", "")], at_once=0))


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_stops_them_all(python, tmp_path, number, status):
    ready = tmp_path / "ready"

    def send_when_ready():
        while not (ready.exists() and ready.read_text()):
            time.sleep(0.02)
        os.kill(os.getpid(), number)

    threading.Thread(target=send_when_ready).start()
    with pytest.raises(StoppedError) as caught:
        list(run_side_by_side([python("waits", waiting_program(ready))], at_once=1))
    assert caught.value.exit_code == status
    assert has_ended(int(ready.read_text()))
