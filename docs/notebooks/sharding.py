# %% [markdown]
# # Shard over 8 devices
#
# With `mesh=`, each device stores and refreshes the state of its own matrices. Here JAX simulates eight CPU devices; on real
# devices only the first lines differ. [Many devices](../docs/distribution.md) explains the communication.

# %%
import jax

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)

import jax.numpy as jnp
import optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import curvax

mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
print(mesh)

# %% [markdown]
# ## The parameters
#
# There are eight layers. Kernels are sharded along both axes of the mesh (FSDP and tensor parallel); scales are replicated.

# %%
WIDTH, DEPTH = 32, 8


def sharding(*axes):
    return NamedSharding(mesh, PartitionSpec(*axes))


def make_params(key):
    keys = jax.random.split(key, 2 * DEPTH)
    return {
        f"layer_{i}": {
            "up": {"kernel": jax.random.normal(keys[2 * i], (WIDTH, 2 * WIDTH)) / 6},
            "down": {"kernel": jax.random.normal(keys[2 * i + 1], (2 * WIDTH, WIDTH)) / 8},
            "scale": jnp.ones(WIDTH),
        }
        for i in range(DEPTH)
    }


def sharding_of(path, leaf):
    name = jax.tree_util.keystr(path)
    if "up" in name:
        return sharding("data", "model")
    return sharding("model", "data") if "down" in name else sharding()


shapes = jax.eval_shape(make_params, jax.random.key(0))
shardings = jax.tree_util.tree_map_with_path(sharding_of, shapes)
params = jax.jit(make_params, out_shardings=shardings)(jax.random.key(0))

# %% [markdown]
# ## The optimizer and its state
#
# With `mesh=` gradients go straight to the owners of the matrices, and updates back.
# `state_sharding` tells where each array of the state belongs. Give it to `jax.jit`, so that the state is sharded from the start.

# %%
optimizer = curvax.soap(0.01, mesh=mesh)
state_shardings = curvax.state_sharding(optimizer, params, mesh)
state = jax.jit(optimizer.init, out_shardings=state_shardings)(params)
print("\n".join(curvax.summarize(optimizer, params).splitlines()[:6]))

# %%
whole = curvax.state_bytes(curvax.soap(0.01), params)
own = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(state))
print(f"state on one device alone: {whole:,} bytes; on each of eight: {own:,}")
assert own < whole / 6

# %% [markdown]
# ## Train


# %%
def loss_of(params, x):
    h = x
    for layer in params.values():
        h = h + jnp.tanh(layer["scale"] * h @ layer["up"]["kernel"]) @ layer["down"]["kernel"]
    return jnp.mean((h - jnp.roll(x, 1, axis=1)) ** 2)


def step(params, state, x):
    loss, grads = jax.value_and_grad(loss_of)(params, x)
    updates, state = optimizer.update(grads, state, params)
    return optax.apply_updates(params, updates), state, loss


step = jax.jit(step, donate_argnums=(0, 1), out_shardings=(shardings, state_shardings, sharding()))
batch = jax.device_put(jax.random.normal(jax.random.key(1), (64, WIDTH)), sharding("data"))
losses = []
for _ in range(30):
    params, state, loss = step(params, state, batch)
    losses.append(float(loss))
print(f"loss {losses[0]:.3f} → {losses[-1]:.3f}")
assert losses[-1] < losses[0] / 2

# %% [markdown]
# ## A checkpoint for any number of devices
#
# The portable form has one entry per parameter, and fits every mesh, here a single device:

# %%
portable = curvax.portable_state(optimizer, params, state)
alone = curvax.soap(0.01)
state_alone = curvax.place_state(alone, params, jax.device_get(portable))
updates, _ = alone.update(params, state_alone, params)
print(jax.tree.map(jnp.shape, updates["layer_0"]))
