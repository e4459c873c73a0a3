"""Processes forked from a server that has imported torch before: a fresh one takes seconds to start."""

import multiprocessing
import multiprocessing.forkserver

context = multiprocessing.get_context("forkserver")


def start_server():
    """Start it before anything else does: measurements of memory start one that has imported less."""
    # Modules that are installed: the server does not know where tests are.
    context.set_forkserver_preload(["inline_attention.engine.train", "inline_attention.engine.evaluate"])
    multiprocessing.forkserver.ensure_running()
