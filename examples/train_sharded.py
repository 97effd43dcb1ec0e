"""Train the GPT of `train_lm.py` on several devices: parameters, batch and optimizer divided.

    python examples/train_sharded.py --devices 8 --mesh 4,2           # eight, simulated on a CPU
    python examples/train_sharded.py --devices 4 --mesh 2,2 --resume  # go on, on four
    python examples/train_sharded.py --mesh 8,1 --fsdp --optimizer shampoo  # on eight real ones

The mesh is data × model. Batches are cut along "data", kernels along "model" (and with `--fsdp`
along "data" too); the optimizer's matrices are divided among all devices, however kernels are cut.
The same as two processes, on one host or on two, with four devices each:

    python examples/train_sharded.py --devices 4 --mesh 4,2 --coordinator localhost:7777 \\
        --processes 2 --process 0         # and at the same time with --process 1

OUT/checkpoints has Orbax checkpoints of the parameters and of the optimizer's portable state:
`--resume` continues on any mesh, bit for bit on the same one. All processes have to see that
directory. Ctrl-C or a crash loses the steps since the last checkpoint and nothing else.
"""

import argparse
import dataclasses
import math
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

import _runs
import jax
import jax.numpy as jnp
import numpy as np
import optax
import train_lm
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from tqdm import tqdm

import curvax

METHODS = (
    "muon racs asgo dasgo shampoo foam dr_shampoo soap eigen_adam galore fira alice apollo sumo "
    "osgdm swan"
).split()
SETTINGS = {"asgo": {"refresh": 10}, "shampoo": {"refresh": 10, "base": optax.adamw}}

# The axis of a kernel that is cut along "model": outputs or heads, and then the inputs of the layer
# that takes them. So what is between two such layers is cut too, and is not sent around.
MODEL_AXIS = {"query": 1, "key": 1, "value": 1, "out": 0, "up": 1, "down": 0}


def make_optimizer(config: train_lm.Config, mesh: Mesh | None) -> optax.GradientTransformation:
    rate, steps = config.learning_rate, max(21, config.steps)
    schedule = optax.warmup_cosine_decay_schedule(rate / 20, rate, 20, steps)
    settings = SETTINGS.get(config.optimizer, {})
    return getattr(curvax, config.optimizer)(schedule, mesh=mesh, **settings)


def spec_of(path: tuple, shape: tuple[int, ...], mesh: Mesh, fsdp: bool) -> P:
    """How a parameter lies on the mesh: cut along axes that can be, the longest along "data"."""
    layer = jax.tree_util.keystr(path[-3:-2], simple=True)  # of …/layer/kernel/value
    axis = MODEL_AXIS.get(layer)
    spec: list[str | None] = [None] * len(shape)
    if axis is not None and shape[axis] % mesh.shape["model"] == 0:
        spec[axis] = "model"
    free = [i for i in range(len(shape)) if not spec[i] and shape[i] % mesh.shape["data"] == 0]
    if fsdp and free:
        spec[max(free, key=shape.__getitem__)] = "data"
    return P(*spec)


def make_run(config: train_lm.Config, symbols: int, mesh: Mesh, fsdp: bool):
    """Abstract state (shapes and where they lie), `begin`, `train_step`, `to_disk`, `from_disk`.

    The state is that of `train_lm.py`: parameters, optimizer state, step and smoothed loss.
    """
    optimizer = make_optimizer(config, mesh)
    graph, _ = nnx.split(nnx.eval_shape(lambda: train_lm.GPT(config, symbols)), nnx.Param)
    whole = NamedSharding(mesh, P())

    def begin() -> dict[str, Any]:
        params = nnx.state(train_lm.GPT(config, symbols), nnx.Param)
        state = {"params": params, "opt_state": optimizer.init(params)}
        return state | {"step": jnp.zeros((), jnp.int32), "loss": jnp.zeros(())}

    def lying(shapes: Any, shardings: Any) -> Any:
        return jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings
        )

    shapes = jax.eval_shape(begin)
    specs = jax.tree_util.tree_map_with_path(
        lambda path, x: NamedSharding(mesh, spec_of(path, x.shape, mesh, fsdp)), shapes["params"]
    )
    params = lying(shapes["params"], specs)
    opt_state = curvax.state_sharding(optimizer, params, mesh)
    shardings = {"params": specs, "opt_state": opt_state, "step": whole, "loss": whole}

    def train_step(state: dict[str, Any], text: jax.Array) -> dict[str, Any]:
        key = jax.random.fold_in(jax.random.key(config.seed), state["step"])
        starts = jax.random.randint(key, (config.batch, 1), 0, len(text) - config.context)
        windows = text[starts + jnp.arange(config.context + 1)]
        windows = jax.lax.with_sharding_constraint(windows, NamedSharding(mesh, P("data")))

        def loss_of(params: Any) -> jax.Array:
            logits = nnx.merge(graph, params)(windows[:, :-1])
            return optax.softmax_cross_entropy_with_integer_labels(logits, windows[:, 1:]).mean()

        loss, grads = jax.value_and_grad(loss_of)(state["params"])
        updates, opt_state = optimizer.update(grads, state["opt_state"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        step = state["step"] + 1
        smoothed = state["loss"] + (loss - state["loss"]) / jnp.minimum(step, 20)
        return {"params": params, "opt_state": opt_state, "step": step, "loss": smoothed}

    def to_disk(state: dict[str, Any]) -> dict[str, Any]:
        return state | {"opt_state": curvax.portable_state(optimizer, params, state["opt_state"])}

    def from_disk(state: dict[str, Any]) -> dict[str, Any]:
        return state | {"opt_state": curvax.place_state(optimizer, params, state["opt_state"])}

    first = jax.jit(begin, out_shardings=shardings)  # every device makes its own part
    step = jax.jit(
        train_step, donate_argnums=0, in_shardings=(shardings, whole), out_shardings=shardings
    )
    return lying(shapes, shardings), first, step, to_disk, from_disk


def mesh_shape(text: str) -> tuple[int, int]:
    sizes = text.split(",")
    if len(sizes) != 2 or not all(size.isdecimal() and int(size) for size in sizes):
        raise argparse.ArgumentTypeError(f"must be two numbers from 1 on, as 4,2, not {text!r}")
    return int(sizes[0]), int(sizes[1])


def bytes_per_device(tree: Any) -> int:
    leaves = jax.tree.leaves(tree)
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in leaves)


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description="Train a small GPT on several devices.")
    add = parser.add_argument
    add("--optimizer", choices=METHODS, default="muon", help="(%(default)s)", metavar="METHOD")
    add("--learning-rate", type=_runs.positive, default=0.01, help="(%(default)s)")
    add("--mesh", type=mesh_shape, help="devices along data,model (all,1)")
    add("--fsdp", action="store_true", help='cut parameters along "data" too')
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

    def refuse(argument: str, why: str) -> NoReturn:
        parser.error(f"argument --{argument}: {why}")

    if not 0 <= args.process < args.processes:
        refuse("process", f"must be from 0 to {args.processes - 1}, not {args.process}")
    if args.processes > 1 and not args.coordinator:
        refuse("coordinator", "several processes need one, such as localhost:7777")
    if args.width % 32:
        refuse("width", f"must be a multiple of 32, not {args.width}")
    # What decides which devices there are comes before the first array.
    if args.devices:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", args.devices)
    if args.processes > 1:
        jax.distributed.initialize(args.coordinator, args.processes, args.process)
    data, model = args.mesh or (jax.device_count(), 1)
    if data * model != jax.device_count():
        refuse("mesh", f"{data} × {model} devices, but there are {jax.device_count()} (--devices)")
    if args.batch % data:
        refuse("batch", f"must be a multiple of the mesh's first number {data}, not {args.batch}")
    mesh = jax.make_mesh((data, model), ("data", "model"), axis_types=(AxisType.Auto,) * 2)

    corpus = train_lm.read_corpus(None, args.context)
    settings = {name: getattr(args, name) for name in sizes} | {"weight_decay": 0.0}
    config = train_lm.Config(args.optimizer, args.learning_rate, corpus.digest, **settings)
    try:
        checkpoints = _runs.Checkpoints(args.out)
    except OSError as error:
        refuse("out", f"cannot write in {str(args.out)!r} ({error.strerror})")
    about, here = checkpoints.about(), dataclasses.asdict(config)
    if about and not args.resume:
        refuse("out", f"{str(args.out)!r} holds a run: add --resume, or name another")
    if args.resume and not about:
        refuse("resume", f"{str(args.out)!r} has no checkpoint")
    there = about["config"] if about else here
    if other := [
        f"{k} is {there.get(k)!r} there and {v!r} here"
        for k, v in here.items()
        if there.get(k) != v
    ]:
        refuse("resume", f"{str(args.out)!r} is a run of another configuration: {'; '.join(other)}")

    like, begin, train_step, to_disk, from_disk = make_run(config, corpus.symbols, mesh, args.fsdp)
    state = from_disk(checkpoints.restore(like=to_disk(like))) if about else begin()
    text = jax.device_put(np.asarray(corpus.train), NamedSharding(mesh, P()))
    train_step = train_step.lower(like, text).compile()
    first, seconds = int(state["step"]), 0.0
    steps = range(first + 1, config.steps + 1)
    quiet = args.process > 0
    bar = tqdm(steps, initial=first, total=config.steps, unit="step", disable=quiet)
    for step in bar:
        start = time.perf_counter()
        state = train_step(state, text)
        loss = float(state["loss"])  # waits: simulated devices share the cores, and stay together
        seconds += time.perf_counter() - start
        bar.set_postfix_str(f"loss {loss:.4f}", refresh=False)
        if step % args.checkpoint_every == 0 or step == config.steps:
            checkpoints.save(step, to_disk(state), {"config": here})

    if not quiet:
        alone = curvax.state_bytes(make_optimizer(config, None), like["params"])
        whole = sum(x.nbytes for x in jax.tree.leaves(state["params"]))
        own = [bytes_per_device(like[part]) for part in ("params", "opt_state")]
        speed = f"{1000 * seconds / len(steps):.1f} ms/step" if steps else "trained before"
        print(f"{config.optimizer}, mesh {data},{model}: loss {float(state['loss']):.6f}, {speed}")
        print("bytes             parameters   optimizer state")
        print(f"on each device  {own[0]:>12,}{own[1]:>18,}")
        print(f"on one alone    {whole:>12,}{alone:>18,}")


if __name__ == "__main__":
    main(sys.argv[1:])
