"""`subprocess` for Python programs, without the seconds that importing torch takes.

`run` and `Popen` take what `subprocess.run` and `subprocess.Popen` take, for a command that starts with
`sys.executable`. The process is forked from a server that has imported torch and torchvision, and nothing of timm or of
this package. It is a process like any other: arguments, environment, folder, files, signals and exit code are its own.
Tests of starting up itself (what is imported when, `PYTHON...` variables) need a real `python`: `subprocess`.
"""

import atexit
import ctypes
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import types
from functools import cache
from subprocess import DEVNULL, PIPE, STDOUT, CompletedProcess, TimeoutExpired

__all__ = ["DEVNULL", "PIPE", "STDOUT", "CompletedProcess", "Popen", "TimeoutExpired", "run"]

PRELOADED = ("torch", "torchvision")
_PR_SET_CHILD_SUBREAPER = 36


class Popen(subprocess.Popen):
    """A Python process that starts at once."""

    # The one step of `subprocess.Popen` that differs; what comes before (pipes) and after (waiting) stays.
    def _execute_child(self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *others):
        if sys.platform != "linux":
            return super()._execute_child(args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *others)
        assert args[0] == sys.executable, f"a command of this Python, not {args[0]!r}"
        assert executable is None
        assert preexec_fn is None
        assert not pass_fds
        pipes = others[3:9]
        request = {
            "arguments": [os.fspath(argument) for argument in args[1:]],
            "folder": os.fspath(cwd or os.getcwd()),
            "environment": dict(os.environ if env is None else env),
        }
        files = [own if given == -1 else given for own, given in enumerate((pipes[0], pipes[3], pipes[5]))]
        server = _server()
        # The server's child starts the process and ends, which makes the process a child of this one, the "subreaper".
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        try:
            socket.send_fds(server, [json.dumps(request).encode()], files)
            self.pid = int(server.recv(100))
            assert server.recv(100) == b"adopted"
        finally:
            ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
            self._close_pipe_fds(*pipes)
        self._child_created = True
        return None


def run(command, *, timeout=300, check=False, capture_output=False, **options):
    """`subprocess.run`."""
    if capture_output:
        options |= {"stdout": PIPE, "stderr": PIPE}
    with Popen(command, **options) as process:
        try:
            output, errors = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    done = CompletedProcess(command, process.returncode, output, errors)
    if check:
        done.check_returncode()
    return done


@cache
def _server():
    """One server for each process of tests, started when it is needed; it ends when this end is closed."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    subprocess.Popen([sys.executable, __file__, str(theirs.fileno())], pass_fds=[theirs.fileno()], stdin=DEVNULL)
    theirs.close()
    assert ours.recv(100) == b"ready"
    return ours


def _next_process(server):
    """Serve, and return in each new process with what it has to do."""
    while True:
        message, files, *_ = socket.recv_fds(server, 1 << 20, 3)
        if not message:
            os._exit(0)  # the tests have ended
        between = os.fork()
        if between == 0:
            pid = os.fork()
            if pid == 0:
                break
            server.send(str(pid).encode())
            os._exit(0)
        os.waitpid(between, 0)
        server.send(b"adopted")
        for file in files:
            os.close(file)
    for number, file in enumerate(files):
        os.dup2(file, number)
    return json.loads(message)


def _become_new(request):
    """Leave nothing of the server but the imported modules."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.closerange(3, 1024)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    for name, number in (("stdin", 0), ("stdout", 1), ("stderr", 2)):
        stream = open(  # noqa: SIM115
            number, "w" if number else "r", encoding="utf-8", errors="backslashreplace" if number == 2 else "strict",
            buffering=1 if number == 2 or os.isatty(number) else -1, closefd=False,
        )  # fmt: skip
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    sys.modules["numpy"].random.seed()  # torch starts with the same seed in every process, NumPy does not


def _run_program(arguments):
    """Run a program as `python` does, up to its last step: to take torch apart takes a second."""
    try:
        _execute(arguments)
        code = 0
    except SystemExit as left:
        code = left.code or 0
        if not isinstance(code, int):
            print(code, file=sys.stderr)
            code = 1
    except BaseException as error:
        sys.excepthook(*sys.exc_info())
        code = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    if code < 0:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(code & 0xFF)


def _execute(arguments):
    if arguments[0] == "-c":
        sys.argv, sys.path[0] = ["-c", *arguments[2:]], ""
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(arguments[1], "<string>", "exec"), vars(main))
    elif arguments[0] == "-m":
        sys.argv, sys.path[0] = arguments[1:], os.getcwd()
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[0] = arguments, os.path.dirname(os.path.abspath(arguments[0]))
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        main.__file__ = arguments[0]
        with open(arguments[0], "rb") as file:
            exec(compile(file.read(), arguments[0], "exec"), vars(main))


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the tests
    connection = socket.socket(fileno=int(sys.argv[1]))
    for module in PRELOADED:
        importlib.import_module(module)
    gc.freeze()  # or each new process would copy the memory of all these modules when it looks for garbage
    connection.send(b"ready")
    task = _next_process(connection)
    connection.detach()
    _become_new(task)
    _run_program(task["arguments"])
