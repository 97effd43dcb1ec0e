"""Muon is Optax's Muon on 2-D leaves; what it commutes with and does not depend on."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import curvax
from tests.helpers import ALL_CELLS, assert_close, gradients_like, share, stacked, steps_of
from tests.shared.identities import (
    EPS,
    NEWTON_SCHULZ,
    STEPS,
    all_rotated,
    all_transposed,
    both,
    of_shapes,
    run_muon,
    updates_of,
)

# A factory is compiled once for each of its static settings and shapes.
pytestmark = pytest.mark.xdist_group("Muon reductions")


MATRICES = {
    "wide": {"kernel": np.zeros((6, 10), np.float32)},
    "tall": {"kernel": np.zeros((12, 5), np.float32)},
    "wide again": {"kernel": np.zeros((6, 10), np.float32)},
}
TALL = {"tall": MATRICES["tall"]}
SETTINGS = {
    "defaults": ({}, {}),
    "weight decay, consistent_rms": (
        {"weight_decay": 0.1, "consistent_rms": 0.2},
        {"weight_decay": 0.1, "consistent_rms": 0.2},
    ),
    "without nesterov, three steps": (
        {"nesterov": False, "method": curvax.polar.newton_schulz(3), "b1": 0.8},
        {"nesterov": False, "ns_steps": 3, "beta": 0.8},
    ),
    "bfloat16 momentum": ({"dtype": jnp.bfloat16}, {"mu_dtype": jnp.bfloat16}),
    "rows of coefficients": (
        {
            "method": curvax.polar.newton_schulz(
                2, coefficients=((3.0, -3.2, 1.2), (2.0, -1.5, 0.5)), eps=1e-3
            )
        },
        {"ns_coeffs": ((3.0, -3.2, 1.2), (2.0, -1.5, 0.5)), "ns_steps": 2, "eps": 1e-3},
    ),
}


@pytest.mark.parametrize("case", share(SETTINGS, of=2))
def test_muon_equals_optax_contrib_muon_step_for_step_on_trees_of_2d_leaves(case):
    ours, theirs = SETTINGS[case]
    tree = MATRICES if case == "defaults" or ALL_CELLS else TALL
    params = gradients_like(tree, 1, seed=1)[0]
    gradients = stacked(gradients_like(tree, STEPS, seed=2))
    schedule = optax.cosine_decay_schedule(0.1, STEPS)
    updates = updates_of(curvax.muon(schedule, **ours), gradients, params)
    expected = updates_of(optax.contrib.muon(schedule, **theirs), gradients, params)
    assert_close(steps_of(updates), steps_of(expected), condition=NEWTON_SCHULZ)


@pytest.mark.parametrize(("dtype", "nesterov"), [(None, False), (jnp.bfloat16, True)])
def test_the_momentum_of_muon_equals_that_of_optax_contrib_scale_by_muon(dtype, nesterov):
    gradients = stacked(gradients_like(TALL, STEPS, seed=2))
    axes = jax.tree.map(lambda _: optax.contrib.MuonDimensionNumbers(), TALL)
    theirs = functools.partial(optax.contrib.scale_by_muon, weight_dimension_numbers=axes)
    settings: dict[str, Any] = {"nesterov": nesterov}
    directions, states = both(curvax.scale_by_muon, gradients, dtype=dtype, **settings)
    expected, expected_states = both(theirs, gradients, mu_dtype=dtype, **settings)
    assert_close(steps_of(directions), steps_of(expected), condition=NEWTON_SCHULZ)
    for momentum in jax.tree.leaves(states[0].mu):
        assert momentum.dtype == (dtype or jnp.float32)
    assert_close(steps_of(states[0].mu), steps_of(expected_states.mu), 2.0)
    assert np.array_equal(states[0].count, expected_states.count)


def test_muon_gives_vectors_to_adamw():
    tree = {
        "dense": {"kernel": np.zeros((6, 10), np.float32)},
        "norm": {"scale": np.zeros(9, np.float32), "bias": np.zeros(9, np.float32)},
    }
    params = gradients_like(tree, 1, seed=1)[0]
    gradients = stacked(gradients_like(tree, STEPS, seed=2))
    others = optax.adamw(0.01, weight_decay=0.2)
    optimizer = curvax.muon(0.1, weight_decay=0.3, others=others)
    updates = updates_of(optimizer, gradients, params)
    adamw, muon = (
        updates_of(other, {name: gradients[name]}, {name: params[name]})
        for other, name in (
            (others, "norm"),
            (optax.contrib.muon(0.1, weight_decay=0.3), "dense"),
        )
    )
    assert_close(steps_of(updates), steps_of({**muon, **adamw}), condition=NEWTON_SCHULZ)


def test_without_others_muon_decays_all_parameters_alike():
    params = {
        "w": {"kernel": np.ones((3, 4), np.float32)},
        "norm": {"scale": np.ones(4, np.float32)},
    }
    gradients = stacked([jax.tree.map(np.zeros_like, params)])
    (ours,) = steps_of(updates_of(curvax.muon(0.5, weight_decay=0.1), gradients, params))
    assert_close(ours, jax.tree.map(lambda p: -0.05 * p, params))
    (theirs,) = steps_of(updates_of(optax.contrib.muon(0.5, weight_decay=0.1), gradients, params))
    assert np.array_equal(theirs["norm"]["scale"], np.zeros(4))


MUON = {
    "newton_schulz": ({}, NEWTON_SCHULZ),
    "polar_express": (
        {"method": curvax.polar.newton_schulz(coefficients="polar_express")},
        8.3 * 4.1 * 3.9 * 3.3 * 2.3,
    ),
    "svd": ({"method": "svd"}, 100.0),
}
every_muon = pytest.mark.parametrize("method", MUON)
IN_SHAPES = of_shapes((5, 8), (8, 5), (6, 6))


@every_muon
def test_muon_commutes_with_rotations(method):
    settings, condition = MUON[method]
    plain, rotated = run_muon(IN_SHAPES, **settings), run_muon(all_rotated(IN_SHAPES), **settings)
    assert_close(steps_of(rotated), steps_of(all_rotated(plain)), condition=condition)


@every_muon
def test_muon_commutes_with_permutations_and_signs_of_rows_and_columns(method):
    settings, condition = MUON[method]
    generator = np.random.default_rng(0)
    order = {n: generator.permutation(n) for n in (5, 6, 8)}
    signs = {n: np.where(generator.random(n) < 0.5, -1, 1).astype(np.float32) for n in order}

    def moved(x: np.ndarray) -> np.ndarray:
        m, n = x.shape[-2:]
        return x[:, order[m]][:, :, order[n]] * signs[n]

    plain = run_muon(IN_SHAPES, **settings)
    permuted = run_muon(jax.tree.map(moved, IN_SHAPES), **settings)
    assert_close(steps_of(permuted), steps_of(jax.tree.map(moved, plain)), condition=condition)


@pytest.mark.parametrize("scale", [1e-3, 0.7, 1e4])
def test_muon_hardly_depends_on_the_scale_of_the_gradients(scale):
    scaled = run_muon(jax.tree.map(lambda g: np.float32(scale) * g, IN_SHAPES))
    # Besides rounding there is eps = 1e-8 beside a norm of scale · ‖G‖ > scale.
    eps = EPS + 1e-8 / scale
    assert_close(steps_of(scaled), steps_of(run_muon(IN_SHAPES)), condition=NEWTON_SCHULZ, eps=eps)


@pytest.mark.parametrize("exponent", [-40, -1, 1, 40])
@pytest.mark.parametrize("nesterov", [False, True])
def test_muon_without_eps_ignores_powers_of_two_bit_for_bit(exponent, nesterov):
    scaled = jax.tree.map(lambda g: np.ldexp(g, exponent), IN_SHAPES)
    settings: dict[str, Any] = {"method": curvax.polar.newton_schulz(eps=0.0), "nesterov": nesterov}
    assert_close(run_muon(scaled, **settings), run_muon(IN_SHAPES, **settings), 0.0)


def test_transposing_the_gradient_transposes_the_direction_of_muon():
    plain, transposed = run_muon(IN_SHAPES), run_muon(all_transposed(IN_SHAPES))
    assert_close(steps_of(transposed), steps_of(all_transposed(plain)), condition=NEWTON_SCHULZ)


def test_head_wise_muon_is_muon_per_head():
    attention = {"query": {"kernel": np.zeros((6, 3, 4))}, "out": {"kernel": np.zeros((3, 4, 6))}}
    gradients = stacked(gradients_like(attention, STEPS))
    head_wise = curvax.muon(1.0, matrices=curvax.MatrixRule(head_wise=True))
    updates = updates_of(head_wise, gradients)["query"]["kernel"]
    kernel = gradients["query"]["kernel"]
    alone = updates_of(curvax.muon(1.0), {f"{h}/kernel": kernel[:, :, h] for h in range(3)})
    for h in range(3):
        expected = alone[f"{h}/kernel"]
        assert_close(list(updates[:, :, h]), list(expected), condition=NEWTON_SCHULZ)
