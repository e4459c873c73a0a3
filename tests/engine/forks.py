"""Processes forked from a server that has imported torch before: a fresh one takes seconds to start."""

import multiprocessing

context = multiprocessing.get_context("forkserver")
# Modules that are installed: the server does not know where tests are.
context.set_forkserver_preload(["inline_attention.engine.train", "inline_attention.engine.evaluate"])
