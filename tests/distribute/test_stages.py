"""Pipelines, whose stages have optimizers of their own, in processes of their own."""

import socket
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

import curvax
from tests.helpers import assert_close, run_scanned
from tests.registry import NAMED
from tests.shared import stages
from tests.shared.meshes import mesh_of


@pytest.mark.weekly
def test_stages_in_two_processes_continue_in_one(tmp_path: Path) -> None:
    """With two devices each, and then on four of one host; as one optimizer of both stages."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        address = f"localhost:{probe.getsockname()[1]}"
    command = [sys.executable, "-m", "tests.shared.stages", address, str(tmp_path)]
    running = [subprocess.Popen([*command, str(stage)]) for stage in range(stages.STAGES)]
    assert [process.wait(300) for process in running] == [0, 0]

    whole = [stages.arrays(0, step) | stages.arrays(1, step) for step in range(stages.STEPS + 1)]
    expected = run_scanned(stages.make(), whole[1:], whole[0])[0][-1]
    mesh = mesh_of()
    for stage in range(stages.STAGES):
        optimizer, params = stages.make(mesh=mesh), stages.on(mesh, stages.arrays(stage, 0))
        like = jax.eval_shape(optimizer.init, params)
        like = curvax.portable_state(optimizer, params, like)
        with np.load(stages.path_of(tmp_path, stage)) as stored:
            portable = jax.tree.unflatten(jax.tree.structure(like), list(stored.values()))
        state = curvax.place_state(optimizer, params, portable)
        gradients = stages.on(mesh, stages.arrays(stage, stages.STEPS))
        updates, _ = jax.jit(optimizer.update)(gradients, state, params)
        assert_close(updates, {name: expected[name] for name in updates}, NAMED["soap"].growth)
        # The negative control: a state that starts anew gives other updates.
        anew, _ = jax.jit(optimizer.update)(gradients, optimizer.init(params), params)
        with pytest.raises(AssertionError):
            assert_close(anew, {name: expected[name] for name in anew}, NAMED["soap"].growth)
