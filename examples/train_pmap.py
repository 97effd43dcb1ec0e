"""Data parallel training with `jax.pmap`; the optimizer distributes its matrices over the devices.

    python examples/train_pmap.py --devices 4      # four devices, simulated on a CPU

Each device has all parameters, its shard of the batch, and the optimizer state of its own matrices.
`train_sharded.py` shards the parameters too, with `jax.jit` and a mesh.
"""

import argparse
import functools

import jax
import jax.numpy as jnp
import optax

import curvax

parser = argparse.ArgumentParser(description="Fit a small network with jax.pmap.")
parser.add_argument("--devices", type=int, help="simulate this many on the CPU")
parser.add_argument("--steps", type=int, default=200, help="(%(default)s)")
args = parser.parse_args()
if args.devices:  # before the first array
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", args.devices)
devices = jax.local_device_count()
optimizer = curvax.muon(0.02, mesh_axis="batch")  # the name of pmap's axis


def predict(params, x):
    for layer in params.values():
        x = jnp.tanh(x @ layer["kernel"])
    return x


@functools.partial(jax.pmap, axis_name="batch", donate_argnums=(0, 1))
def step(params, state, x, y):
    loss, grads = jax.value_and_grad(lambda p: jnp.mean((predict(p, x) - y) ** 2))(params)
    loss, grads = jax.lax.pmean((loss, grads), "batch")  # must be the same on all devices
    updates, state = optimizer.update(grads, state, params)
    return optax.apply_updates(params, updates), state, loss


# The network learns the outputs of another one, with other random kernels, at random points.
def network(seed):
    kernels = jax.random.normal(jax.random.key(seed), (6, 16, 16)) / 4
    return {f"layer{i}": {"kernel": kernel} for i, kernel in enumerate(kernels)}


params = jax.tree.map(lambda x: jnp.stack([x] * devices), network(0))  # one copy per device
state = jax.pmap(optimizer.init, axis_name="batch")(params)
x = jax.random.normal(jax.random.key(2), (devices, 256 // devices, 16))
y = predict(network(1), x)
for i in range(args.steps):
    params, state, loss = step(params, state, x, y)
    if i == 0 or i == args.steps - 1:
        print(f"step {i + 1} of {args.steps} on {devices} devices: loss {loss[0]:.6f}")
