"""Every published run gives an optimizer, with the paper's learning rate at every step."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import curvax
from curvax.published import RUNS
from curvax.transforms.kronecker._eigenbasis import EigenbasisState
from tests.cells import cells
from tests.helpers import assert_close, weights_of_steps
from tests.reference.decay import decay
from tests.reference.hyperball_methods import adam_directions, adam_h, muon_h
from tests.reference.kl_soap_h import kl_soap_h
from tests.reference.muon import momenta, newton_schulz
from tests.reference.saturated_muon import QUINTIC
from tests.reference.track3_schedules import POWER_FACTORS, cooldown, power_cool

PARAMS = {
    "embedding": jnp.ones((9, 6)),
    "dense": {"kernel": jnp.ones((6, 8)), "bias": jnp.zeros(8)},
    "out": {"kernel": jnp.ones((8, 6))},
    "lm_head": {"kernel": jnp.ones((6, 9))},
}
GRADIENTS = jax.tree.map(lambda x: x + jnp.arange(x.size, dtype=x.dtype).reshape(x.shape), PARAMS)
EPS = 2.0**-23  # of the schedules
OF_METHODS = {name.partition("/")[0]: name for name in RUNS}


def _made(name: str) -> Any:
    run = RUNS[name]
    return run.optimizer(steps=run.steps or 100, learning_rate=run.learning_rate or 1e-3)


@pytest.mark.parametrize("name", cells(RUNS, of=10))
def test_every_run_gives_an_optimizer(name: str) -> None:
    assert jax.eval_shape(_made(name).init, PARAMS)


@pytest.mark.parametrize("method", cells(OF_METHODS, of=32))
def test_every_method_takes_a_step(method: str) -> None:
    """Of the two that start in a warm-up, the second step moves."""
    optimizer = _made(OF_METHODS[method])
    state, update = optimizer.init(PARAMS), jax.jit(optimizer.update)
    for _ in range(2):
        updates, state = update(GRADIENTS, state, PARAMS)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(updates))
    idle = RUNS[OF_METHODS[method]].schedule.idle
    assert np.any(updates["dense"]["kernel"]) == (idle < 2)


def test_the_schedule_is_a_warm_up_and_a_cosine() -> None:
    run = RUNS["alice/llama-130M"]
    rate = run.schedule(0.02, 20_000)
    found = [float(rate(t)) for t in (0, 1000, 2000, 11_000, 20_000)]
    np.testing.assert_allclose(found, [0, 0.01, 0.02, 0.011, 0.002], rtol=1e-5)
    rate = RUNS["shampoo/nanogpt"].schedule(1.0, 2560)
    assert float(rate(127)) == 0 and float(rate(128)) == pytest.approx(0.04)
    assert float(rate(128 + round(0.3 * 2432))) == pytest.approx(1)


def muon_with_decay(gradients: Any, w: Any, *, learning_rates: Any) -> Any:
    """Of a kernel, inputs by outputs."""
    length = np.sqrt(max(1, w.shape[1] / w.shape[0]))
    moments = momenta(gradients, 0.95, True, "trace")
    updates = [length * newton_schulz(m, QUINTIC, eps=1e-8) for _, m in moments]
    return decay(updates, w, learning_rates=learning_rates, weight_decay=0.1)


def adam_alone(gradients: Any, w: Any, *, learning_rates: Any) -> Any:
    """At a fifth of Muon's rate."""
    updates = adam_directions(gradients, b1=0.8, b2=0.98, eps=1e-15)
    return decay(updates, w, learning_rates=np.array(learning_rates) / 5, weight_decay=0.0)


ADAM_H = functools.partial(adam_h, b2=0.98, eps=1e-10)


@pytest.mark.parametrize(
    ("name", "theirs", "of_output"),
    [
        ("muon-h/qwen3-130M", muon_h, ADAM_H),
        ("adam-h/qwen3-520M", ADAM_H, ADAM_H),
        ("muon-marin/qwen3-130M", muon_with_decay, adam_alone),
    ],
)
def test_marin_s_runs_follow_their_transcription(name: str, theirs: Any, of_output: Any) -> None:
    """Of a kernel and of the output layer; without clipping."""
    steps, random = 20, np.random.default_rng(0)
    run = RUNS[name]
    optimizer = run.optimizer(steps=steps, clip=1e9)
    names = ("dense", "lm_head")
    weights, noise = random.standard_normal((6, 8)), random.standard_normal((steps, 6, 8))

    with jax.enable_x64(True):
        params, gradients = ({x: {"kernel": y} for x in names} for y in (weights, noise))
        found = weights_of_steps(optimizer, params, gradients)
    assert run.learning_rate is not None
    rates = [float(run.schedule(run.learning_rate, steps)(t)) for t in range(steps)]
    for x, by in zip(names, (theirs, of_output), strict=True):
        expected = by(list(noise), weights, learning_rates=np.array(rates))
        own = found[x]["kernel"]
        assert_close(own, np.stack(expected), 64, condition=3.4445**5, eps=EPS)


def test_kl_soap_h_follows_its_transcription_from_its_first_statistics_on() -> None:
    """The run here starts from others, as its table says; no two eigenvalues change places."""
    steps, random, shape = 12, np.random.default_rng(0), (6, 6)
    u, v = (np.linalg.qr(random.standard_normal(shape))[0] for _ in range(2))
    sizes = 2.0 ** -np.arange(6)
    noise = 0.1 * random.standard_normal((steps, *shape))
    core = np.sqrt(sizes) * (np.eye(6) * random.uniform(0.7, 1.4, (steps, 1, 6)) + noise)
    gradients, w = u @ (np.sqrt(sizes)[:, None] * core) @ v.T, random.standard_normal(shape)
    run = RUNS["kl-soap-h/track-3"]
    assert run.learning_rate is not None
    rates = [float(run.schedule(run.learning_rate, steps)(t)) for t in range(steps)]
    # Kernels are inputs by outputs, the source's weights their transposes.
    expected, states = kl_soap_h(gradients.mT, w.T, learning_rates=rates)
    start, optimizer = states[0], run.optimizer(steps=steps)

    def started(state: Any) -> Any:
        """With the statistics of the transcription's first step."""
        if not isinstance(state, EigenbasisState):
            return state
        factors = {}
        for side, of in (("left", "R"), ("right", "L")):
            factor, q = getattr(state, side), start[f"Q_{of}"]
            new = {"statistic": q.T @ start[of] @ q, "basis": q, "spectrum": start[f"d_{of}"]}
            new = {x: jnp.asarray(y).reshape(getattr(factor, x).shape) for x, y in new.items()}
            factors[side] = factor._replace(**new)
        return state._replace(**factors)

    found = []
    with jax.enable_x64(True):
        params: Any = {"dense": {"kernel": jnp.asarray(w)}}
        state, update = optimizer.init(params), jax.jit(optimizer.update)
        for gradient in gradients:
            updates, state = update({"dense": {"kernel": jnp.asarray(gradient)}}, state, params)
            params = optax.apply_updates(params, updates)
            if not found:
                state = jax.tree.map(
                    started, state, is_leaf=lambda x: isinstance(x, EigenbasisState)
                )
            found.append(np.asarray(params["dense"]["kernel"]))
    assert_close(np.stack(found).mT, np.stack(expected), 64, condition=100, eps=EPS)
    assert np.abs(expected[-1] - expected[0]).max() > 0.01


def test_a_cooldown_is_a_power_of_the_rest() -> None:
    """As the schedules of the speed records are written."""
    for name, kind in (("record-46/track-3", "matrices"), ("kl-soap-h/track-3", "")):
        run = RUNS[name]
        assert run.learning_rate and run.steps
        t = np.arange(run.steps)
        if kind:
            expected = power_cool(t, *POWER_FACTORS[kind])
        else:
            expected = cooldown(t, 0.018, steps=3125, power=1.5, floor=0.017)
        own = jax.vmap(run.schedule(run.learning_rate, run.steps))(jnp.asarray(t))
        assert_close(np.float64(own), expected, 64, eps=EPS)


def test_a_change_takes_the_place_of_a_published_number() -> None:
    """Such as the column Ppl.*, where Adam trains the last layer."""
    run = RUNS["alice/llama-60M"]
    rule = curvax.MatrixRule(output_layer="auto")
    printed, changed = (
        str(curvax.summarize(run.optimizer(**changes), PARAMS))
        for changes in ({}, {"matrices": rule, "rank": 2})
    )
    assert "rank 2" in changed and changed != printed
