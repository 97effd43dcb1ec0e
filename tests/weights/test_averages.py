"""Averages of weights and points ahead: transcriptions, other optimizers, and what is evaluated."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import curvax
from tests.helpers import assert_close
from tests.reference.averages import primal_averaging, schedule_free_weights, tail_ema
from tests.reference.ema_nesterov import ema_nesterov
from tests.shared.transcriptions import scheduled

STEPS, RATE, B1, DECAY = 24, 0.2, 0.6, 0.1
SHAPES = {"vector": (3,), "matrix": (4, 5)}
NOISE = {
    name: np.random.default_rng(i).standard_normal((STEPS, *shape))
    for i, (name, shape) in enumerate(SHAPES.items())
}
START = {name: np.ones(shape) for name, shape in SHAPES.items()}
SGD = optax.chain(optax.trace(B1), optax.add_decayed_weights(DECAY), optax.scale(-RATE))
BETAS = np.where(np.arange(STEPS + 1) % 7 < 4, 0.5, 0.0) * np.linspace(1.0, 0.2, STEPS + 1)
Found = tuple[dict[str, Any], dict[str, Any]]


def gradient(point: Any, noise: Any) -> Any:
    return 0.3 * point + noise


def run(optimizer: Any, start: Any = None, dtype: str = "float64") -> Found:
    def step(carry: Any, noise: Any) -> Any:
        params, state = carry
        updates, state = optimizer.update(jax.tree.map(gradient, params, noise), state, params)
        params = optax.apply_updates(params, updates)
        return (params, state), (params, curvax.eval_params(state, params))

    @jax.jit
    def scanned(params: Any, noise: Any) -> Any:
        return jax.lax.scan(step, (params, optimizer.init(params)), noise)[1]

    with jax.enable_x64(dtype == "float64"):
        given = (START if start is None else start), NOISE
        found = scanned(*jax.tree.map(lambda x: jnp.asarray(x, dtype), given))
        return jax.tree.map(np.asarray, found)


def sgd_of(name: str) -> Callable[..., Any]:
    """The transcription's step from `start`, with the gradient at `point`."""
    trace = np.zeros(SHAPES[name])

    def step(start: Any, point: Any, t: int) -> Any:
        nonlocal trace
        trace = B1 * trace + gradient(point, NOISE[name][t])
        return start - RATE * (trace + DECAY * start)

    return step


def transcribed(name: str, gamma: float) -> tuple[list[Any], list[Any]]:
    """The weights after each step of EMA-Nesterov, and the points of the steps."""
    step = sgd_of(name)
    weights, states = ema_nesterov(
        START[name], lambda point, t: step(point, point, t), betas=BETAS[:STEPS], gamma=gamma
    )
    return weights, [state["point"] for state in states]


def test_ema_nesterov_follows_the_transcription() -> None:
    params, evaluated = run(curvax.ema_nesterov(SGD, scheduled(BETAS), gamma=0.8))
    for name in SHAPES:
        weights, points = transcribed(name, 0.8)
        assert_close(evaluated[name], np.stack(weights), 64)
        assert_close(params[name][:-1], np.stack(points)[1:], 64)
        assert np.abs(params[name] - evaluated[name]).max() > 0.01


@pytest.mark.parametrize("varying", [False, True])
def test_primal_averages_follow_the_transcription(varying: bool) -> None:
    kept = np.linspace(0.0, 0.95, STEPS) if varying else 0.9
    ours = curvax.primal_average(SGD, scheduled(kept) if varying else kept, mu_y=0.7)
    params, evaluated = run(ours)
    for name in SHAPES:
        expected, states = primal_averaging(START[name], sgd_of(name), STEPS, mu_x=kept, mu_y=0.7)
        assert_close(evaluated[name], np.stack(expected), 256)
        assert_close(params[name][:-1], np.stack([s["Y"] for s in states])[1:], 256)


def test_a_primal_average_of_equal_weights_is_schedule_free() -> None:
    plain = optax.sgd(RATE)
    weights = schedule_free_weights(STEPS)
    ours = run(curvax.primal_average(plain, scheduled(weights), mu_y=0.9))
    theirs = run(optax.contrib.schedule_free(plain, RATE, b1=0.9))
    assert_close(ours, theirs, 256)


@pytest.mark.parametrize("end", [None, 17])
def test_tail_averages_follow_the_transcription_and_training_does_not_see_them(end: Any) -> None:
    plain, _ = run(SGD)
    params, evaluated = run(curvax.tail_average(SGD, 9, tau=4.0, share=0.6, end=end))
    assert_close(params, plain, 0)
    for name in SHAPES:
        expected, _ = tail_ema(plain[name], tau=4.0, share=0.6, start=9, end=end)
        assert_close(evaluated[name], np.stack(expected), 16)


def test_a_tail_average_is_of_what_the_inner_wrapper_evaluates() -> None:
    inner = curvax.ema_nesterov(SGD, scheduled(BETAS), gamma=0.8)
    _, evaluated = run(curvax.tail_average(inner, 9, tau=4.0))
    for name in SHAPES:
        expected, _ = tail_ema(transcribed(name, 0.8)[0], tau=4.0, start=9)
        assert_close(evaluated[name], np.stack(expected), 64)


WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "ahead": lambda inner: curvax.ema_nesterov(inner, 0.5, gamma=0.8),
    "primal": lambda inner: curvax.primal_average(inner, 0.9),
    "tail": lambda inner: curvax.tail_average(inner, 9, tau=4.0),
}


def test_wrappers_outside_are_looked_into_and_other_parameters_stay() -> None:
    mask = {"vector": False, "matrix": True}
    labels = {"vector": "plain", "matrix": "average"}
    average = WRAPPERS["tail"](SGD)
    behind = curvax.tail_average(optax.identity(), 9, tau=4.0)
    _, whole = run(average)
    params, _ = run(SGD)
    for optimizer in (
        optax.partition({"plain": SGD, "average": average}, labels),
        optax.chain(SGD, optax.masked(behind, mask)),
        curvax.master_weights(optax.chain(SGD, optax.masked(behind, mask))),
    ):
        _, evaluated = run(optimizer)
        assert_close(evaluated["matrix"], whole["matrix"], 0)
        assert_close(evaluated["vector"], params["vector"], 0)


def test_averages_that_cannot_be_found_are_not_taken_for_the_parameters() -> None:
    params = {"kernel": jnp.ones((64, 64))}
    tail = curvax.tail_average(SGD, 1)
    wrappers = curvax.flat_state(tail), curvax.quantize_state(tail), optax.flatten(tail)
    for optimizer, reason in zip(wrappers, ("a flat one", "'kernel/codes'", "is no parameter")):  # noqa: B905
        with pytest.raises(ValueError, match=f"^state.*{reason}"):
            curvax.eval_params(optimizer.init(params), params)


def test_injected_numbers_are_those_of_the_point_that_is_evaluated() -> None:
    inject = curvax.inject_hyperparams(curvax.ema_nesterov)
    _, expected = run(curvax.ema_nesterov(SGD, scheduled(BETAS), gamma=0.8))
    # A schedule in float32, which is asked before the update for the point after it.
    _, evaluated = run(inject(SGD, beta=scheduled(BETAS[1:]), gamma=0.8))
    assert_close(evaluated, expected, 4, eps=float(np.finfo(np.float32).eps))


def test_states_in_the_boxes_of_nnx_are_evaluated_too() -> None:
    ahead = curvax.ema_nesterov(SGD, 0.5, gamma=0.8)
    free = optax.contrib.schedule_free(optax.sgd(RATE), RATE)
    for optimizer in (curvax.tail_average(ahead, 1), free):
        model = nnx.Linear(3, 4, rngs=nnx.Rngs(0))
        boxed = nnx.Optimizer(model, optimizer, wrt=nnx.Param)
        params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
        state = optimizer.init(params)
        for _ in range(3):
            boxed.update(model, nnx.state(model, nnx.Param))
            updates, state = optimizer.update(params, state, params)
            params = optax.apply_updates(params, updates)
        found = curvax.eval_params(boxed.opt_state, nnx.state(model, nnx.Param))
        assert_close(nnx.to_pure_dict(found), curvax.eval_params(state, params), 4)
        assert not np.allclose(found["kernel"][...], params["kernel"], rtol=1e-6)


@pytest.mark.parametrize("name", WRAPPERS)
def test_states_keep_their_form_and_precision_and_pass_through_checkpoints(name: str) -> None:
    optimizer = WRAPPERS[name](curvax.muon(0.05))
    params = {"kernel": jnp.ones((4, 5), jnp.bfloat16), "bias": jnp.ones(3)}
    state = optimizer.init(params)
    step = jax.jit(optimizer.update, donate_argnums=(1, 2))
    updates, after = step(jax.tree.map(jnp.ones_like, params), state, params)
    shape = functools.partial(jax.tree.map, lambda x: (x.shape, x.dtype))
    assert shape(after) == shape(jax.eval_shape(lambda s: s, after))
    params = jax.tree.map(jnp.ones_like, updates)
    again = jax.eval_shape(optimizer.update, params, after, params)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), again[1]) == shape(after)
    assert shape(updates) == shape(params)
    own = {"ahead": "step", "primal": "z", "tail": "average"}[name]
    assert {x.dtype for x in jax.tree.leaves(getattr(after, own))} == {np.dtype("float32")}
    stored = curvax.portable_state(optimizer, params, after)
    assert_close(curvax.place_state(optimizer, params, stored), after, 0)
    assert f"{own}/kernel" in curvax.state_of(optimizer, params, after, "kernel")
