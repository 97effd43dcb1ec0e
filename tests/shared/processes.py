"""Programs in a Python of their own."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def run_python(*arguments: object, cwd: Path = ROOT, **variables: str | None) -> str:
    """What Python prints with these arguments, and environment variables; None unsets one."""
    variables = {"JAX_PLATFORMS": "cpu", "PYTHONPATH": None, **variables}
    environment = {k: v for k, v in {**os.environ, **variables}.items() if v is not None}
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout.strip()
