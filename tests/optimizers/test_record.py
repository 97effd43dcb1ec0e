"""The record of modded-nanogpt's track 3 (#46) as the page has it, against its transcription.

Where a first statistic has a null space, its basis is arbitrary, and the trajectory is not a
function of the gradients: until both have full rank the transcription takes our bases, of which the
first are checked to be eigenvectors.
"""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import curvax
from curvax.transforms.kronecker._eigenbasis import EigenbasisState
from tests.cells import cells
from tests.helpers import assert_close, computations, weights_of_steps
from tests.project.test_readme import blocks_of
from tests.reference.record_46 import published_settings, record

STEPS = 20
PAGE = Path(__file__).parents[2] / "docs/combinations.md"
(BLOCK,) = (block for block in blocks_of(PAGE) if "def record(" in block)
NAMES: dict[str, Any] = {"curvax": curvax, "jnp": jnp, "optax": optax}
exec(compile(BLOCK, str(PAGE), "exec"), NAMES)
SETTINGS = published_settings(STEPS)
SHAPES = {"square": (6, 6), "wide": (5, 8), "tall": (9, 4)}  # of kernels, inputs by outputs
CONDITION = 100.0  # of statistics, by whose bases signs of small entries are determined


def given(name: str) -> tuple[Any, Any, Any]:
    """Weights, and the noise and the mean of gradients that also pull at the weights."""
    random = np.random.default_rng(SHAPES[name])
    noise = random.standard_normal((STEPS, *SHAPES[name]))
    return 0.3 * random.standard_normal(SHAPES[name]), noise, random.standard_normal(SHAPES[name])


def numbers(values: Any) -> Any:
    return lambda step: jnp.asarray(values)[jnp.minimum(step, STEPS - 1)]


def fading() -> Any:
    """The gate, at the marks of a run of this length."""
    start, end = (SETTINGS.gate[name] for name in ("floor_end", "fade_end"))
    return curvax.trust_gate(
        lowest=lambda t: 0.45 * jnp.clip((end - t) / (end - start), 0.0, 1.0),
        highest=lambda t: jnp.where(t < end, 0.85, 1.0),
    )


@jax.enable_x64(True)
def ours(make: Any, gate: Any, names: Any) -> dict[str, Any]:
    """By matrix: weights and what is evaluated after each step, and the bases, inputs first."""
    data = {name: given(name) for name in names}
    inject = curvax.inject_hyperparams(make, hyperparam_dtype="float64")
    inner = inject(numbers(SETTINGS.rates), b1=numbers(SETTINGS.momenta), gate=gate)
    ahead = curvax.ema_nesterov(inner, numbers(SETTINGS.lookaheads))
    tau, start, end = (SETTINGS.tail[name] for name in ("tau", "start", "end"))
    optimizer = curvax.tail_average(ahead, int(np.ceil(start)), tau=tau, end=int(end))

    def step(carry: Any, noise: Any) -> Any:
        params, state = carry
        gradients = {n: {"kernel": 0.1 * params[n]["kernel"] + noise[n] + means[n]} for n in data}
        updates, state = optimizer.update(gradients, state, params)
        params = optax.apply_updates(params, updates)
        bases = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, EigenbasisState))
        bases = [x for x in bases if isinstance(x, EigenbasisState)]
        bases = [[getattr(x, side).basis[0] for side in ("left", "right")] for x in bases]
        # Of the inner wrapper: EMA-Nesterov's weights without the lookahead.
        found = curvax.eval_params(state.inner, params), curvax.eval_params(state, params)
        return (params, state), (*found, bases)

    params = {name: {"kernel": jnp.asarray(w)} for name, (w, _, _) in data.items()}
    noise, means = ({name: jnp.asarray(x[i]) for name, x in data.items()} for i in (1, 2))
    run = jax.jit(lambda p: jax.lax.scan(step, (p, optimizer.init(p)), noise)[1])
    weights, evaluated, bases = jax.tree.map(np.asarray, run(params))
    of = {(own[0].shape[-1], own[1].shape[-1]): own for own in bases}
    return {
        name: (weights[name]["kernel"], evaluated[name]["kernel"], of[SHAPES[name]])
        for name in names
    }


@pytest.mark.parametrize("role", cells(["mlp", "attention_output"], of=2))
def test_the_page_has_the_record(role: str) -> None:
    found = ours(NAMES["record"], None if role == "mlp" else fading(), SHAPES)
    settings = dataclasses.replace(SETTINGS, role=role)
    for name, (weights, evaluated, (of_inputs, of_outputs)) in found.items():
        w, noise, mean = given(name)
        gradients = [lambda point, g=(mean + n).T: 0.1 * point + g for n in noise]
        # Steps until both statistics have full rank: before, our bases are those of null spaces.
        full = -(-max(w.shape) // min(w.shape)) - 1
        bases = {t: (of_outputs[t], of_inputs[t]) for t in range(full)}
        expected, tail, states = record(gradients, w.T, settings, bases)
        assert_close(weights.mT, np.stack(expected), 64, condition=CONDITION)
        assert_close(evaluated.mT, np.stack(tail), 64, condition=CONDITION)
        for q, statistic in zip(bases.get(0, ()), (states[0]["L"], states[0]["R"]), strict=False):
            turned = q.T @ statistic @ q
            assert_close(q.T @ q, np.eye(len(q)), 64)
            assert_close(turned, np.diag(np.diag(turned)), 64)
        assert max(np.abs(state["S"] - state["A"]).max() for state in states) > 0.1
        assert np.abs(evaluated - weights).max() > 1e-4


def test_the_recipe_is_the_page_s() -> None:
    params = {"kernel": jnp.ones((6, 6))}
    steps = [
        computations(x.update, params, jax.eval_shape(x.init, params), params)
        for x in (NAMES["record"](0.1, b1=0.9), curvax.recipes.record_46(0.1, b1=0.9))
    ]
    assert steps[0] == steps[1]


def test_the_published_run_is_the_record_with_the_gate_where_attention_ends() -> None:
    """Its schedules are in float32."""
    names = ("dense", "out")
    optimizer = curvax.published.RUNS["record-46/track-3"].optimizer(steps=STEPS)

    w, noise, mean = given("square")
    with jax.enable_x64(True):
        params, gradients = ({n: {"kernel": x} for n in names} for x in (w, mean + noise))
        evaluated = weights_of_steps(optimizer, params, gradients, curvax.eval_params)
    for name, role in (("dense", "mlp"), ("out", "attention_output")):
        settings = dataclasses.replace(SETTINGS, role=role)
        _, tail, _ = record([(mean + n).T for n in noise], w.T, settings)
        own = evaluated[name]["kernel"].mT
        assert_close(own, np.stack(tail), 64, condition=CONDITION, eps=2.0**-23)
    assert np.abs(evaluated["dense"]["kernel"] - evaluated["out"]["kernel"]).max() > 1e-3


def test_the_page_has_the_schedules_of_the_record() -> None:
    whole = published_settings()
    t = jnp.arange(2900)
    for name, expected in (("rates", "rates"), ("momenta", "momenta"), ("ahead", "lookaheads")):
        own = jax.vmap(NAMES[name])(t)
        assert_close(np.float64(own), getattr(whole, expected), 64, eps=2.0**-23)
