"""Watch what code does to the machine: files written, sockets opened, processes started."""

import os
import sys
from contextlib import contextmanager

NETWORK_OR_PROCESS = ("socket.", "subprocess.", "os.system", "os.exec", "os.posix_spawn", "os.fork", "pty.", "urllib.")
CHANGES = (
    "os.rename",
    "os.remove",
    "os.rmdir",
    "os.mkdir",
    "os.link",
    "os.symlink",
    "os.chmod",
    "os.truncate",
    "shutil.",
)
_watching: list = []


def _hook(event, arguments):
    if not _watching:
        return
    allowed, seen = _watching[-1]
    if event == "open":
        path, mode, flags = arguments
        writes = (flags or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC) or set(mode or "") & set("wax+")
        if writes and not _is_allowed(path, allowed):
            seen.append((event, path))
    elif event.startswith(NETWORK_OR_PROCESS):
        seen.append((event, arguments))
    elif event.startswith(CHANGES) and not _is_allowed(arguments[0], allowed):
        seen.append((event, arguments[0]))


def _is_allowed(path, allowed):
    if isinstance(path, int):  # a descriptor that was opened before
        return True
    path = os.path.realpath(os.fsdecode(path))
    return path.startswith((str(allowed.resolve()), "/dev/null")) or "__pycache__" in path


sys.addaudithook(_hook)  # for the life of the process: hooks cannot be removed


@contextmanager
def nothing_done_outside(folder):
    """Fail if anything is written outside of a folder, a socket is opened or a process started."""
    seen: list = []
    _watching.append((folder, seen))
    try:
        yield
    finally:
        _watching.pop()
    assert not seen, seen
