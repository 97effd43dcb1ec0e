# %% [markdown]
# # Train a transformer
#
# AdamW and two methods of curvax train a small GPT in Flax NNX on real text. It is the model of
# [examples/train_lm.py](../examples/train_lm.py) with a shorter context. The notebook takes less than a minute on two CPU cores.

# %%
import sys

sys.path.append("examples")  # the model and the text are those of the example

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import optax
from flax import nnx
from train_lm import GPT, Config, read_corpus

import curvax

STEPS, BATCH, CONTEXT = 50, 16, 32
corpus = read_corpus(None, CONTEXT)
config = Config("muon", 1e-2, corpus.digest, context=CONTEXT, width=64, depth=2)
graph, first = nnx.split(GPT(config, corpus.symbols), nnx.Param)

# %% [markdown]
# ## Look before you train
#
# Embeddings and scales go to AdamW. Attention kernels `(features, heads, head_dim)` become one matrix each. Kernels of one shape
# share a stack.

# %%
print(curvax.summarize(curvax.muon(0.03), first))

# %% [markdown]
# ## The step
#
# All optimizers use the same step. Parameters and state are donated, so they are updated in place.


# %%
def train(optimizer):
    def loss_of(params, windows):
        logits = nnx.merge(graph, params)(windows[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, windows[:, 1:]).mean()

    def step(params, state, key):
        starts = jax.random.randint(key, (BATCH, 1), 0, len(corpus.train) - CONTEXT)
        windows = corpus.train[starts + jnp.arange(CONTEXT + 1)]
        loss, grads = jax.value_and_grad(loss_of)(params, windows)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    step = jax.jit(step, donate_argnums=(0, 1))
    params = jax.tree.map(jnp.copy, first)
    state, losses = optimizer.init(params), []
    for key in jax.random.split(jax.random.key(0), STEPS):
        params, state, loss = step(params, state, key)
        losses.append(float(loss))
    return losses


# %% [markdown]
# ## Three optimizers
#
# AdamW's learning rate is the best on a similar model. Muon and SOAP are called as
# [the table of calls](../docs/choosing.md) has them. The decay is multiplied by the rate, so it is divided by the ratio of the rates.


# %%
def schedule(peak):
    return optax.warmup_cosine_decay_schedule(0.0, peak, 5, STEPS)


rate, decay = 8e-3, 0.01
runs = {
    "AdamW": optax.adamw(schedule(rate), weight_decay=decay),
    "Muon": curvax.muon(schedule(0.03), weight_decay=decay * rate / 0.03),
    "SOAP": curvax.soap(schedule(0.01), weight_decay=decay * rate / 0.01),
}
losses = {name: train(optimizer) for name, optimizer in runs.items()}

# %%
for name, values in losses.items():
    smooth = [sum(values[max(0, i - 9) : i + 1]) / min(10, i + 1) for i in range(STEPS)]
    plt.plot(smooth, label=name)
plt.xlabel("step"), plt.ylabel("training loss, mean of 10 steps"), plt.legend()
plt.show()

# %%
last = {name: sum(values[-10:]) / 10 for name, values in losses.items()}
assert last["Muon"] < last["AdamW"] and last["SOAP"] < last["AdamW"]
last
