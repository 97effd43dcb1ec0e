"""Variational inference with a flow (`AutoIAFNormal`) by numpyro's `SVI`.

RACS has the rate that docs/start.md gives it: 16 times AdamW's, here 0.001. Squared gradients of a
masked layer are block-triangular, where its two scales have no fixed point.
"""

import pickle

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from _check import STEPS, check_equal, check_falls, check_treatments
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoIAFNormal
from numpyro.optim import optax_to_numpyro

import curvax

SIZE = 4


def model(data):
    mean = numpyro.sample("mean", dist.Normal(jnp.zeros(SIZE), 1).to_event(1))
    scale = numpyro.sample("log_scale", dist.Normal(jnp.zeros(SIZE), 1).to_event(1))
    with numpyro.plate("data", len(data)):
        numpyro.sample("x", dist.Normal(mean, jnp.exp(scale)).to_event(1), obs=data)


data = jax.random.normal(jax.random.key(1), (64, SIZE)) * jnp.arange(1, SIZE + 1) + 2
optimizer = curvax.racs(16 * 1e-3)
elbo = Trace_ELBO(num_particles=8)
svi = SVI(model, AutoIAFNormal(model), optax_to_numpyro(optimizer), elbo)
step = jax.jit(svi.update)


def run(state, steps):
    losses = []
    for _ in range(steps):
        state, loss = step(state, data)
        losses.append(float(loss))
    return state, losses


start = svi.init(jax.random.key(0), data)
check_treatments("numpyro", optimizer, svi.optim.get_params(start.optim_state))
whole, losses = run(start, STEPS)
check_falls(losses)
half, _ = run(start, STEPS // 2)
saved = pickle.dumps(jax.device_get((half.optim_state, jax.random.key_data(half.rng_key))))
optim_state, key = pickle.loads(saved)
half = half._replace(optim_state=optim_state, rng_key=jax.random.wrap_key_data(key))
resumed, _ = run(half, STEPS // 2)
check_equal(whole, resumed)
