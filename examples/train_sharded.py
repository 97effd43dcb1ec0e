"""Train the GPT of `train_lm.py` on several devices, with parameters, batch and state sharded.

    python examples/train_sharded.py --devices 8 --mesh 4,2           # eight, simulated on a CPU
    python examples/train_sharded.py --devices 4 --mesh 2,2 --resume  # continue on four
    python examples/train_sharded.py --mesh 8,1 --fsdp --optimizer shampoo  # eight real devices

The mesh is data × model. Batches are sharded along "data", kernels along "model" (with `--fsdp`
along "data" too). The optimizer's matrices are distributed over all devices, however kernels are
sharded. The same with two processes of four devices each, on one host or on two:

    python examples/train_sharded.py --devices 4 --mesh 4,2 --coordinator localhost:7777 \\
        --processes 2 --process 0         # and at the same time with --process 1

OUT/checkpoints contains Orbax checkpoints of the parameters and of the optimizer's portable state.
All processes need access to that directory. `--resume` continues on any mesh, and bit for bit on
the same one. Ctrl-C or a crash loses only the steps since the last checkpoint.
"""

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import _runs
import jax
import jax.numpy as jnp
import numpy as np
import optax
import train_lm
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from tqdm import tqdm

import curvax
from curvax import optimizers

METHODS = [name for name in optimizers.__all__ if name != "assemble" and "scale_by_" not in name]
SETTINGS = {"asgo": {"refresh": 10}, "shampoo": {"refresh": 10, "base": optax.adamw}}

# The axis of each kernel to shard along "model": outputs or heads of one layer, inputs of the next.
# The activations between the two layers are then sharded too, and need no communication.
MODEL_AXIS = {"query": 1, "key": 1, "value": 1, "out": 0, "up": 1, "down": 0}


def make_optimizer(config: train_lm.Config, mesh: Any) -> optax.GradientTransformation:
    rate, steps, name = config.learning_rate, max(21, config.steps), config.optimizer
    schedule = optax.warmup_cosine_decay_schedule(rate / 20, rate, 20, steps)
    return getattr(curvax, name)(schedule, mesh=mesh, **SETTINGS.get(name, {}))


def spec_of(path: tuple, shape: tuple[int, ...], mesh: Mesh, fsdp: bool) -> PartitionSpec:
    """The sharding of a parameter: axes of lengths that the mesh divides, the longest by "data"."""
    axis = MODEL_AXIS.get(jax.tree_util.keystr(path[-3:-2], simple=True))  # …/layer/kernel/value
    model = mesh.shape["model"]
    spec = ["model" if i == axis and n % model == 0 else None for i, n in enumerate(shape)]
    free = [i for i in range(len(shape)) if not spec[i] and shape[i] % mesh.shape["data"] == 0]
    if fsdp and free:
        spec[max(free, key=shape.__getitem__)] = "data"
    return PartitionSpec(*spec)


def make_run(config: train_lm.Config, symbols: int, mesh: Mesh, fsdp: bool):
    """The first state and a step, as jitted functions; the conversions to a checkpoint and back."""
    graph, like = nnx.split(nnx.eval_shape(lambda: train_lm.GPT(config, symbols)), nnx.Param)
    replicated = NamedSharding(mesh, PartitionSpec())

    def on_mesh(path: tuple, x: Any) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(mesh, spec_of(path, x.shape, mesh, fsdp))
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    params = jax.tree_util.tree_map_with_path(on_mesh, like)
    param_shardings = jax.tree.map(lambda x: x.sharding, params)
    optimizer = make_optimizer(config, mesh)

    def begin() -> dict[str, Any]:
        params = nnx.state(train_lm.GPT(config, symbols), nnx.Param)
        state = {"params": params, "opt_state": optimizer.init(params)}
        return state | {"step": jnp.zeros((), jnp.int32), "loss": jnp.zeros(())}

    opt_state = curvax.state_sharding(optimizer, params, mesh)
    shardings = {"params": param_shardings, "opt_state": opt_state}
    shardings |= {"step": replicated, "loss": replicated}

    def train_step(state: dict[str, Any], text: jax.Array) -> dict[str, Any]:
        key = jax.random.fold_in(jax.random.key(config.seed), state["step"])
        starts = jax.random.randint(key, (config.batch, 1), 0, len(text) - config.context)
        windows = text[starts + jnp.arange(config.context + 1)]
        windows = jax.lax.with_sharding_constraint(
            windows, NamedSharding(mesh, PartitionSpec("data"))
        )

        def loss_of(params: Any) -> jax.Array:
            logits = nnx.merge(graph, params)(windows[:, :-1])
            return optax.softmax_cross_entropy_with_integer_labels(logits, windows[:, 1:]).mean()

        loss, grads = jax.value_and_grad(loss_of)(state["params"])
        updates, opt_state = optimizer.update(grads, state["opt_state"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        step = state["step"] + 1
        smoothed = state["loss"] + (loss - state["loss"]) / jnp.minimum(step, 20)
        return {"params": params, "opt_state": opt_state, "step": step, "loss": smoothed}

    def portable(state: dict[str, Any]) -> dict[str, Any]:
        return state | {"opt_state": curvax.portable_state(optimizer, params, state["opt_state"])}

    def divided(state: dict[str, Any]) -> dict[str, Any]:
        return state | {"opt_state": curvax.place_state(optimizer, params, state["opt_state"])}

    # Each device makes its own shard of the first state; steps update the state in place.
    first = jax.jit(begin, out_shardings=shardings)
    step = jax.jit(
        train_step, donate_argnums=0, in_shardings=(shardings, replicated), out_shardings=shardings
    )
    return first, step, portable, divided


def mesh_shape(text: str) -> tuple[int, int]:
    sizes = text.split(",")
    if len(sizes) != 2 or not all(size.isdecimal() and int(size) for size in sizes):
        raise argparse.ArgumentTypeError(f"must be two numbers from 1 on, as in 4,2, not {text!r}")
    return int(sizes[0]), int(sizes[1])


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description="Train a small GPT on several devices.")
    add = parser.add_argument
    add("--optimizer", choices=METHODS, default="muon", help="(%(default)s)", metavar="METHOD")
    add("--learning-rate", type=_runs.positive, default=0.01, help="(%(default)s)")
    add("--mesh", type=mesh_shape, help="devices along data,model (all,1)")
    add("--fsdp", action="store_true", help='shard parameters along "data" too')
    add("--devices", type=_runs.whole, help="simulate this many on the CPU, in each process")
    add("--processes", type=_runs.whole, default=1, help="of the whole run (%(default)s)")
    add("--process", type=int, default=0, help="the number of this one, from 0 (%(default)s)")
    add("--coordinator", help="HOST:PORT on which process 0 will listen")
    add("--out", type=Path, default=Path("runs/sharded"), help="(%(default)s)")
    add("--resume", action="store_true", help="continue the run in --out")
    sizes = ("steps", "batch", "context", "width", "depth")
    defaults = {name: getattr(train_lm.Config, name) for name in sizes} | {"checkpoint-every": 50}
    for name, default in defaults.items():
        add(f"--{name}", type=_runs.whole, default=default, help="(%(default)s)")
    args = parser.parse_args(argv)
    if not (0 <= args.process < args.processes and (args.processes == 1 or args.coordinator)):
        wanted = f"a --process from 0 to {args.processes - 1} and a --coordinator"
        parser.error(f"argument --processes: {args.processes} need {wanted}")
    # These settings determine the devices; JAX takes them only before the first array.
    if args.devices:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", args.devices)
    if args.processes > 1:
        jax.distributed.initialize(args.coordinator, args.processes, args.process)
    devices = jax.device_count()
    data, model = args.mesh or (devices, 1)
    if data * model != devices:
        parser.error(f"argument --mesh: {data} × {model} devices, but there are {devices}")
    for name, divisor in ("width", 32), ("batch", data):
        if (size := getattr(args, name)) % divisor:
            parser.error(f"argument --{name}: must be a multiple of {divisor}, not {size}")
    mesh = jax.make_mesh((data, model), ("data", "model"), axis_types=(AxisType.Auto,) * 2)

    corpus = train_lm.read_corpus(None, args.context)
    settings: dict[str, Any] = {name: getattr(args, name) for name in sizes} | {"weight_decay": 0}
    config = train_lm.Config(args.optimizer, args.learning_rate, corpus.digest, **settings)
    try:
        checkpoints = _runs.Checkpoints(args.out)
    except OSError as error:
        parser.error(f"argument --out: cannot write in {str(args.out)!r} ({error.strerror})")
    about, here = checkpoints.about(), vars(config)
    if bool(about) != args.resume:
        why = "holds a run: add --resume or name another" if about else "has no checkpoint"
        parser.error(f"argument {'--out' if about else '--resume'}: {str(args.out)!r} {why}")
    for key, value in about["config"].items() if about else ():
        if value != here[key]:
            why = f"of another configuration: {key} is {value!r} there and {here[key]!r} here"
            parser.error(f"argument --resume: {str(args.out)!r} is a run {why}")

    begin, train_step, portable, divided = make_run(config, corpus.symbols, mesh, args.fsdp)
    like = begin.eval_shape()  # with shardings: each device reads its own shard
    alone = make_optimizer(config, None), like["params"]  # on one device
    if about:
        curvax.check_state(*alone, about["opt_state"], portable=True)
    state = divided(checkpoints.restore(like=portable(like))) if about else begin()
    text = jax.device_put(np.asarray(corpus.train), NamedSharding(mesh, PartitionSpec()))
    train_step = train_step.lower(like, text).compile()
    first, loss, seconds = int(state["step"]), float(state["loss"]), 0.0
    steps = range(first + 1, config.steps + 1)
    bar = tqdm(steps, initial=first, total=config.steps, unit="step", disable=args.process > 0)
    for step in bar:
        start = time.perf_counter()
        state = train_step(state, text)
        loss = float(state["loss"])  # waits, so that simulated devices stay in step
        seconds += time.perf_counter() - start
        bar.set_postfix_str(f"loss {loss:.4f}", refresh=False)
        if step % args.checkpoint_every == 0 or step == config.steps:
            about = {"config": here, "opt_state": curvax.describe_state(*alone)}
            checkpoints.save(step, portable(state), about)

    if args.process == 0:
        own = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(state["opt_state"]))
        print(f"{'loss':>10}{'ms/step':>10}{'state bytes per device':>26}{'on one device':>16}")
        speed = f"{1000 * seconds / max(1, len(steps)):>10.1f}"
        print(f"{loss:>10.6f}{speed}{own:>26,}{curvax.state_bytes(*alone):>16,}")


if __name__ == "__main__":
    main(sys.argv[1:])
