"""Moments of Optax's optimizers taken over into the states of ours."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import curvax
from tests.helpers import assert_close, gradients_like, run

PARAMS = {
    "dense": {"kernel": jnp.arange(12.0).reshape(3, 4) / 9, "bias": jnp.ones(4)},
    "head": {"weight": jnp.eye(4) + 1},  # (out, in): transposed in our state
    "layers": {"kernel": jnp.ones((2, 3, 3))},
}
AXES = {"layers/kernel": curvax.MatrixAxes(rows=2, columns=1)}
GRADIENTS = gradients_like(PARAMS, 5)


def after_steps(optimizer: Any, state: Any = None) -> Any:
    return run(optimizer, GRADIENTS[:-1], PARAMS)[1][-1]


@pytest.fixture
def muon() -> optax.GradientTransformation:
    others = optax.adamw(1e-3, weight_decay=0.0)
    return curvax.muon(0.02, b1=0.9, weight_dimension_numbers=AXES, others=others)


def test_a_run_of_optaxs_muon_goes_on(muon: Any) -> None:
    """Bit for bit up to rounding: the next update is what Optax's own would be."""
    numbers = optax.contrib.MuonDimensionNumbers
    # The same axes: `weight` is transposed, and so are the layers.
    theirs = optax.contrib.muon(
        0.02,
        beta=0.9,
        adam_learning_rate=1e-3,
        muon_weight_dimension_numbers={
            "dense": {"kernel": numbers(0, 1), "bias": None},
            "head": {"weight": numbers(1, 0)},
            "layers": {"kernel": numbers(2, 1)},
        },
    )
    others = optax.adamw(1e-3, weight_decay=0.0, nesterov=True)
    ours = curvax.muon(0.02, b1=0.9, weight_dimension_numbers=AXES, others=others)
    old = after_steps(theirs)
    expected, _ = jax.jit(theirs.update)(GRADIENTS[-1], old, PARAMS)
    state = curvax.take_over(ours, PARAMS, old)
    update = jax.jit(ours.update)
    found, _ = update(GRADIENTS[-1], state, PARAMS)
    assert_close(found, expected, condition=1e3)
    fresh, _ = update(GRADIENTS[-1], jax.jit(ours.init)(PARAMS), PARAMS)
    with pytest.raises(AssertionError, match="exceeds the bound"):
        assert_close(fresh, expected, condition=1e3)


def test_adams_mean_becomes_the_momentum(muon: Any) -> None:
    """The same as if Muon had run from the start on these gradients; Adam's others too."""
    adam = optax.adamw(1e-3, weight_decay=0.0)
    state = curvax.take_over(muon, PARAMS, after_steps(adam))
    assert_close(state, after_steps(muon), factor=8)


def test_a_schedule_goes_on_and_bases_start_anew() -> None:
    schedule = optax.linear_schedule(1.0, 0.0, 10)
    optimizer = curvax.shampoo(schedule, refresh=2, base=optax.adamw, matrices="dense/kernel")
    old = after_steps(optax.adamw(schedule))
    state, fresh = curvax.take_over(optimizer, PARAMS, old), optimizer.init(PARAMS)
    for name in ("dense/kernel", "dense/bias"):
        taken, anew = (curvax.state_of(optimizer, PARAMS, x, name) for x in (state, fresh))
        changed = {place for place in anew if not np.array_equal(taken[place], anew[place])}
        # The gradients of Shampoo's base are directions, of which AdamW knows nothing.
        assert bool(changed) == (name == "dense/bias")
    counts = jax.tree.leaves(jax.tree.map(lambda x: x.ndim == 0 and int(x) == 4, state))
    assert sum(counts) >= 2  # Adam's in `others`, and its schedule's


def test_parameters_may_be_called_like_fields_of_states() -> None:
    """`count`, `value`, `mu` and `nu` are names of parameters too."""
    fields = {"count": jnp.float32(1999), "mu": {"value": jnp.ones(3)}, "nu": jnp.ones(2)}
    params = {"attention": {"query": jnp.eye(2), "value": jnp.eye(2)}, **fields, "w": jnp.ones(2)}
    params["mu"]["nu"] = {"w": jnp.ones(2)}
    adam = optax.adamw(optax.constant_schedule(1e-3))
    _, (*_, old) = run(adam, gradients_like(params, 2), params)
    assert_close(curvax.take_over(adam, params, old), old, factor=0)


def test_a_wrapper_around_both_is_no_obstacle() -> None:
    adam, muon = optax.adamw(0.1), curvax.muon(0.1)
    params = {name: PARAMS[name] for name in ("dense", "head")}
    twice = optax.LookaheadParams(params, params)
    wrappers = [(w, params) for w in (optax.MultiSteps(muon, 2), curvax.skip_spikes(muon))]
    for ours, given in (*wrappers, (optax.lookahead(muon, 5, 0.5), twice)):
        taken = curvax.take_over(ours, given, optax.MultiSteps(adam, 2).init(params))
        assert jax.tree.structure(taken) == jax.tree.structure(ours.init(given))


def falling(step: Any) -> Any:
    return jnp.where(step < 4, 0.1, 0.001)


OF_SCHEDULES = {
    "weight_decay": lambda: curvax.muon(falling, weight_decay=0.1),
    "weights": lambda: curvax.muon(falling, weights=curvax.weights.decay(0.1)),
    "injected": lambda: curvax.inject_hyperparams(curvax.muon)(falling, weight_decay=0.1),
    "a decay rate": lambda: curvax.muon(falling, b1=falling),
    "ahead": lambda: curvax.ema_nesterov(curvax.muon(falling), falling),
    "average": lambda: curvax.primal_average(curvax.muon(falling), falling),
    "blend": lambda: curvax.assemble(
        curvax.blend(curvax.scale_by_muon(), curvax.scale_by_muon(), (falling, falling)), falling
    ),
}


@pytest.mark.parametrize("name", OF_SCHEDULES)
def test_schedules_go_on_wherever_they_are(name: str) -> None:
    """Four steps are over: each count of a schedule is 4, and the learning rate 0.001."""
    optimizer = OF_SCHEDULES[name]()
    params = {"kernel": PARAMS["dense"]["kernel"], "bias": PARAMS["dense"]["bias"]}
    gradients = {"kernel": GRADIENTS[0]["dense"]["kernel"], "bias": GRADIENTS[0]["dense"]["bias"]}
    adam = optax.adamw(1e-3)
    _, (*_, old) = run(adam, [gradients] * 4, params)
    state = curvax.take_over(optimizer, params, old)
    counts = [x for x in jax.tree.leaves(state) if x.dtype == jnp.int32 and x.ndim == 0]
    assert counts and all(int(x) == 4 for x in counts)
    updates, _ = optimizer.update(gradients, state, params)
    assert np.abs(updates["kernel"]).max() < 0.05


def test_what_cannot_go_on_is_an_error() -> None:
    muon, params = curvax.muon(0.1), PARAMS["head"]
    old = optax.adamw(0.1).init(params)
    for ours in (curvax.flat_state(muon), curvax.quantize_state(muon), optax.sgd(0.1)):
        with pytest.raises(ValueError, match="^optimizer: its state has no moments that can go on"):
            curvax.take_over(ours, params, old)
