"""The command `inline` in a process of its own that is denied something."""

import os
import resource
import tempfile

import torch
from typer.testing import CliRunner

from inline_attention.cli.main import app


def run_command(arguments, denied, pipe):
    """Report the exit code and all that was printed."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as elsewhere:
        # Without an epoch, for all that is imported on the way: who is nobody may not read it later.
        CliRunner().invoke(app, [*arguments, "--output", elsewhere, "--epochs", "0"])
    _DENIALS[denied]()
    done = CliRunner().invoke(app, arguments)
    pipe.send((done.exit_code, done.output if isinstance(done.exception, SystemExit) else repr(done.exception)))


def _nothing():
    pass


def _the_rights_of_root():
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)


def _large_files():
    """Files of settings and tables have room, those of weights have not."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def _files():
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


_DENIALS = {"nothing": _nothing, "root": _the_rights_of_root, "large files": _large_files, "files": _files}
