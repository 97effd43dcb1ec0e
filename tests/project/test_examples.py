"""The examples learn, continue bit for bit, and refuse bad input in plain words."""

import collections
import importlib
import json
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from benchmarks._examples import example
from tests.helpers import ALL_CELLS, share
from tests.processes import Process

OPTIMIZERS = ("adamw", "muon", "racs", *(("soap",) if ALL_CELLS else ()))
STEPS, EVERY = 120, 20
SMALL = (
    f"--steps {STEPS} --width 32 --depth 1 --batch 16 --context 16 "
    f"--eval-every {EVERY} --checkpoint-every 40"
).split()

pytestmark = [
    pytest.mark.filterwarnings("default"),  # warnings of other libraries
    pytest.mark.xdist_group("examples"),  # one worker trains what several tests look at
]


# One device, as a user has.
FLAGS = re.sub(r"--xla_force_host_platform_device_count=\d+", "", os.environ["XLA_FLAGS"])


def train_lm(*arguments: object) -> Process:
    return Process("train_lm.py", *SMALL, *arguments, flags=FLAGS)


def finish(process: Process) -> tuple[int, str, str]:
    return process.communicate(timeout=300)


@pytest.fixture
def script():
    """The module train_lm, whose way with Ctrl-C ends with the test."""
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


def checkpoint(run: Path) -> dict[str, np.ndarray]:
    """Every array of the last checkpoint: parameters, optimizer state, step, smoothed loss."""
    with ocp.CheckpointManager(run / "checkpoints") as manager:
        items = ocp.args.Composite(state=ocp.args.StandardRestore())
        state = manager.restore(None, args=items)["state"]
    return {jax.tree_util.keystr(k): np.asarray(x) for k, x in jax.tree.leaves_with_path(state)}


def metrics(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def without_time(lines: list[dict]) -> list[dict]:
    return [{key: value for key, value in line.items() if key != "seconds"} for line in lines]


def wait(process: Process, condition: Callable[[], bool]) -> None:
    """Until a condition holds, which has to be while a process runs."""
    deadline = time.monotonic() + 120
    while not condition():
        assert process.poll() is None, finish(process)
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.fixture(scope="module")
def finished(text: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Trained without interruption."""
    out = tmp_path_factory.mktemp("finished")
    names = ",".join(OPTIMIZERS)
    code, output, errors = finish(train_lm("--text", text, "--out", out, "--optimizers", names))
    assert code == 0, errors
    return out, output


def test_optimizers_learn_more_than_letter_frequencies(text, finished):
    out, output = finished
    counts = np.array([*collections.Counter(text.read_bytes().decode()).values()])
    frequencies = -np.sum(counts / counts.sum() * np.log(counts / counts.sum()))
    assert (
        f"{len(counts)} symbols. Their frequencies alone give a loss of {frequencies:.3f}."
        in output
    )
    for name in OPTIMIZERS:
        lines = metrics(out / name)
        assert [line["step"] for line in lines] == list(range(EVERY, STEPS + 1, EVERY))
        assert all(0 < line["seconds"] < 300 for line in lines)
        assert lines[-1]["validation_loss"] < frequencies - 0.3, name
        assert lines[-1]["validation_loss"] < lines[0]["validation_loss"] - 0.2, name
        assert f"\n{name} " in output
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_the_default_text_has_the_letter_frequencies_of_english(script):
    corpus = script.read_corpus(None, 16)
    assert 3 < corpus.entropy < 3.5
    assert corpus.train.size > 400_000


def test_all_start_from_the_same_parameters_and_see_the_same_batches(script, text):
    corpus = script.read_corpus(str(text), 16)
    config = {"text": corpus.digest, "width": 32, "depth": 1, "batch": 16, "context": 16}

    def losses(name):
        state, step, _ = script.make_run(script.Config(name, 1e-9, **config), corpus)
        found = []
        for _ in range(3):
            state = step(state, corpus.train)
            found.append(float(state["loss"]))
        return found

    with jax.numpy_rank_promotion("allow"):
        first, second = losses("adamw"), losses("racs")
    np.testing.assert_allclose(second, first, rtol=1e-5)
    assert len(set(first)) == 3


@pytest.mark.weekly
def test_a_stopped_run_continues_bit_for_bit(tmp_path, text, finished):
    """After Ctrl-C."""
    own, arguments = tmp_path / "muon", ("--text", text, "--out", tmp_path, "--optimizers", "muon")
    saves, lines = own / "checkpoints", own / "metrics.jsonl"
    process = train_lm(*arguments)
    wait(process, lambda: lines.exists() and lines.stat().st_size > 0)
    process.send_signal(signal.SIGINT)
    code, output, errors = finish(process)
    assert code == 130
    assert "Stopped and saved" in output
    assert "Traceback" not in errors
    last = max(int(entry.name) for entry in saves.iterdir())
    assert last < STEPS

    code, _, errors = finish(train_lm(*arguments, "--resume"))
    assert code == 0, errors
    assert f"{last}/{STEPS} [" in errors  # the bar began where the first process stopped
    uninterrupted, continued = checkpoint(finished[0] / "muon"), checkpoint(own)
    assert continued.keys() == uninterrupted.keys()
    assert any("params" in key for key in continued)
    assert any("opt_state" in key for key in continued)
    for key, value in continued.items():
        np.testing.assert_array_equal(value, uninterrupted[key], err_msg=key)
    assert without_time(metrics(own)) == without_time(metrics(finished[0] / "muon"))


def test_a_finished_run_is_not_trained_again(script, text, finished, capsys):
    out, _ = finished
    before = (out / "muon" / "metrics.jsonl").read_bytes()
    with jax.numpy_rank_promotion("allow"):
        script.main(
            [*SMALL, "--text", str(text), "--out", str(out), "--optimizers", "muon", "--resume"]
        )
    assert "\nmuon " in capsys.readouterr().out
    assert (out / "muon" / "metrics.jsonl").read_bytes() == before


@pytest.fixture
def refusal(script, text, capsys):
    """What train_lm.py says to arguments that it refuses, before anything is trained."""

    def refused(*arguments: object) -> str:
        with pytest.raises(SystemExit) as exit:
            script.parse([*SMALL, "--text", str(text), *map(str, arguments)])
        assert exit.value.code == 2
        return capsys.readouterr().err.split("error: ")[1]

    return refused


@pytest.mark.parametrize(
    ("argument", "value", "allowed"),
    [
        ("--optimizers", "adamw,mouon", "adamw, muon, soap, racs"),
        ("--steps", "0", "from 1 on"),
        ("--width", "33", "a multiple of 32"),
        ("--learning-rate", "nan", "positive"),
        ("--text", "absent.txt", "cannot read"),
    ],
)
def test_a_bad_argument_is_named_with_its_value_and_what_is_allowed(
    refusal, argument, value, allowed
):
    message = refusal(f"{argument}={value}")
    assert argument in message
    assert value.split(",")[-1] in message
    assert allowed in message


def test_a_run_is_not_overwritten(refusal, finished):
    message = refusal("--out", finished[0])
    assert f"--out: '{finished[0] / 'adamw'}' holds a run: add --resume" in message


def test_a_checkpoint_of_another_configuration_is_refused(refusal, finished, tmp_path):
    path = tmp_path / "corpus.txt"
    path.write_text("some other text. " * 100)
    for arguments, setting in [
        (("--seed", 7), "seed is 0 there and 7 here"),
        (("--width", 64), "width is 32 there and 64 here"),
        (("--steps", 99), f"steps is {STEPS} there and 99 here"),
        (("--learning-rate", 0.5), "and 0.5 here"),
        (("--text", path), "text is"),
    ]:
        message = refusal("--out", finished[0], "--resume", *arguments)
        assert f"--resume: '{finished[0] / 'adamw'}' is a run of another configuration" in message
        assert setting in message


@pytest.fixture
def resumption(script, text, finished, tmp_path):
    """A copy of a finished run, and what resuming it says before it ends."""
    shutil.copytree(finished[0] / "racs", tmp_path / "racs")

    def resumed() -> str:
        arguments = ["--text", text, "--optimizers", "racs", "--out", tmp_path, "--resume"]
        with jax.numpy_rank_promotion("allow"), pytest.raises(SystemExit) as error:
            script.main([*SMALL, *map(str, arguments)])
        return str(error.value)

    return tmp_path / "racs" / "checkpoints" / str(STEPS), resumed


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda it: it | {"curvax_state_format": 0}, "state format 0, from an older version"),
        (lambda it: it | {"arrays": {}}, "nothing in the checkpoint"),
    ],
    ids=("older", "other arrays"),
)
def test_a_checkpoint_of_another_format_is_refused(resumption, change, message):
    last, resumed = resumption
    file = last / "about" / "metadata"
    about = json.loads(file.read_text())
    file.write_text(json.dumps(about | {"opt_state": change(about["opt_state"])}))
    assert message in resumed()


def test_digits(monkeypatch, capsys):
    """The script requires nine of ten digits to be read."""
    script = example("train_digits")
    # A little optimization, which the convolutions repay.
    options = {"compiler_options": {"xla_backend_optimization_level": 1}}
    train_epoch = jax.jit(script.train_epoch.__wrapped__, donate_argnums=0, **options)
    monkeypatch.setattr(script, "train_epoch", train_epoch)
    monkeypatch.setattr(script, "accuracy", jax.jit(script.accuracy.__wrapped__, **options))
    trained = dict(share(script.OPTIMIZERS.items(), of=3))
    monkeypatch.setattr(script, "OPTIMIZERS", trained)
    monkeypatch.setattr(sys, "argv", ["train_digits.py", "--epochs", "4"])
    with jax.numpy_rank_promotion("allow"):
        script.main()
    output = capsys.readouterr().out
    for name in trained:
        assert f"\n{name} " in output


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
