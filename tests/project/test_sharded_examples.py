"""`train_sharded.py` and `train_pmap.py` run on simulated devices and as two processes.

A run continues on other meshes.
"""

import os
import re
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from benchmarks._examples import example
from tests.helpers import assert_close
from tests.processes import Process

STEPS, EVERY = 16, 4
SMALL = (
    f"--learning-rate 0.03 --steps {STEPS} --checkpoint-every {EVERY} "
    "--width 64 --depth 1 --batch 8 --context 16"
).split()
SECONDS = 200  # for any one process, on a busy machine

# Other devices add up in another order. In 16 steps of Muon that came to 18 times the resolution
# of the largest entry of an array; the last four steps alone change parameters by 400,000 times.
GROWTH = 16.0

pytestmark = [
    pytest.mark.filterwarnings("default"),  # warnings of other libraries
    pytest.mark.xdist_group("examples"),  # one worker imports and trains for several tests
    pytest.mark.weekly,
]


FLAGS = re.sub(r"--xla_force_host\S+", "", os.environ["XLA_FLAGS"])


class Children:
    """Processes of the examples, none of which outlives its test."""

    def __init__(self):
        self.running = []

    def start(self, script: str, *arguments: object) -> Process:
        self.running.append(Process(script, *arguments, flags=FLAGS))
        return self.running[-1]

    def train(self, *arguments: object) -> Process:
        return self.start("train_sharded.py", *SMALL, *arguments)

    def end(self) -> None:
        for process in self.running:
            if process.poll() is None:
                process.kill()
            process.communicate(timeout=SECONDS)


def finish(process: Process) -> str:
    """What a process prints, which has to end well and in time."""
    code, output, errors = process.communicate(timeout=SECONDS)
    assert code == 0, errors[-4000:]
    return output


def loss_in(output: str) -> float:
    """The loss in the final table of train_sharded.py."""
    return float(output.split("on one device\n")[1].split()[0])


def checkpoint(run: Path, step: int = STEPS) -> dict[str, np.ndarray]:
    path = run / "checkpoints" / str(step) / "state"
    with ocp.PyTreeCheckpointer() as reader:
        tree = reader.metadata(path).item_metadata.tree
        whole = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree)
        state = reader.restore(path, restore_args=whole)
    return {jax.tree_util.keystr(k): x for k, x in jax.tree.leaves_with_path(state)}


def copied(run: Path, to: Path, last: int) -> Path:
    """A run as it was when `last` was its last checkpoint."""
    shutil.copytree(run, to)
    for entry in (to / "checkpoints").iterdir():
        if not entry.name.isdecimal() or int(entry.name) > last:
            shutil.rmtree(entry)
    return to


@pytest.fixture
def children() -> Iterator[Children]:
    children = Children()
    try:
        yield children
    finally:
        children.end()


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A run on 4 × 2 devices, without interruption."""
    out = tmp_path_factory.mktemp("finished")
    children = Children()
    try:
        return out, finish(children.train("--devices", 8, "--mesh", "4,2", "--out", out))
    finally:
        children.end()


def test_a_divided_model_learns(finished):
    _, output = finished
    assert loss_in(output) < 4.5  # on average; it begins at 5.2
    per_device, alone = (int(x.replace(",", "")) for x in output.split()[-2:])
    assert per_device < alone / 2


def test_a_run_continues_on_fewer_devices_and_on_more(finished, children, tmp_path):
    """8 → 1, up to rounding, and 8 → 8, bit for bit, from its last checkpoint but one."""
    final, last = checkpoint(finished[0]), STEPS - EVERY
    runs = [copied(finished[0], tmp_path / name, last) for name in ("one", "eight")]
    before = checkpoint(runs[0], last)
    where = (("--devices", 1), ("--devices", 8, "--mesh", "4,2"))
    processes = [
        children.train(*devices, "--out", run, "--resume")
        for devices, run in zip(where, runs, strict=True)
    ]
    losses = [loss_in(finish(process)) for process in processes]
    np.testing.assert_allclose(losses, loss_in(finished[1]), rtol=2e-6)
    assert_close(checkpoint(runs[0]), final, condition=GROWTH)
    assert_close(checkpoint(runs[1]), final, factor=0)
    with pytest.raises(AssertionError):  # training changes far more than the tolerance
        assert_close(before, final, condition=100 * GROWTH)


def test_two_processes_train_as_one(finished, children, tmp_path):
    """With two devices each, parameters cut along both axes."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        address = f"localhost:{probe.getsockname()[1]}"
    together = ("--processes", 2, "--coordinator", address, "--devices", 2, "--mesh", "2,2")
    processes = [
        children.train(*together, "--process", i, "--fsdp", "--out", tmp_path / "run")
        for i in (0, 1)
    ]
    outputs = [finish(process) for process in processes]
    assert "on one device" not in outputs[1]  # only the first reports
    np.testing.assert_allclose(loss_in(outputs[0]), loss_in(finished[1]), rtol=2e-6)
    assert_close(checkpoint(tmp_path / "run"), checkpoint(finished[0]), condition=GROWTH)


@pytest.fixture
def refusal(capsys):
    """What train_sharded.py says to arguments that it refuses. It sees this process's 8 devices."""
    script = example("train_sharded")

    def refused(*arguments: object) -> str:
        with pytest.raises(SystemExit) as exit:
            script.main([*SMALL, *map(str, arguments)])
        assert exit.value.code == 2
        return capsys.readouterr().err.split("error: ")[1].strip()

    return refused


def test_bad_arguments_are_refused(refusal, tmp_path):
    assert "--mesh: 3 × 2 devices, but there are 8" in refusal("--mesh", "3,2")
    for mesh in ("8", "4,x"):
        assert f"as in 4,2, not {mesh!r}" in refusal(f"--mesh={mesh}")
    assert "--batch: must be a multiple of 8, not 12" in refusal("--mesh", "8,1", "--batch", 12)
    assert "--width: must be a multiple of 32, not 48" in refusal("--width", 48)
    assert "'adamw' (choose from" in refusal("--optimizer", "adamw")
    assert "--processes: 2 need a --process from 0 to 1" in refusal("--processes", 2)
    assert "--processes: 1 need a --process from 0 to 0" in refusal("--process", 1)
    (tmp_path / "file").touch()
    assert f"--out: cannot write in '{tmp_path / 'file'}'" in refusal("--out", tmp_path / "file")
    assert f"--resume: '{tmp_path}' has no checkpoint" in refusal("--out", tmp_path, "--resume")


def test_a_run_is_neither_overwritten_nor_continued_as_another(refusal, finished):
    out = finished[0]
    assert f"--out: '{out}' holds a run: add --resume" in refusal("--out", out)
    for arguments, setting in [
        (("--optimizer", "soap"), "optimizer is 'muon' there and 'soap' here"),
        (("--learning-rate", 1), "learning_rate is 0.03 there and 1.0 here"),
        (("--depth", 2), "depth is 1 there and 2 here"),
    ]:
        message = refusal("--out", out, "--resume", *arguments)
        assert message.endswith(f"--resume: '{out}' is a run of another configuration: {setting}")


def test_pmap_learns_the_same_on_four_devices_as_on_one(children):
    starts = [children.start("train_pmap.py", "--devices", n, "--steps", 30) for n in (1, 4)]
    losses = [[float(x) for x in re.findall(r"loss (\S+)", finish(p))] for p in starts]
    for first, last in losses:
        assert last < first / 4
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-4)
