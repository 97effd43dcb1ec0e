"""The examples learn, continue bit for bit and on other meshes, and refuse bad input plainly.

What trains in processes of its own, on simulated devices, runs weekly.
"""

import collections
import contextlib
import importlib
import io
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from benchmarks._examples import EXAMPLES, example
from tests.cells import ALL_CELLS
from tests.helpers import assert_close

OPTIMIZERS = ("muon", "adamw", "racs", "soap") if ALL_CELLS else ("muon",)
STEPS, EVERY = 120, 20
SMALL = (
    f"--steps {STEPS} --width 32 --depth 1 --batch 16 --context 16 "
    f"--eval-every {EVERY} --checkpoint-every 40"
).split()
SHARDED_STEPS = 16
SHARDED = (
    f"--learning-rate 0.03 --steps {SHARDED_STEPS} --checkpoint-every 4 "
    "--width 64 --depth 1 --batch 8 --context 16"
).split()
EIGHT = ("--devices", 8, "--mesh", "4,2")

# Other devices add up in another order. In 16 steps of Muon that came to 18 times the resolution
# of the largest entry of an array; the last four steps alone change parameters by 400,000 times.
GROWTH = 16.0

pytestmark = pytest.mark.filterwarnings("default")  # warnings of other libraries


@pytest.fixture(scope="module")
def start() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts a script of examples/ in a process of one device, which does not outlive the tests."""
    one_device = re.sub(r"--xla_force_host_platform_device_count=\d+", "", os.environ["XLA_FLAGS"])
    environment = {**os.environ, "XLA_FLAGS": one_device, "PYTHONPATH": str(EXAMPLES.parent)}
    running = []

    def started(script: str, *arguments: object) -> subprocess.Popen[str]:
        command = [sys.executable, str(EXAMPLES / script), *map(str, arguments)]
        piped = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        running.append(subprocess.Popen(command, env=environment, **piped))
        return running[-1]

    yield started
    for process in running:
        process.kill()


def finish(process: subprocess.Popen[str]) -> str:
    """What a process prints, which ends well and in time."""
    output, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors[-4000:]
    return output


@pytest.fixture(scope="module")
def script():
    """The module train_lm, whose way with Ctrl-C ends with the tests."""
    interrupted = signal.getsignal(signal.SIGINT)
    yield example("train_lm")
    signal.signal(signal.SIGINT, interrupted)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A few lines again and again: little to evaluate, and soon learned.

    English, Greek, an emoji, Windows line ends: characters are characters.
    """
    topics = importlib.import_module("pydoc_data.topics").topics
    lines = topics["assert"][:500] + "\r\nἘν ἀρχῇ ἦν ὁ λόγος 🙂\r\n"
    path = tmp_path_factory.mktemp("text") / "lines.txt"
    path.write_bytes(lines.encode() * 30)
    return path


@pytest.fixture(scope="module")
def trained(script, text, tmp_path_factory) -> tuple[Path, str]:
    """A run of train_lm.py, and what it prints."""
    out, printed = tmp_path_factory.mktemp("trained"), io.StringIO()
    arguments = ("--text", text, "--out", out, "--optimizers", ",".join(OPTIMIZERS))
    with jax.numpy_rank_promotion("allow"), contextlib.redirect_stdout(printed):
        script.main([*SMALL, *map(str, arguments)])
    return out, printed.getvalue()


def checkpoint(run: Path, step: int) -> dict[str, np.ndarray]:
    """Every array of a checkpoint: parameters, optimizer state, step, smoothed loss."""
    path = run / "checkpoints" / str(step) / "state"
    with ocp.PyTreeCheckpointer() as reader:
        tree = reader.metadata(path).item_metadata.tree
        whole = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree)
        state = reader.restore(path, restore_args=whole)
    return {jax.tree_util.keystr(k): x for k, x in jax.tree.leaves_with_path(state)}


def metrics(run: Path) -> list[dict]:
    """The lines of a run, without the time."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [line | {"seconds": None} for line in lines]


def test_optimizers_learn_more_than_letter_frequencies(text, trained):
    out, output = trained
    counts = np.array([*collections.Counter(text.read_bytes().decode()).values()])
    frequencies = -np.sum(counts / counts.sum() * np.log(counts / counts.sum()))
    said = f"{len(counts)} symbols. Their frequencies alone give a loss of {frequencies:.3f}."
    assert said in output
    for name in OPTIMIZERS:
        lines = metrics(out / name)
        assert [line["step"] for line in lines] == list(range(EVERY, STEPS + 1, EVERY))
        assert lines[-1]["validation_loss"] < frequencies - 0.3, name
        assert lines[-1]["validation_loss"] < lines[0]["validation_loss"] - 0.2, name
        assert f"\n{name} " in output
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")


def resume(script, text: Path, trained: Path, out: Path) -> None:
    """From a copy of a run without its last checkpoint."""
    shutil.copytree(trained / "muon", out / "muon")
    shutil.rmtree(out / "muon/checkpoints" / str(STEPS))
    arguments = ("--text", text, "--optimizers", "muon", "--out", out, "--resume")
    with jax.numpy_rank_promotion("allow"):
        script.main([*SMALL, *map(str, arguments)])


@pytest.mark.weekly
def test_a_run_continues_bit_for_bit(script, text, trained, tmp_path):
    whole, own = trained[0] / "muon", tmp_path / "muon"
    resume(script, text, trained[0], tmp_path)
    assert_close(checkpoint(own, STEPS), checkpoint(whole, STEPS), factor=0)
    assert metrics(own) == metrics(whole)


def test_a_checkpoint_of_another_format_is_refused(script, text, trained, tmp_path, monkeypatch):
    check, older = script.curvax.check_state, {"curvax_state_format": 0}
    monkeypatch.setattr(script.curvax, "check_state", lambda *x: check(*x[:2], x[2] | older))
    with pytest.raises(SystemExit, match="state format 0, from an older version"):
        resume(script, text, trained[0], tmp_path)


@pytest.mark.weekly
def test_digits(monkeypatch, capsys):
    """The script requires nine of ten digits to be read."""
    script = example("train_digits")
    # A little optimization, which the convolutions repay.
    options = {"compiler_options": {"xla_backend_optimization_level": 1}}
    train_epoch = jax.jit(script.train_epoch.__wrapped__, donate_argnums=0, **options)
    monkeypatch.setattr(script, "train_epoch", train_epoch)
    monkeypatch.setattr(script, "accuracy", jax.jit(script.accuracy.__wrapped__, **options))
    monkeypatch.setattr(sys, "argv", ["train_digits.py", "--epochs", "4"])
    with jax.numpy_rank_promotion("allow"):
        script.main()
    output = capsys.readouterr().out
    assert all(f"\n{name} " in output for name in script.OPTIMIZERS)


@pytest.mark.weekly
def test_low_memory(monkeypatch, capsys):
    """A few steps of a small model; the script compares the peaks, and the loss with letters."""
    script = example("low_memory")
    options = ("--steps", "60", "--width", "64", "--depth", "6")
    monkeypatch.setattr(sys, "argv", ["low_memory.py", *options])
    with jax.numpy_rank_promotion("allow"):
        script.main()
    rows = re.findall(r"^(\w+) +([\d.]+) +([\d.]+)$", capsys.readouterr().out, re.MULTILINE)
    temporaries = {name: float(x) for name, x, _ in rows}
    assert temporaries["layerwise"] < temporaries["ordinary"]


def loss_in(output: str) -> float:
    """The loss in the final table of train_sharded.py."""
    return float(output.split("on one device\n")[1].split()[0])


@pytest.fixture(scope="module")
def sharded(start, tmp_path_factory) -> tuple[Path, str]:
    """A run of train_sharded.py on 4 × 2 devices, without interruption."""
    out = tmp_path_factory.mktemp("sharded")
    return out, finish(start("train_sharded.py", *SHARDED, *EIGHT, "--out", out))


@pytest.mark.weekly
def test_a_divided_model_learns(sharded):
    _, output = sharded
    assert loss_in(output) < 4.5  # on average; it begins at 5.2
    per_device, alone = (int(x.replace(",", "")) for x in output.split()[-2:])
    assert per_device < alone / 2


@pytest.mark.weekly
def test_a_run_continues_on_fewer_devices_and_on_more(sharded, start, tmp_path):
    """8 → 1, up to rounding, and 8 → 8, bit for bit, from its last checkpoint but one."""
    final, last = checkpoint(sharded[0], SHARDED_STEPS), SHARDED_STEPS - 4
    runs = {tmp_path / "one": ("--devices", 1), tmp_path / "eight": EIGHT}
    for run in runs:
        shutil.copytree(sharded[0], run)
        shutil.rmtree(run / "checkpoints" / str(SHARDED_STEPS))
    before = checkpoint(tmp_path / "one", last)
    processes = [
        start("train_sharded.py", *SHARDED, *devices, "--out", run, "--resume")
        for run, devices in runs.items()
    ]
    losses = [loss_in(finish(process)) for process in processes]
    np.testing.assert_allclose(losses, loss_in(sharded[1]), rtol=2e-6)
    assert_close(checkpoint(tmp_path / "one", SHARDED_STEPS), final, condition=GROWTH)
    assert_close(checkpoint(tmp_path / "eight", SHARDED_STEPS), final, factor=0)
    with pytest.raises(AssertionError):  # training changes far more than the tolerance
        assert_close(before, final, condition=100 * GROWTH)


@pytest.mark.weekly
def test_two_processes_train_as_one(sharded, start, tmp_path):
    """With two devices each, parameters cut along both axes."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        address = f"localhost:{probe.getsockname()[1]}"
    together = ("--processes", 2, "--coordinator", address, "--devices", 2, "--mesh", "2,2")
    given = (*SHARDED, *together, "--fsdp", "--out", tmp_path / "run")
    processes = [start("train_sharded.py", *given, "--process", i) for i in (0, 1)]
    outputs = [finish(process) for process in processes]
    assert "on one device" not in outputs[1]  # only the first reports
    np.testing.assert_allclose(loss_in(outputs[0]), loss_in(sharded[1]), rtol=2e-6)
    final = checkpoint(sharded[0], SHARDED_STEPS)
    assert_close(checkpoint(tmp_path / "run", SHARDED_STEPS), final, condition=GROWTH)


@pytest.mark.weekly
def test_pmap_learns_the_same_on_four_devices_as_on_one(start):
    starts = [start("train_pmap.py", "--devices", n, "--steps", 30) for n in (1, 4)]
    losses = [[float(x) for x in re.findall(r"loss (\S+)", finish(p))] for p in starts]
    for first, last in losses:
        assert last < first / 4
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-4)
