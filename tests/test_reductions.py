"""Theorems about the methods: what they reduce to, what they do not depend on.

Every relation that a docstring in `optimizers/` claims has a test of its name here.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_close, gradients_like, orthogonal, run, with_spectrum

import curvax

NEWTON_SCHULZ = 3.4445**5  # at most this much of a relative error passes through Muon's five steps
STEPS = 6
EPS = float(np.finfo(np.float32).eps)
BFLOAT16_EPS = float(jnp.finfo(jnp.bfloat16).eps)


def _gradients(*shape: int, steps: int = STEPS, condition: float = 10.0) -> list[np.ndarray]:
    """Float32 gradients with singular values from 1 down to 1 / condition."""
    *batch, m, n = shape
    keys = jax.random.split(jax.random.key(0), (steps, *batch)).reshape(-1)
    spectrum = np.geomspace(1, 1 / condition, min(m, n))
    matrices = np.stack([with_spectrum(key, m, n, spectrum) for key in keys])
    return list(matrices.astype(np.float32).reshape(steps, *shape))


# A transformation is compiled once per shape, however often it is made and runs, in one worker.
pytestmark = pytest.mark.xdist_group("reductions")
_muon, _asgo, _racs, _rows_and_columns, _limiter = map(
    functools.cache,
    (
        curvax.scale_by_muon,
        curvax.scale_by_asgo,
        curvax.scale_by_racs,
        curvax.scale_by_rows_and_columns,
        curvax.limit_norm_growth,
    ),
)
_supported = functools.cache(optax.with_extra_args_support)


def _directions(transformation: Any, gradients: list[Any]) -> list[Any]:
    zero = jax.tree.map(np.zeros_like, gradients[0])
    return jax.tree.map(np.asarray, run(_supported(transformation), gradients, zero)[0])


def _largest_condition(momenta: list[np.ndarray]) -> float:
    return max(float(np.linalg.cond(np.asarray(m, np.float64))) for m in momenta)


# Muon


MATRICES = {
    "wide": {"kernel": jnp.zeros((6, 10))},
    "tall": {"kernel": jnp.zeros((12, 5))},
    "wide again": {"kernel": jnp.zeros((6, 10))},
}
SETTINGS = {
    "defaults": ({}, {}),
    "weight decay": (
        {"weight_decay": 0.1, "adam_weight_decay": 0.0},
        {"weight_decay": 0.1},
    ),
    "consistent_rms": ({"consistent_rms": 0.2}, {"consistent_rms": 0.2}),
    "without nesterov, three steps": (
        {"nesterov": False, "steps": 3, "b1": 0.8},
        {"nesterov": False, "ns_steps": 3, "beta": 0.8},
    ),
    "bfloat16 momentum": ({"dtype": jnp.bfloat16}, {"mu_dtype": jnp.bfloat16}),
    "rows of coefficients": (
        {"coefficients": ((3.0, -3.2, 1.2), (2.0, -1.5, 0.5)), "steps": 2, "eps": 1e-3},
        {"ns_coeffs": ((3.0, -3.2, 1.2), (2.0, -1.5, 0.5)), "ns_steps": 2, "eps": 1e-3},
    ),
}


@pytest.mark.parametrize("case", SETTINGS)
def test_muon_equals_optax_contrib_muon_step_for_step_on_trees_of_2d_leaves(case):
    ours, theirs = SETTINGS[case]
    params = gradients_like(MATRICES, 1, seed=1)[0]
    gradients = gradients_like(MATRICES, STEPS, seed=2)
    schedule = optax.cosine_decay_schedule(0.1, STEPS)
    updates, _ = run(curvax.muon(schedule, **ours), gradients, params)
    expected, _ = run(optax.contrib.muon(schedule, **theirs), gradients, params)
    assert_close(updates, expected, condition=NEWTON_SCHULZ)


@pytest.mark.parametrize(("dtype", "nesterov"), [(None, False), (jnp.bfloat16, True)])
def test_the_momentum_of_muon_equals_that_of_optax_contrib_scale_by_muon(dtype, nesterov):
    gradients = gradients_like(MATRICES, STEPS, seed=2)
    ours = _muon(dtype=dtype, nesterov=nesterov)
    axes = jax.tree.map(lambda _: optax.contrib.MuonDimensionNumbers(), MATRICES)
    theirs = optax.contrib.scale_by_muon(
        mu_dtype=dtype, nesterov=nesterov, weight_dimension_numbers=axes
    )
    directions, states = run(ours, gradients, MATRICES)
    expected, expected_states = run(theirs, gradients, MATRICES)
    assert_close(directions, expected, condition=NEWTON_SCHULZ)
    for state, expected_state in zip(states, expected_states, strict=True):
        for momentum in jax.tree.leaves(state[0].mu):
            assert momentum.dtype == (dtype or jnp.float32)
        assert_close(state[0].mu, expected_state.mu, 2.0)
        assert state[0].count == expected_state.count


def test_muon_gives_vectors_to_adamw():
    tree = {**MATRICES, "norm": {"scale": jnp.zeros(9), "bias": jnp.zeros(9)}}
    params, gradients = gradients_like(tree, 1, seed=1)[0], gradients_like(tree, STEPS, seed=2)
    optimizer = curvax.muon(0.1, weight_decay=0.3, adam_learning_rate=0.01, adam_weight_decay=0.2)
    updates, _ = run(optimizer, gradients, params)
    adamw, _ = run(optax.adamw(0.01, weight_decay=0.2), gradients, params)
    muon, _ = run(optax.contrib.muon(0.1, weight_decay=0.3), gradients, params)
    expected = [{**m, "norm": a["norm"]} for m, a in zip(muon, adamw, strict=True)]
    assert_close(updates, expected, condition=NEWTON_SCHULZ)


def test_without_adam_weight_decay_muon_decays_all_parameters_alike():
    params = {"w": {"kernel": jnp.ones((3, 4))}, "norm": {"scale": jnp.ones(4)}}
    gradients = [jax.tree.map(jnp.zeros_like, params)]
    (ours,), _ = run(curvax.muon(0.5, weight_decay=0.1), gradients, params)
    assert_close(ours, jax.tree.map(lambda p: -0.05 * p, params))
    (theirs,), _ = run(optax.contrib.muon(0.5, weight_decay=0.1), gradients, params)
    assert np.array_equal(theirs["norm"]["scale"], np.zeros(4))


MUON = {
    "newton_schulz": ({}, NEWTON_SCHULZ),
    "polar_express": ({"coefficients": "polar_express"}, 8.3 * 4.1 * 3.9 * 3.3 * 2.3),
    "svd": ({"method": "svd"}, 100.0),
}
every_muon = pytest.mark.parametrize("method", MUON)
every_shape = pytest.mark.parametrize("shape", [(5, 8), (8, 5), (6, 6)], ids=str)


@every_muon
@every_shape
def test_muon_commutes_with_rotations(method, shape):
    settings, condition = MUON[method]
    muon, gradients = _muon(**settings), _gradients(*shape)
    left, right = (
        orthogonal(jax.random.key(i), size, size).astype(np.float32) for i, size in enumerate(shape)
    )
    plain = _directions(muon, gradients)
    rotated = _directions(muon, [left @ g @ right for g in gradients])
    assert_close(rotated, [left @ d @ right for d in plain], condition=condition)


@every_muon
def test_muon_commutes_with_permutations_and_signs_of_rows_and_columns(method):
    settings, condition = MUON[method]
    generator = np.random.default_rng(0)
    rows, columns = generator.permutation(8), generator.permutation(5)
    signs = np.where(generator.random(5) < 0.5, -1, 1).astype(np.float32)

    def moved(x: Any) -> np.ndarray:
        return np.asarray(x)[rows][:, columns] * signs

    muon, gradients = _muon(**settings), _gradients(8, 5)
    plain = _directions(muon, gradients)
    permuted = _directions(muon, [moved(g) for g in gradients])
    assert_close(permuted, [moved(d) for d in plain], condition=condition)


@pytest.mark.parametrize("scale", [1e-3, 0.7, 1e4])
def test_muon_hardly_depends_on_the_scale_of_the_gradients(scale):
    muon, gradients = _muon(), _gradients(5, 8)
    plain = _directions(muon, gradients)
    scaled = _directions(muon, [np.float32(scale) * g for g in gradients])
    # Besides rounding there is eps = 1e-8 beside a norm of scale · ‖G‖ > scale.
    assert_close(scaled, plain, condition=NEWTON_SCHULZ, eps=EPS + 1e-8 / scale)


@pytest.mark.parametrize("exponent", [-40, -1, 1, 40])
@pytest.mark.parametrize("nesterov", [False, True])
def test_muon_without_eps_ignores_powers_of_two_bit_for_bit(exponent, nesterov):
    muon = _muon(eps=0.0, nesterov=nesterov)
    gradients = _gradients(5, 8, steps=3)
    scaled = _directions(muon, [np.ldexp(g, exponent) for g in gradients])
    assert_close(scaled, _directions(muon, gradients), 0.0)


@pytest.mark.parametrize("shape", [(5, 8), (8, 5)], ids=str)
def test_transposing_the_gradient_transposes_the_direction_of_muon(shape):
    gradients = _gradients(*shape)
    plain = _directions(_muon(), gradients)
    transposed = _directions(_muon(), [g.T for g in gradients])
    assert_close(transposed, [d.T for d in plain], condition=NEWTON_SCHULZ)


def test_head_wise_muon_is_muon_per_head():
    gradients = gradients_like({"query": {"kernel": jnp.zeros((6, 3, 4))}}, STEPS)
    updates = _directions(curvax.muon(1.0, head_wise=True), gradients)
    per_head = curvax.muon(1.0)
    for h in range(3):
        alone = [{"kernel": np.asarray(g["query"]["kernel"])[:, h]} for g in gradients]
        expected = [d["kernel"] for d in _directions(per_head, alone)]
        ours = [d["query"]["kernel"][:, h] for d in updates]
        assert_close(ours, expected, condition=NEWTON_SCHULZ)


# ASGO


def test_asgo_from_momentum_with_b2_0_eps_0_refresh_1_is_exact_muon_without_nesterov():
    shapes = [(5, 9), (9, 5), (6, 6), (1, 7)]
    with jax.enable_x64(True):
        gradients = [
            {str(s): g.astype(np.float64) for s, g in zip(shapes, together, strict=True)}
            for together in zip(*(_gradients(*s) for s in shapes), strict=True)
        ]
        asgo = _asgo(variant="from_momentum", b1=0.9, b2=0.0, eps=0.0)
        muon = _muon(method="svd", nesterov=False, b1=0.9)
        directions, states = run(asgo, gradients, jax.tree.map(jnp.zeros_like, gradients[0]))
        expected = _directions(muon, gradients)
        for name in gradients[0]:
            # V = M Mᵀ has the square of M's condition number, its inverse root M's.
            momenta = [state.momentum.mu[name] for state in states]
            condition = _largest_condition(momenta) ** 2
            for t in range(STEPS):
                assert_close(directions[t][name], expected[t][name], condition=condition)


def test_that_relation_of_asgo_and_muon_holds_in_float32_for_well_conditioned_momenta():
    gradients = _gradients(5, 20)
    asgo = _asgo(variant="from_momentum", b1=0.9, b2=0.0, eps=0.0)
    directions, states = run(asgo, gradients, np.zeros_like(gradients[0]))
    condition = _largest_condition([state.momentum.mu for state in states]) ** 2
    muon = _muon(method="svd", nesterov=False, b1=0.9)
    assert_close(directions, _directions(muon, gradients), condition=condition)


@pytest.mark.parametrize("setting", [{"eps": 1e-6}, {"b2": 0.5}, {"refresh": 2}])
def test_asgo_from_momentum_is_not_muon_without_these_settings(setting):
    exact = {"variant": "from_momentum", "b1": 0.9, "b2": 0.0, "eps": 0.0, "refresh": 1}
    with jax.enable_x64(True):
        gradients = [g.astype(np.float64) for g in _gradients(5, 9)]
        directions = _directions(_asgo(**{**exact, **setting}), gradients)
        muon = _muon(method="svd", nesterov=False, b1=0.9)
        with pytest.raises(AssertionError, match="exceeds the bound"):
            assert_close(directions, _directions(muon, gradients), condition=1e4)


@pytest.mark.parametrize("variant", ["practical", "from_momentum"])
@pytest.mark.parametrize("shape", [(4, 9), (9, 4)], ids=str)
def test_transposing_a_non_square_gradient_transposes_the_direction_of_asgo(variant, shape):
    asgo = _asgo(variant=variant, refresh=2)
    gradients = _gradients(*shape)
    plain = _directions(asgo, gradients)
    transposed = _directions(asgo, [g.T for g in gradients])
    assert_close(transposed, [d.T for d in plain], condition=100.0)


def test_a_square_gradient_is_preconditioned_on_the_right_so_that_transposing_it_does_not():
    asgo, gradients = _asgo(), _gradients(6, 6)
    plain = _directions(asgo, gradients)
    transposed = _directions(asgo, [g.T for g in gradients])
    with pytest.raises(AssertionError, match="exceeds the bound"):
        assert_close(transposed, [d.T for d in plain], condition=100.0)
    right = _directions(_asgo(side="right"), gradients)
    left = _directions(_asgo(side="left"), [g.T for g in gradients])
    assert_close(plain, right, 0.0)
    assert_close(plain, [d.T for d in left], condition=100.0)


@pytest.mark.parametrize("variant", ["practical", "from_momentum", "theoretical"])
@pytest.mark.parametrize("shape", [(4, 9), (9, 4)], ids=str)
def test_asgo_commutes_with_rotations(variant, shape):
    # The left side of a tall gradient has rank 4 of 9 at first: the range decides without damping.
    side = None if variant != "theoretical" else ("left" if shape[0] < shape[1] else "right")
    asgo = _asgo(variant=variant, side=side)
    left, right = (
        orthogonal(jax.random.key(i), size, size).astype(np.float32) for i, size in enumerate(shape)
    )
    gradients = _gradients(*shape)
    plain = _directions(asgo, gradients)
    rotated = _directions(asgo, [left @ g @ right for g in gradients])
    assert_close(rotated, [left @ d @ right for d in plain], condition=100.0)


def test_asgo_gives_a_vector_bias_or_scale_one_adaptive_number_as_adagrad_norm():
    b1, b2, eps = 0.8, 0.7, 1e-3
    shapes = {"vector": (5,), "dense/bias": (3,), "norm/scale": (2, 4), "temperature": ()}
    tree = {name: jnp.zeros(shape) for name, shape in shapes.items()}
    gradients = gradients_like(tree, STEPS)
    updates = _directions(curvax.asgo(1.0, b1=b1, b2=b2, eps=eps), gradients)
    for name in shapes:
        m, v = np.zeros(shapes[name]), 0.0
        for t, gradient in enumerate(gradients):
            g = np.asarray(gradient[name], np.float64)
            m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * np.sum(g**2)
            assert_close(updates[t][name], -m / np.sqrt(v + eps))


def test_theoretical_asgo_of_a_vector_is_adagrad_norm():
    tree, eps = {"vector": jnp.zeros(5)}, 0.1
    gradients = gradients_like(tree, STEPS)
    updates = _directions(curvax.asgo(1.0, variant="theoretical", eps=eps), gradients)
    total = 0.0
    for update, gradient in zip(updates, gradients, strict=True):
        g = np.asarray(gradient["vector"], np.float64)
        total += np.sum(g**2)
        assert_close(update["vector"], -g / (np.sqrt(total) + eps))


@pytest.mark.parametrize("way", ["head_wise", "column_heads", "row_heads"])
def test_head_wise_asgo_is_asgo_per_head(way):
    settings = {"refresh": 2, "eps": 1e-3}
    heads = gradients_like({"query": {"kernel": jnp.zeros((6, 3, 4))}}, STEPS)
    kernels = [np.asarray(g["query"]["kernel"]) for g in heads]
    if way == "head_wise":
        optimizer = curvax.asgo(1.0, head_wise=True, **settings)
        updates = [d["query"]["kernel"] for d in _directions(optimizer, heads)]
    elif way == "column_heads":
        axes = {"merged": curvax.MatrixAxes(0, 1, column_heads=3)}
        optimizer = curvax.asgo(1.0, weight_dimension_numbers=axes, **settings)
        merged = [{"merged": k.reshape(6, 12)} for k in kernels]
        updates = [d["merged"].reshape(6, 3, 4) for d in _directions(optimizer, merged)]
    else:
        axes = {"merged": curvax.MatrixAxes(0, 1, row_heads=3)}
        optimizer = curvax.asgo(1.0, weight_dimension_numbers=axes, **settings)
        merged = [{"merged": k.transpose(1, 0, 2).reshape(18, 4)} for k in kernels]
        parts = [d["merged"].reshape(3, 6, 4) for d in _directions(optimizer, merged)]
        updates = [part.transpose(1, 0, 2) for part in parts]
    per_head = _asgo(**settings)
    for h in range(3):
        alone = _directions(per_head, [k[:, h] for k in kernels])
        assert_close([-d[:, h] for d in updates], alone, condition=30.0)


# DASGO


def test_dasgo_on_a_matrix_with_one_row_is_adam_without_bias_correction_its_epsilon_inside():
    b1, b2, eps = 0.8, 0.7, 1e-3
    tree = {"row": {"kernel": jnp.zeros((1, 6))}, "vector": jnp.zeros(5), "scalar": jnp.zeros(())}
    gradients = jax.tree.map(np.asarray, gradients_like(tree, STEPS))
    updates = _directions(curvax.dasgo(1.0, b1=b1, b2=b2, eps=eps), gradients)
    m, v = (jax.tree.map(np.zeros_like, gradients[0]) for _ in "mv")
    for update, gradient in zip(updates, gradients, strict=True):
        m = optax.tree.update_moment(gradient, m, b1, 1)
        v = optax.tree.update_moment(gradient, v, b2, 2)
        assert_close(update, jax.tree.map(lambda m, v: -m / np.sqrt(v + eps), m, v))


# Shampoo and its refresh policies


@pytest.mark.parametrize(
    "base", [optax.sgd, lambda lr: optax.adamw(lr, weight_decay=0.1), optax.rmsprop]
)
def test_shampoo_grafted_and_never_refreshed_is_its_base_optimizer(base):
    params, gradients = gradients_like(MATRICES, 1, seed=1)[0], gradients_like(MATRICES, STEPS)
    shampoo = curvax.shampoo(0.1, refresh=10**6, statistics_every=1, base=base)
    updates, _ = run(shampoo, gradients, params)
    assert_close(updates, run(base(0.1), gradients, params)[0])


@pytest.mark.parametrize("shape", [(4, 7), (5, 5)], ids=str)
def test_transposing_the_gradient_transposes_the_direction_of_shampoo(shape):
    shampoo = curvax.scale_by_shampoo(refresh=2, statistics_every=1, eps=1e-3)
    gradients = _gradients(*shape)
    plain = _directions(shampoo, gradients)
    transposed = _directions(shampoo, [g.T for g in gradients])
    assert_close(transposed, [d.T for d in plain], condition=1e3)  # relative damping: 1 / eps


def _stale_shampoo(refresh: Any) -> Any:
    """Shampoo as FOAM and DR-Shampoo have it, with another refresh policy."""
    return curvax.scale_by_shampoo(
        refresh=refresh,
        b2=0.995,
        eps=1e-4,
        root=2,
        statistics_every=1,
        graft="adam",
        damping="absolute",
        initial=0.0,
    )


NEVER_AGAIN = curvax.every(10**6, offset=1)
EVERY_CHECK = curvax.every(2, offset=1)
POLICIES = {
    "foam with an infinite threshold is stale shampoo refreshed once": (
        curvax.scale_by_foam(check_every=2, threshold=float("inf"), max_damping=1.0, eps=1e-4),
        NEVER_AGAIN,
        [1] * STEPS,
    ),
    "foam with a threshold next to 0 is shampoo refreshed at every check": (
        curvax.scale_by_foam(check_every=2, threshold=1e-12, max_damping=1e-3, eps=1e-4),
        EVERY_CHECK,
        [1, 1, 2, 2, 3, 3],
    ),
    "dr_shampoo with a threshold next to 0 is shampoo refreshed at every check": (
        curvax.scale_by_dr_shampoo(check_every=2, threshold=1e-12, eps=1e-4),
        EVERY_CHECK,
        [1, 1, 2, 2, 3, 3],
    ),
}


@pytest.mark.parametrize("relation", POLICIES)
def test_a_refresh_policy_at_its_limit_is_shampoo(relation):
    transformation, refresh, refreshes = POLICIES[relation]
    with jax.enable_x64(True):
        gradients = [g.astype(np.float64) for g in _gradients(4, 6)]
        directions, states = run(transformation, gradients, np.zeros((4, 6)))
        expected = _directions(_stale_shampoo(refresh), gradients)
        # Both factors have norm at most 1, and are damped by eps.
        assert_close(directions, expected, condition=1e4)
    for factor in ("left", "right"):
        assert [int(getattr(s.direction, factor).refreshes) for s in states] == refreshes


# RACS


def _leading_pair(squares: np.ndarray) -> tuple[np.ndarray, np.ndarray, float]:
    """The unit vectors `q` and `s` of the leading singular pair, and the singular value."""
    u, values, vt = np.linalg.svd(squares, full_matrices=False)
    return np.abs(u[:, 0]), np.abs(vt[0]), float(values[0])


@pytest.mark.parametrize("shape", [(6, 10), (10, 6), (7, 7), (1, 5)], ids=str)
def test_without_averaging_and_with_many_iterations_the_scales_are_the_leading_singular_pair(shape):
    gradient = gradients_like(jnp.zeros(shape), 1)[0]
    racs = _racs(b2=0.0, iterations=20)
    _, (state,) = run(racs, [gradient], gradient)
    q, s = np.asarray(state[0].rows), np.asarray(state[0].columns)
    expected_q, expected_s, value = _leading_pair(np.asarray(gradient, np.float64) ** 2)
    assert_close(np.outer(q, s), value * np.outer(expected_q, expected_s), eps=EPS)
    assert_close(q / np.linalg.norm(q), expected_q, eps=EPS)
    assert_close(s / np.linalg.norm(s), expected_s, eps=EPS)


def test_five_rounds_reach_the_leading_singular_pair_and_one_round_does_not():
    # Proposition 3: each round multiplies the error by the squared ratio of the singular values.
    squares = np.random.default_rng(0).standard_normal((128, 256)) ** 2
    q, s, value = _leading_pair(squares)
    best = value * np.outer(q, s)
    second = np.linalg.norm(squares - best, 2)
    errors = []
    with jax.enable_x64(True):
        for rounds in (1, 2, 5):
            q, s = curvax.row_column_scales(jnp.asarray(squares), rounds)
            errors.append(np.linalg.norm(np.outer(q, s) - best) / value)
    assert 1e-3 < errors[0] < 5e-2 and errors[2] < 1e-6
    assert errors[1] <= errors[0] * (second / value) ** 2
    assert errors[2] <= errors[1] * (second / value) ** 6


@pytest.mark.parametrize("exponent", [-40, -20, -1, 1, 20, 40])
def test_directions_of_racs_do_not_depend_on_the_scale_of_the_gradient_when_b2_is_0(exponent):
    # Powers of two are exact: not one bit may change.
    racs, gradients = _racs(b2=0.0), _gradients(5, 8)
    scaled = [np.ldexp(g, exponent) for g in gradients]
    assert_close(_directions(racs, scaled), _directions(racs, gradients), 0.0)


def test_directions_of_racs_do_not_depend_on_the_scales_of_single_gradients_when_b2_is_0():
    racs, gradients = _racs(b2=0.0), _gradients(5, 8)
    scaled = [np.float32(3.7 ** (t % 3)) * g for t, g in enumerate(gradients)]
    assert_close(_directions(racs, scaled), _directions(racs, gradients), 32.0)


def test_directions_of_racs_do_depend_on_the_scales_of_single_gradients_when_b2_is_not_0():
    racs, gradients = _racs(b2=0.9, gamma=1e6), _gradients(5, 8)
    scaled = [np.float32(3.7 ** (t % 3)) * g for t, g in enumerate(gradients)]
    with pytest.raises(AssertionError, match="exceeds the bound"):
        assert_close(_directions(racs, scaled), _directions(racs, gradients), 32.0)


def test_racs_removes_scales_of_rows_and_columns():
    # diag(a) X diag(c) with constant |X| has rank 1 in its squares: RACS gives back X, scaled.
    generator = np.random.default_rng(0)
    signs = np.where(generator.random((6, 9)) < 0.5, -1.0, 1.0)
    rows, columns = 10 ** generator.uniform(-2, 2, 6), 10 ** generator.uniform(-2, 2, 9)
    gradient = jnp.asarray(rows[:, None] * signs * columns, jnp.float32)
    (direction,) = _directions(_racs(b2=0.0, scale=1.0), [gradient])
    assert_close(direction, signs)


def test_the_first_direction_of_racs_is_longer_by_1_over_1_minus_b2():
    gradients = _gradients(5, 8, steps=1)
    (plain,) = _directions(_racs(b2=0.0), gradients)
    (averaged,) = _directions(_racs(b2=0.75), gradients)
    (corrected,) = _directions(_racs(b2=0.75, bias_correction=True), gradients)
    assert_close(averaged, 4 * plain)
    assert_close(corrected, plain)


def test_racs_commutes_with_permutations_and_signs_but_not_with_rotations():
    gradients = _gradients(5, 8)
    generator = np.random.default_rng(0)
    rows, columns = generator.permutation(5), generator.permutation(8)

    def moved(x: Any) -> np.ndarray:
        return -np.asarray(x)[rows][:, columns]

    plain = _directions(_racs(), gradients)
    permuted = _directions(_racs(), [moved(g) for g in gradients])
    assert_close(permuted, [moved(d) for d in plain], 32.0)
    rotation = orthogonal(jax.random.key(0), 8, 8).astype(np.float32)
    rotated = _directions(_racs(), [g @ rotation for g in gradients])
    with pytest.raises(AssertionError, match="exceeds the bound"):
        assert_close(rotated, [d @ rotation for d in plain], 32.0)


def test_transposing_the_gradient_transposes_the_direction_of_racs_in_the_limit():
    # The five rounds of the paper start from the rows. Averages of s and q depend on their ratio,
    # which the fixed point leaves open.
    racs, gradients = _racs(b2=0.0, iterations=20), _gradients(5, 8)
    plain = _directions(racs, gradients)
    assert_close(_directions(racs, [g.T for g in gradients]), [d.T for d in plain], 32.0)


# The limiter


def _limited(gamma: float, gradients: list[Any]) -> list[Any]:
    return _directions(_limiter(gamma), gradients)


def _norms(matrices: list[Any]) -> np.ndarray:
    return np.stack([np.linalg.norm(np.asarray(x, np.float64), axis=(-2, -1)) for x in matrices])


def _jumping() -> list[np.ndarray]:
    """A batch of two whose norms jump by factors between 1e-3 and 1e3."""
    generator = np.random.default_rng(0)
    scales = 10 ** generator.uniform(-3, 3, (20, 2, 1, 1))
    return list((scales * generator.standard_normal((20, 2, 4, 6))).astype(np.float32))


@pytest.mark.parametrize("gamma", [1.0, 1.01, 3.0])
def test_norms_never_grow_by_more_than_gamma(gamma):
    gradients = _jumping()
    directions = _limited(gamma, gradients)
    given, norms = _norms(gradients), _norms(directions)
    assert np.all(norms[1:] <= gamma * norms[:-1] * (1 + 16 * EPS))
    # Not one bit less than that either: what may stay as it is stays.
    expected = [given[0]]
    for norm in given[1:]:
        expected.append(np.minimum(norm, gamma * expected[-1]))
    assert_close(norms, np.stack(expected), 2.0 * len(gradients), eps=EPS)
    cosines = [np.sum(d * g, axis=(-2, -1)) for d, g in zip(directions, gradients, strict=True)]
    assert_close(np.stack(cosines), norms * given, eps=EPS)


def test_norms_of_bfloat16_never_grow_by_more_than_gamma_and_its_rounding():
    gradients = [jnp.asarray(g, jnp.bfloat16) for g in _jumping()]
    directions = _limited(1.01, gradients)
    assert all(d.dtype == jnp.bfloat16 for d in directions)
    # Rounding does not build up: the norm to compare with is kept in float32.
    ideal = [_norms(gradients[:1])[0]]
    for norm in _norms(gradients)[1:]:
        ideal.append(np.minimum(norm, 1.01 * ideal[-1]))
    norms = _norms(directions)
    assert np.all(norms <= np.stack(ideal) * (1 + BFLOAT16_EPS))


def test_a_zero_gradient_does_not_stop_the_limited_direction_forever():
    gradients = _jumping()[:6]
    gradients[2] = np.zeros_like(gradients[2])
    directions = _limited(1.01, gradients)
    assert np.array_equal(directions[2], gradients[2])
    assert np.array_equal(directions[3], gradients[3])
    assert np.all(_norms(directions)[3:] > 0)


def test_a_matrix_whose_first_gradients_are_zero_is_not_limited_by_them():
    gradients = [np.zeros((3, 4), np.float32)] * 2 + _gradients(3, 4, steps=2)
    directions = _limited(1.01, gradients)
    assert np.array_equal(directions[2], gradients[2])


def test_an_infinite_gamma_is_the_identity():
    gradients = _jumping()
    assert_close(_limited(float("inf"), gradients), gradients, 0.0)
    racs = _racs(gamma=float("inf"), scale=1.0)
    scaled = _rows_and_columns(0.9)
    assert_close(_directions(racs, gradients), _directions(scaled, gradients), 0.0)


def test_matrices_of_a_batch_are_limited_apart():
    gradients = _jumping()
    limiter = _limiter(1.01)
    together = _directions(limiter, gradients)
    for b in range(2):
        alone = _directions(limiter, [g[b] for g in gradients])
        assert_close([d[b] for d in together], alone, 4.0)
