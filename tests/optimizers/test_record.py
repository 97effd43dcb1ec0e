"""The record of modded-nanogpt's track 3 (#46) as the page has it, against its transcription.

Where a first statistic has a null space, its basis is arbitrary, and the trajectory is no function
of the gradients: the transcription then takes the bases of our step, which are checked to be
eigenvectors or, later, the `Q` of a step of orthogonal iteration up to signs, by their statistic.
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
from tests.helpers import assert_close
from tests.project.test_readme import blocks_of
from tests.reference.record_46 import published_settings, record

STEPS = 24
PAGE = Path(__file__).parents[2] / "docs/combinations.md"
(BLOCK,) = (block for block in blocks_of(PAGE) if "def record(" in block)
NAMES: dict[str, Any] = {"curvax": curvax, "jnp": jnp, "optax": optax}
exec(compile(BLOCK, str(PAGE), "exec"), NAMES)
SETTINGS = published_settings(STEPS)
SHAPES = {"square": (6, 6), "wide": (5, 8), "tall": (9, 4)}  # of kernels, inputs by outputs
CONDITION = 1e3 * 2.0**12  # of twelve iterations, behind bases of a condition


def given(shape: Any) -> tuple[Any, Any, Any]:
    """Weights, and the noise and the mean of gradients that also pull at the weights."""
    random = np.random.default_rng(shape)
    noise = random.standard_normal((STEPS, *shape))
    return 0.3 * random.standard_normal(shape), noise, random.standard_normal(shape)


def numbers(values: Any) -> Any:
    return lambda step: jnp.asarray(values)[jnp.minimum(step, STEPS - 1)]


def ours(shape: Any, make: Any, gate: Any = None) -> tuple[list[Any], list[Any], dict[int, Any]]:
    """Weights and what is evaluated after each step, kernels outputs by inputs, and the bases."""
    w, noise, mean = given(shape)
    inject = curvax.inject_hyperparams(make, hyperparam_dtype="float64")
    inner = inject(numbers(SETTINGS.rates), b1=numbers(SETTINGS.momenta), gate=gate)
    ahead = curvax.ema_nesterov(inner, numbers(SETTINGS.lookaheads))
    tau, start, end = (SETTINGS.tail[name] for name in ("tau", "start", "end"))
    optimizer = curvax.tail_average(ahead, int(np.ceil(start)), tau=tau, end=int(end))

    @jax.jit
    def step(params: Any, state: Any, noise: Any) -> Any:
        gradients = jax.tree.map(lambda p: 0.1 * p + mean + noise, params)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    params: Any = {"dense": {"kernel": jnp.asarray(w)}}
    state: Any = optimizer.init(params)
    weights, evaluated, bases = [], [], {}
    for t in range(STEPS):
        params, state = step(params, state, noise[t])
        found = curvax.state_of(optimizer, params, state, "dense/kernel")
        side = {place.split("/")[-2]: x for place, x in found.items() if place.endswith("/basis")}
        bases[t] = tuple(np.asarray(side[name])[0] for name in ("right", "left"))
        inside = curvax.eval_params(state.inner, params)  # what EMA-Nesterov evaluates
        for list_of, tree in ((weights, inside), (evaluated, curvax.eval_params(state, params))):
            list_of.append(np.asarray(tree["dense"]["kernel"]).T)
    return weights, evaluated, bases


@pytest.mark.parametrize("role", ["mlp", "attention_output"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_the_page_has_the_record(shape: Any, role: str) -> None:
    w, noise, mean = given(shape)
    fade = {name: SETTINGS.gate[name] for name in ("floor_end", "fade_end")}
    gate = None
    if role == "attention_output":
        width = fade["fade_end"] - fade["floor_end"]
        gate = curvax.trust_gate(
            lowest=lambda t: 0.45 * jnp.clip((fade["fade_end"] - t) / width, 0.0, 1.0),
            highest=lambda t: jnp.where(t < fade["fade_end"], 0.85, 1.0),
        )
    with jax.enable_x64(True):
        weights, evaluated, bases = ours(shape, NAMES["record"], gate)
    rank = -(-max(shape) // min(shape))  # steps until both statistics have full rank
    gradients = [lambda point, t=t: 0.1 * point + (mean + noise[t]).T for t in range(STEPS)]
    settings = dataclasses.replace(SETTINGS, role=role)
    open_bases = {t: bases[t] for t in range(rank - 1)}
    expected, tail, states = record(gradients, w.T, settings, open_bases)
    assert_close(np.stack(weights), np.stack(expected), 64, condition=CONDITION)
    assert_close(np.stack(evaluated), np.stack(tail), 64, condition=CONDITION)
    for t, own in open_bases.items():
        for q, statistic in zip(own, (states[t]["L"], states[t]["R"]), strict=True):
            assert_close(q.T @ q, np.eye(len(q)), 64)
            turned = q.T @ statistic @ q
            if t == 0:
                assert_close(turned, np.diag(np.diag(turned)), 64)
    assert max(np.abs(states[t]["S"] - states[t]["A"]).max() for t in range(STEPS)) > 0.1


def test_the_recipe_is_the_page_s_and_older_bases_make_a_difference() -> None:
    with jax.enable_x64(True):
        page, recipe = (
            ours(SHAPES["square"], make)[0] for make in (NAMES["record"], curvax.recipes.record_46)
        )
        newer = ours(SHAPES["square"], with_new_bases)[0]
    assert_close(np.stack(page), np.stack(recipe), 0)
    assert np.abs(np.stack(newer) - np.stack(page)).max() > 1e-3


def with_new_bases(learning_rate: Any, b1: Any, gate: Any = None) -> Any:
    """The page's function without the argument that keeps the older bases."""
    block = BLOCK[BLOCK.index("def record(") : BLOCK.index("\n\n\ngate =")]
    assert "lagged=True" in block
    names = dict(NAMES)
    exec(block.replace("lagged=True", "lagged=False"), names)
    return names["record"](learning_rate, b1, gate)


def test_the_page_has_the_schedules_of_the_record() -> None:
    whole = published_settings()
    t = jnp.arange(2900)
    for name, expected in (("rates", "rates"), ("momenta", "momenta"), ("ahead", "lookaheads")):
        own = jax.vmap(NAMES[name])(t)
        assert_close(np.float64(own), getattr(whole, expected), 64, eps=2.0**-23)
