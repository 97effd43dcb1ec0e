"""Processes that run the examples, forked from one that has imported what the examples import.

JAX, Flax and Orbax take Python seconds to import, and the tests of the examples need many
processes. Each is one like any other, with devices, signals and an exit code of its own. The one
that they are forked from imports and does nothing else, so that it has no threads to lose.
"""

from __future__ import annotations

import atexit
import functools
import multiprocessing
import os
import runpy
import shutil
import sys
import tempfile
from multiprocessing import forkserver
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
IMPORTED = [
    *("curvax", "jax", "optax", "tqdm", "matplotlib.figure", "matplotlib.backends.backend_agg"),
    *("flax.nnx", "orbax.checkpoint"),
]


@functools.cache
def server() -> tuple[Any, Path]:
    """What forks, and a folder. What one process has compiled the next need not."""
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    cache = folder / "programs"
    cache.mkdir()
    environment = {
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        **os.environ,
    }
    paths = [str(ROOT), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    forks: Any = multiprocessing.get_context("forkserver")
    forks.set_forkserver_preload(IMPORTED)
    with mock.patch.dict(os.environ, environment):
        forkserver.ensure_running()
    return forks, folder


def run_script(script: str, arguments: list[str], flags: str, output: Path, errors: Path) -> None:
    """What a new process does."""
    os.setsid()
    for file, stream in ((output, 1), (errors, 2)):
        os.dup2(os.open(file, os.O_WRONLY), stream)
    os.environ["XLA_FLAGS"] = flags
    path = EXAMPLES / script
    sys.argv = [str(path), *arguments]
    sys.path.insert(0, str(path.parent))
    try:
        runpy.run_path(str(path), run_name="__main__")
    finally:
        atexit._run_exitfuncs()  # which a fork leaves out


class Process:
    """A script of examples/ in a process of its own, with these XLA_FLAGS."""

    def __init__(self, script: str, *arguments: object, flags: str):
        forks, folder = server()
        own = Path(tempfile.mkdtemp(dir=folder))
        self.files = own / "output", own / "errors"
        for file in self.files:
            file.touch()
        words = [str(argument) for argument in arguments]
        self.process = forks.Process(
            target=run_script,
            args=(script, words, flags, *self.files),
            daemon=True,  # it does not outlive the tests
        )
        self.process.start()

    def poll(self) -> int | None:
        """The exit code, None while it runs."""
        return self.process.exitcode

    def send_signal(self, number: int) -> None:
        os.kill(self.process.pid, number)

    def kill(self) -> None:
        self.process.kill()

    def communicate(self, timeout: float) -> tuple[int, str, str]:
        """The exit code, and what was printed: output and errors."""
        self.process.join(timeout)
        code = self.poll()
        output, errors = (file.read_text() for file in self.files)
        assert code is not None, f"still running after {timeout} seconds: {errors[-4000:]}"
        return code, output, errors
