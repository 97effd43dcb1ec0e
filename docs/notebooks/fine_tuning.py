# %% [markdown]
# # Fine-tune in little memory
#
# This notebook combines weights in bfloat16, an optimizer with almost no state, and updates during the backward pass, so the gradients
# of all layers never exist at once. [Memory](../docs/memory.md) has figures for real models; a small one shows here that the parts fit.

# %%
import sys

sys.path.append("examples")  # the layers are those of examples/low_memory.py

import jax
import jax.numpy as jnp
import optax
from low_memory import CONTEXT, block, embed, loss_of, make_params
from train_lm import read_corpus

import curvax

WIDTH, DEPTH, BATCH = 64, 4, 4
corpus = read_corpus(None, CONTEXT)
params = make_params(corpus.symbols, WIDTH, DEPTH)

# %% [markdown]
# ## Pretrained weights
#
# Fine-tuning starts from trained weights. Here 20 steps of AdamW on the first half of the text replace the pretraining.


# %%
def ordinary_loss(params, windows):
    x = embed(params["embed"], windows[:, :-1])
    x, _ = jax.lax.scan(lambda x, layer: (block(layer, x), None), x, params["layers"])
    return loss_of(params["head"], x, windows[:, 1:])


def windows_of(text, key):
    starts = jax.random.randint(key, (BATCH, 1), 0, len(text) - CONTEXT - 1)
    return text[starts + jnp.arange(CONTEXT + 1)]


adamw = optax.adamw(3e-3)


@jax.jit
def pretrain(params, state, windows):
    loss, grads = jax.value_and_grad(ordinary_loss)(params, windows)
    updates, state = adamw.update(grads, state, params)
    return optax.apply_updates(params, updates), state, loss


half = len(corpus.train) // 2
state = adamw.init(params)
for key in jax.random.split(jax.random.key(1), 20):
    params, state, loss = pretrain(params, state, windows_of(corpus.train[:half], key))
print(f"loss after pretraining: {loss:.3f}")
params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)

# %% [markdown]
# ## The optimizers
#
# RACS has `m + n + 1` numbers of state per matrix. `stochastic_rounding` lets bfloat16 weights learn at small learning rates
# ([why](../docs/bfloat16.md)). Layers are stacked, so the rows of a kernel are axis 1.

# %%
axes = {"*/kernel": curvax.MatrixAxes(rows=1, columns=2)}
rate = 3e-4  # of AdamW
others = optax.adamw(4 * rate)
racs = curvax.racs(16 * rate, weight_dimension_numbers=axes, others=optax.adamw(4 * rate))
optimizers = {
    "embed": curvax.stochastic_rounding(others),
    "layers": curvax.stochastic_rounding(racs),
    "head": curvax.stochastic_rounding(others),
}
states = {name: optimizer.init(params[name]) for name, optimizer in optimizers.items()}


def bytes_of(tree):
    return sum(x.nbytes for x in jax.tree.leaves(tree))


print(f"weights {bytes_of(params):,} bytes, state of the layers {bytes_of(states['layers']):,}")
print(f"state of AdamW for the layers {curvax.state_bytes(adamw, params['layers']):,}")

# %% [markdown]
# ## Two steps: ordinary, and with updates in the backward pass


# %%
def ordinary_step(params, states, windows):
    loss, grads = jax.value_and_grad(ordinary_loss)(params, windows)
    new, new_states = {}, {}
    for name, optimizer in optimizers.items():
        updates, new_states[name] = optimizer.update(grads[name], states[name], params[name])
        new[name] = optax.apply_updates(params[name], updates)
    return new, new_states, loss


def layerwise_step(params, states, windows):
    def apply(name, function, x, xs=None, stacked=False):
        return curvax.layerwise(
            function, optimizers[name], params[name], states[name], x, xs, stacked=stacked
        )

    x, embed_backward = apply("embed", embed, windows[:, :-1])
    x, layers_backward = apply("layers", block, x, stacked=True)
    loss, head_backward = apply("head", loss_of, x, windows[:, 1:])
    new, new_states = {}, {}
    new["head"], new_states["head"], dx = head_backward(jnp.ones((), loss.dtype))
    new["layers"], new_states["layers"], dx = layers_backward(dx)
    new["embed"], new_states["embed"], _ = embed_backward(dx)
    return new, new_states, loss


windows = windows_of(corpus.train[half:], jax.random.key(2))
compiled = {}
for name, step in (("ordinary", ordinary_step), ("layerwise", layerwise_step)):
    program = jax.jit(step, donate_argnums=(0, 1)).lower(params, states, windows).compile()
    print(f"{name:<10} temporaries {program.memory_analysis().temp_size_in_bytes:>12,} bytes")
    compiled[name] = program
sizes = {name: x.memory_analysis().temp_size_in_bytes for name, x in compiled.items()}
assert sizes["layerwise"] < sizes["ordinary"]

# %% [markdown]
# ## Fine-tune
#
# The layer-wise step trains on the second half of the text, at small learning rates.

# %%
losses = []
for key in jax.random.split(jax.random.key(3), 40):
    windows = windows_of(corpus.train[half:], key)
    params, states, loss = compiled["layerwise"](params, states, windows)
    losses.append(float(loss))
before, after = sum(losses[:10]) / 10, sum(losses[-10:]) / 10
print(f"loss {before:.3f} → {after:.3f}")
assert after < before
