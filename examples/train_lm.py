"""Train a small GPT on real text with several optimizers, and compare them.

    python examples/train_lm.py                                # all; a minute on two CPU cores
    python examples/train_lm.py --optimizers adamw,muon --text moby_dick.txt --out runs/moby
    python examples/train_lm.py --resume                       # after Ctrl-C or a crash

The default text is the Python language reference that comes with CPython (`pydoc_data.topics`,
about 465,000 characters), read character by character; its last tenth is held out for validation.
All optimizers start from the same parameters, see the same batches and follow the same schedule.

    runs/<optimizer>/metrics.jsonl   at each evaluation: step, losses, seconds of training
    runs/<optimizer>/checkpoints     Orbax checkpoints; `--resume` continues from them bit for bit
    runs/loss.png                    validation loss against step and against wall-clock time

Ctrl-C saves a checkpoint and exits with code 130. A run that has a checkpoint is never overwritten.
"""

import argparse
import dataclasses
import hashlib
import shlex
import sys
import time
from pathlib import Path
from typing import NamedTuple

import _runs
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from tqdm import tqdm

import curvax

# Each takes a learning rate (here a schedule) and a weight decay, and is used like any Optax
# optimizer. The curvax optimizers recognize the matrices; all other parameters go to AdamW.
OPTIMIZERS = {
    "adamw": optax.adamw,
    "muon": curvax.muon,
    "soap": curvax.soap,
    "racs": curvax.racs,
}
# The best of a grid for each optimizer, on 2026-11-23.
LEARNING_RATES = {"adamw": 8e-3, "muon": 3.2e-2, "soap": 1.6e-2, "racs": 6.4e-2}


@dataclasses.dataclass(frozen=True)
class Config:
    """The settings that determine a run's numbers; a checkpoint continues only with the same."""

    optimizer: str
    learning_rate: float
    text: str  # a digest
    steps: int = 200
    batch: int = 16
    context: int = 64
    width: int = 64
    depth: int = 2
    seed: int = 0
    weight_decay: float = 0.01

    def make_optimizer(self) -> optax.GradientTransformation:
        warmup = max(1, min(20, self.steps // 10))
        schedule = optax.warmup_cosine_decay_schedule(
            init_value=self.learning_rate / warmup,
            peak_value=self.learning_rate,
            warmup_steps=warmup,
            decay_steps=max(self.steps, warmup + 1),
        )
        return OPTIMIZERS[self.optimizer](schedule, weight_decay=self.weight_decay)


# The text: its characters, numbered in sorted order.


class Corpus(NamedTuple):
    train: jax.Array  # (characters,)
    validation: jax.Array  # (windows, context + 1): all of the last tenth
    symbols: int
    entropy: float  # of the character frequencies: the loss of a model without context
    digest: str


def read_corpus(path: str | None, context: int) -> Corpus:
    try:
        if path is None:
            from pydoc_data.topics import topics

            text = "".join(topics[name] for name in sorted(topics))
        else:
            text = Path(path).read_bytes().decode("utf-8")
    except ImportError:
        raise ValueError("this Python has no pydoc_data.topics: name a file") from None
    except OSError as error:
        raise ValueError(f"cannot read {path!r} ({error.strerror})") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path!r} must be UTF-8, and byte {error.start} is not") from None
    if len(text) < 10 * (context + 1):
        needed = f"--context {context} needs {10 * (context + 1)} or more"
        raise ValueError(f"{path!r} has {len(text)} characters, and {needed}")
    characters = np.frombuffer(text.encode("utf-32-le"), np.uint32)
    symbols, tokens, counts = np.unique(characters, return_inverse=True, return_counts=True)
    train, validation = np.split(tokens.astype(np.int32), [-(len(tokens) // 10)])
    starts = np.arange((len(validation) - 1) // context)[:, None] * context
    frequencies = counts / len(tokens)
    return Corpus(
        train=jnp.asarray(train),
        validation=jnp.asarray(validation[starts + np.arange(context + 1)]),
        symbols=len(symbols),
        entropy=-float(frequencies @ np.log(frequencies)),
        digest=hashlib.sha256(text.encode()).hexdigest()[:16],
    )


# The model: a pre-norm GPT of Flax's own layers. Attention kernels have three axes, (width, heads,
# head width) or (heads, head width, width), which the optimizers merge to matrices.


class Block(nnx.Module):
    def __init__(self, width: int, rngs: nnx.Rngs):
        self.norm1 = nnx.RMSNorm(width, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            width // 32, width, use_bias=False, decode=False, rngs=rngs
        )
        self.norm2 = nnx.RMSNorm(width, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        x = x + self.attention(self.norm1(x), mask=mask)
        return x + self.down(nnx.gelu(self.up(self.norm2(x))))


class GPT(nnx.Module):
    def __init__(self, config: Config, symbols: int):
        rngs = nnx.Rngs(config.seed)
        self.tokens = nnx.Embed(symbols, config.width, rngs=rngs)
        self.positions = nnx.Embed(config.context, config.width, rngs=rngs)
        self.blocks = nnx.List([Block(config.width, rngs) for _ in range(config.depth)])
        self.norm = nnx.RMSNorm(config.width, rngs=rngs)
        self.head = nnx.Linear(config.width, symbols, use_bias=False, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        positions = jnp.arange(tokens.shape[1])
        x = self.tokens(tokens) + self.positions(positions)
        for block in self.blocks:
            x = block(x, mask=positions[:, None] >= positions)
        return self.head(self.norm(x))


def make_run(config: Config, corpus: Corpus):
    """The state at step 0, and the jitted training step and evaluation.

    The state is one pytree: parameters, optimizer state, step and smoothed loss. A step draws its
    batch from (seed, step) and returns the next state. A run depends on nothing else, so a restored
    one continues bit for bit. The state is donated, so steps update it in place.
    """
    graph, params = nnx.split(GPT(config, corpus.symbols), nnx.Param)
    optimizer = config.make_optimizer()
    state = {
        "params": params,
        "opt_state": optimizer.init(params),
        "step": jnp.zeros((), jnp.int32),
        "loss": jnp.zeros(()),
    }

    def loss_of(params, windows):
        logits = nnx.merge(graph, params)(windows[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, windows[:, 1:]).mean()

    def train_step(state, text):
        key = jax.random.fold_in(jax.random.key(config.seed), state["step"])
        starts = jax.random.randint(key, (config.batch, 1), 0, len(text) - config.context)
        windows = text[starts + jnp.arange(config.context + 1)]
        loss, grads = jax.value_and_grad(loss_of)(state["params"], windows)
        updates, opt_state = optimizer.update(grads, state["opt_state"], state["params"])
        step = state["step"] + 1
        return {
            "params": optax.apply_updates(state["params"], updates),
            "opt_state": opt_state,
            "step": step,
            # The mean of all losses at first, later of about the last twenty.
            "loss": state["loss"] + (loss - state["loss"]) / jnp.minimum(step, 20),
        }

    def evaluate(params, windows):
        def loss_of_one(window):
            return loss_of(params, window[None])

        return jax.lax.map(loss_of_one, windows, batch_size=64).mean()

    return state, jax.jit(train_step, donate_argnums=0), jax.jit(evaluate)


def train(
    config: Config,
    corpus: Corpus,
    directory: Path,
    eval_every: int,
    checkpoint_every: int,
    interrupt: object = None,  # stops the loop when it becomes true
) -> _runs.Result:
    """Train from the last checkpoint in `directory`, or from the start without one."""
    state, train_step, evaluate = make_run(config, corpus)
    optimizer = config.make_optimizer()
    state_bytes = curvax.state_bytes(optimizer, state["params"])
    description = curvax.describe_state(optimizer, state["params"])
    checkpoints = _runs.Checkpoints(directory)
    about = checkpoints.about()
    if about:
        try:
            curvax.check_state(optimizer, state["params"], about["opt_state"])
        except ValueError as error:
            sys.exit(f"error: argument --resume: {error}")
        state = checkpoints.restore(like=state)
    else:
        about = {"step": 0, "seconds": 0.0, "compile_seconds": 0.0}
    step, seconds, compile_seconds = about["step"], about["seconds"], about["compile_seconds"]
    metrics = _runs.Metrics(directory / "metrics.jsonl", step)

    bar = tqdm(total=config.steps, initial=step, desc=config.optimizer, unit="step")
    if step < config.steps:
        bar.set_postfix_str("compiling")
        begin = time.perf_counter()
        train_step = train_step.lower(state, corpus.train).compile()
        compile_seconds = time.perf_counter() - begin
        bar.unpause()  # the time left is estimated from steps alone

    begin, waited = time.perf_counter(), step
    stop = False
    while step < config.steps and not stop:
        state = train_step(state, corpus.train)
        step += 1
        stop = bool(interrupt) or step == config.steps
        evaluating = step % eval_every == 0 or step == config.steps
        saving = step % checkpoint_every == 0 or stop
        if not (evaluating or saving or step % 10 == 0):
            continue

        # Only here does Python wait for the device. Evaluations and checkpoints are not timed.
        train_loss = float(state["loss"])
        elapsed = time.perf_counter() - begin
        seconds += elapsed
        if evaluating:
            loss = float(evaluate(state["params"], corpus.validation))
            metrics.append(step=step, train_loss=train_loss, validation_loss=loss, seconds=seconds)
        if saving:  # after the metrics: they may be ahead of a checkpoint, but never behind it
            about = {"step": step, "seconds": seconds, "compile_seconds": compile_seconds}
            about |= {"config": dataclasses.asdict(config), "opt_state": description}
            checkpoints.save(step, state, about)
        speed = (step - waited) * config.batch * config.context / elapsed
        shown = f"loss {train_loss:.3f}, {speed:,.0f} tokens/s"
        if metrics.lines:
            shown += f", validation {metrics.lines[-1]['validation_loss']:.3f}"
        bar.set_postfix_str(shown, refresh=False)
        bar.update(step - waited)
        begin, waited = time.perf_counter(), step
    bar.close()
    return _runs.Result(
        config.optimizer,
        config.learning_rate,
        metrics.lines,
        step,
        seconds,
        compile_seconds,
        state_bytes,
    )


# The command line. All its errors are reported before training starts.


def names(text: str) -> list[str]:
    for name in text.split(","):
        if name not in OPTIMIZERS:
            known = ", ".join(OPTIMIZERS)
            raise argparse.ArgumentTypeError(f"{name!r} is not one of {known} (commas between)")
    return list(dict.fromkeys(text.split(",")))


def parse(argv: list[str]) -> tuple[argparse.Namespace, Corpus, list[Config]]:
    parser = argparse.ArgumentParser(description="Train a small GPT with each optimizer.")
    add = parser.add_argument
    add("--optimizers", type=names, default=list(OPTIMIZERS), help=",".join(OPTIMIZERS))
    add("--learning-rate", type=_runs.positive, help="of all optimizers (tuned for each)")
    add("--text", help="a UTF-8 file to train on")
    add("--out", type=Path, default=Path("runs"), help="directory of the runs (%(default)s)")
    add("--resume", action="store_true", help="continue the runs in --out")
    sizes = {
        name: getattr(Config, name) for name in ("steps", "batch", "context", "width", "depth")
    }
    for name, default in {**sizes, "eval-every": 20, "checkpoint-every": 100}.items():
        add(f"--{name}", type=_runs.whole, default=default, help="(%(default)s)")
    add("--seed", type=int, default=Config.seed, help="(%(default)s)")
    args = parser.parse_args(argv)
    if args.width % 32:
        parser.error(f"argument --width: must be a multiple of 32, not {args.width}")
    if not 0 <= args.seed < 2**31:
        parser.error(f"argument --seed: must be from 0 to {2**31 - 1}, not {args.seed}")
    try:
        corpus = read_corpus(args.text, args.context)
    except ValueError as error:
        parser.error(f"argument --text: {error}")

    settings = {name: getattr(args, name) for name in (*sizes, "seed")}
    configs = []
    found = False
    for name in args.optimizers:
        rate = args.learning_rate or LEARNING_RATES[name]
        configs.append(Config(name, rate, corpus.digest, **settings))
        if about := _runs.checkpoint_in(args.out / name):
            found = True
            if not args.resume:
                choice = "add --resume to continue it, name another --out, or delete it"
                parser.error(f"argument --out: {str(args.out / name)!r} holds a run: {choice}")
            there, here = about["config"], dataclasses.asdict(configs[-1])
            different = [
                f"{key} is {there.get(key)!r} there and {here.get(key)!r} here"
                for key in {**there, **here}
                if there.get(key) != here.get(key)
            ]
            if different:
                where = f"{str(args.out / name)!r} is a run of another configuration"
                parser.error(f"argument --resume: {where}: {'; '.join(different)}")
    if args.resume and not found:
        wanted = ", ".join(args.optimizers)
        parser.error(f"argument --resume: {str(args.out)!r} has no checkpoint of {wanted}")
    try:
        for name in args.optimizers:
            (args.out / name).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"argument --out: cannot write in {str(args.out)!r} ({error.strerror})")
    return args, corpus, configs


def main(argv: list[str]) -> list[_runs.Result]:
    args, corpus, configs = parse(argv)
    interrupt = _runs.Interrupt()
    print(f"{len(corpus.train):,} characters to train on, {corpus.symbols} symbols.", end=" ")
    print(f"Their frequencies alone give a loss of {corpus.entropy:.3f}.")
    results = []
    for config in configs:
        run = args.out / config.optimizer, args.eval_every, args.checkpoint_every
        results.append(train(config, corpus, *run, interrupt))
        if results[-1].steps < config.steps:
            command = [sys.argv[0], *(word for word in argv if word != "--resume"), "--resume"]
            print(f"Stopped and saved. To continue: python {shlex.join(command)}")
            sys.exit(130)
    _runs.plot(results, args.out / "loss.png")
    print(f"\n{_runs.table(results)}\n\nThe curves are in {args.out / 'loss.png'}.")
    return results


if __name__ == "__main__":
    main(sys.argv[1:])
