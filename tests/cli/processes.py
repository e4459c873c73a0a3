"""Commands as processes of their own, for tests of signals, terminals and imports."""

import os
import pty
import subprocess
import sys
import time

import warm

# A command that says when it is ready and then waits, so that a test knows when to send a signal.
WAITING = """
import sys, time
from inline_attention.__main__ import main
from inline_attention.cli.main import app

@app.command()
def wait():
    print("ready", flush=True)
    {wait}

sys.argv = ["inline", "wait"]
main()
"""


def run_command(*arguments):
    """Run `inline` to its end."""
    command = [sys.executable, "-m", "inline_attention", *map(str, arguments)]
    return warm.run(command, capture_output=True, text=True)


def start_command(*arguments):
    """Start `inline` and return once Python runs."""
    program = f"import sys; print('ready', flush=True); sys.argv = {['inline', *map(str, arguments)]!r}"
    return _started(f"{program}\nfrom inline_attention.__main__ import main\nmain()")


def start_waiting(wait="time.sleep(60)"):
    """Start the waiting command and return once it waits."""
    process = _started(WAITING.format(wait=wait))
    time.sleep(0.2)  # from the word to the wait
    return process


def _started(program):
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def end_of(process):
    """Exit code and stderr of a process that should end by itself."""
    try:
        _, errors = process.communicate(timeout=10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise
    return process.returncode, errors


def on_a_terminal(*arguments, **environment):
    """What `inline` writes when it runs on a terminal, and its exit code."""
    leader, follower = pty.openpty()
    variables = {key: value for key, value in os.environ.items() if key not in ("NO_COLOR", "FORCE_COLOR")}
    variables = variables | {"TERM": "xterm-256color"} | environment
    command = [sys.executable, "-m", "inline_attention", *arguments]
    process = warm.Popen(command, stdin=follower, stdout=follower, stderr=follower, env=variables)
    os.close(follower)
    output = b""
    while True:
        try:
            part = os.read(leader, 65536)
        except OSError:  # the other end is closed
            break
        if not part:
            break
        output += part
    os.close(leader)
    return process.wait(timeout=60), output
