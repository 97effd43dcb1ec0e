"""Theorems about the methods: what they reduce to, what they do not depend on.

Every relation that a docstring in `optimizers/` claims has a test of its name here; those of the
Kronecker-factored methods are in `test_kronecker_reductions.py`. Numbers such as decay rates are
data of the compiled programs.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import ALL_CELLS, assert_close, gradients_like, orthogonal, share, with_spectrum

import curvax

NEWTON_SCHULZ = 3.4445**5  # at most this much of a relative error passes through Muon's five steps
STEPS = 6
EPS = float(np.finfo(np.float32).eps)
BFLOAT16_EPS = float(jnp.finfo(jnp.bfloat16).eps)


def _gradients(*shape: int, steps: int = STEPS, condition: float = 10.0) -> np.ndarray:
    """Float32 gradients with singular values from 1 down to 1 / condition; steps come first."""
    *batch, m, n = shape
    keys = jax.random.split(jax.random.key(0), (steps, *batch)).reshape(-1)
    spectrum = np.geomspace(1, 1 / condition, min(m, n))
    matrices = np.stack([with_spectrum(key, m, n, spectrum) for key in keys])
    return matrices.astype(np.float32).reshape(steps, *shape)


def _of_shapes(*shapes: tuple[int, ...]) -> dict[str, np.ndarray]:
    return {str(shape): _gradients(*shape) for shape in shapes}


def _stacked(trees: list[Any]) -> Any:
    return jax.tree.map(lambda *x: np.stack(x), *trees)


def _steps(tree: Any) -> list[Any]:
    return [jax.tree.map(lambda x, t=t: x[t], tree) for t in range(len(jax.tree.leaves(tree)[0]))]


# A factory is compiled once for each of its static settings and shapes.
pytestmark = pytest.mark.xdist_group("reductions")


@functools.cache
def _compiled(factory: Callable[..., Any], settings: tuple[tuple[str, Any], ...]) -> Any:
    """Directions and states of all steps, from gradients and the arguments that are data."""

    def trajectory(gradients: Any, data: dict[str, Any], params: Any = None) -> Any:
        arguments = {**dict(settings), **data}
        if "period" in data:
            arguments["refresh"] = curvax.every(arguments.pop("period"), offset=1)
        transformation = optax.with_extra_args_support(factory(**arguments))
        if params is None:
            params = jax.tree.map(lambda g: jnp.zeros_like(g[0]), gradients)

        def step(state: Any, gradient: Any) -> Any:
            direction, state = transformation.update(gradient, state, params)
            return state, (direction, state)

        return jax.lax.scan(step, transformation.init(params), gradients)[1]

    return jax.jit(trajectory)


def _both(factory: Any, gradients: Any, data: Any = None, **settings: Any) -> tuple[Any, Any]:
    """Directions and states of all steps, which come first."""
    run = _compiled(factory, tuple(settings.items()))
    return jax.tree.map(np.asarray, run(gradients, data or {}))


def _muon(
    gradients: Any, b1: float = 0.95, eps: float = 1e-8, nesterov: bool = True, **settings: Any
) -> Any:
    data = {"b1": b1, "eps": eps}
    return _both(curvax.scale_by_muon, gradients, data, nesterov=nesterov, **settings)[0]


def _asgo(gradients: Any, variant: str = "practical", side: Any = None, **data: Any) -> Any:
    """Directions and states."""
    numbers = {"b1": 0.9, "b2": 0.95} if variant != "theoretical" else {}
    numbers |= {"eps": 1e-6, "period": 1}
    factory = curvax.scale_by_asgo
    return _both(factory, gradients, {**numbers, **data}, variant=variant, side=side)


def _racs(gradients: Any, iterations: int = 5, bias_correction: bool = False, **data: Any) -> Any:
    """Directions and states."""
    settings = {"iterations": iterations, "bias_correction": bias_correction}
    numbers = {"b2": 0.9, "gamma": 1.01, "scale": 0.05}
    return _both(curvax.scale_by_racs, gradients, {**numbers, **data}, **settings)


def _updates(optimizer: Any, gradients: Any, params: Any = None) -> Any:
    """A full optimizer's, of all steps; the parameters stay as they are, at 0 without any."""
    return jax.tree.map(np.asarray, _compiled(lambda: optimizer, ())(gradients, {}, params)[0])


def _largest_condition(momenta: list[np.ndarray]) -> float:
    return max(float(np.linalg.cond(np.asarray(m, np.float64))) for m in momenta)


# Muon


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
    tree = MATRICES if case == "defaults" or ALL_CELLS else TALL
    params = gradients_like(tree, 1, seed=1)[0]
    gradients = _stacked(gradients_like(tree, STEPS, seed=2))
    schedule = optax.cosine_decay_schedule(0.1, STEPS)
    updates = _updates(curvax.muon(schedule, **ours), gradients, params)
    expected = _updates(optax.contrib.muon(schedule, **theirs), gradients, params)
    assert_close(_steps(updates), _steps(expected), condition=NEWTON_SCHULZ)


@pytest.mark.parametrize(("dtype", "nesterov"), [(None, False), (jnp.bfloat16, True)])
def test_the_momentum_of_muon_equals_that_of_optax_contrib_scale_by_muon(dtype, nesterov):
    gradients = _stacked(gradients_like(TALL, STEPS, seed=2))
    axes = jax.tree.map(lambda _: optax.contrib.MuonDimensionNumbers(), TALL)
    theirs = functools.partial(optax.contrib.scale_by_muon, weight_dimension_numbers=axes)
    settings: dict[str, Any] = {"nesterov": nesterov}
    directions, states = _both(curvax.scale_by_muon, gradients, dtype=dtype, **settings)
    expected, expected_states = _both(theirs, gradients, mu_dtype=dtype, **settings)
    assert_close(_steps(directions), _steps(expected), condition=NEWTON_SCHULZ)
    for momentum in jax.tree.leaves(states[0].mu):
        assert momentum.dtype == (dtype or jnp.float32)
    assert_close(_steps(states[0].mu), _steps(expected_states.mu), 2.0)
    assert np.array_equal(states[0].count, expected_states.count)


def test_muon_gives_vectors_to_adamw():
    tree = {
        "dense": {"kernel": np.zeros((6, 10), np.float32)},
        "norm": {"scale": np.zeros(9, np.float32), "bias": np.zeros(9, np.float32)},
    }
    params = gradients_like(tree, 1, seed=1)[0]
    gradients = _stacked(gradients_like(tree, STEPS, seed=2))
    others = optax.adamw(0.01, weight_decay=0.2)
    optimizer = curvax.muon(0.1, weight_decay=0.3, others=others)
    updates = _updates(optimizer, gradients, params)
    adamw, muon = (
        _updates(other, {name: gradients[name]}, {name: params[name]})
        for other, name in (
            (others, "norm"),
            (optax.contrib.muon(0.1, weight_decay=0.3), "dense"),
        )
    )
    assert_close(_steps(updates), _steps({**muon, **adamw}), condition=NEWTON_SCHULZ)


def test_without_others_muon_decays_all_parameters_alike():
    params = {
        "w": {"kernel": np.ones((3, 4), np.float32)},
        "norm": {"scale": np.ones(4, np.float32)},
    }
    gradients = _stacked([jax.tree.map(np.zeros_like, params)])
    (ours,) = _steps(_updates(curvax.muon(0.5, weight_decay=0.1), gradients, params))
    assert_close(ours, jax.tree.map(lambda p: -0.05 * p, params))
    (theirs,) = _steps(_updates(optax.contrib.muon(0.5, weight_decay=0.1), gradients, params))
    assert np.array_equal(theirs["norm"]["scale"], np.zeros(4))


MUON = {
    "newton_schulz": ({}, NEWTON_SCHULZ),
    "polar_express": ({"coefficients": "polar_express"}, 8.3 * 4.1 * 3.9 * 3.3 * 2.3),
    "svd": ({"method": "svd"}, 100.0),
}
every_muon = pytest.mark.parametrize("method", MUON)
IN_SHAPES = _of_shapes((5, 8), (8, 5), (6, 6))


def _rotated(tree: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    def turned(x: np.ndarray) -> np.ndarray:
        left, right = (
            orthogonal(jax.random.key(i), size, size).astype(x.dtype)
            for i, size in enumerate(x.shape[-2:])
        )
        return left @ x @ right

    return jax.tree.map(turned, tree)


def _transposed(tree: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Every matrix transposed, under the name of its new shape."""
    return {str(x.mT.shape[1:]): x.mT for x in tree.values()}


@every_muon
def test_muon_commutes_with_rotations(method):
    settings, condition = MUON[method]
    plain, rotated = _muon(IN_SHAPES, **settings), _muon(_rotated(IN_SHAPES), **settings)
    assert_close(_steps(rotated), _steps(_rotated(plain)), condition=condition)


@every_muon
def test_muon_commutes_with_permutations_and_signs_of_rows_and_columns(method):
    settings, condition = MUON[method]
    generator = np.random.default_rng(0)
    order = {n: generator.permutation(n) for n in (5, 6, 8)}
    signs = {n: np.where(generator.random(n) < 0.5, -1, 1).astype(np.float32) for n in order}

    def moved(x: np.ndarray) -> np.ndarray:
        m, n = x.shape[-2:]
        return x[:, order[m]][:, :, order[n]] * signs[n]

    plain = _muon(IN_SHAPES, **settings)
    permuted = _muon(jax.tree.map(moved, IN_SHAPES), **settings)
    assert_close(_steps(permuted), _steps(jax.tree.map(moved, plain)), condition=condition)


@pytest.mark.parametrize("scale", [1e-3, 0.7, 1e4])
def test_muon_hardly_depends_on_the_scale_of_the_gradients(scale):
    scaled = _muon(jax.tree.map(lambda g: np.float32(scale) * g, IN_SHAPES))
    # Besides rounding there is eps = 1e-8 beside a norm of scale · ‖G‖ > scale.
    eps = EPS + 1e-8 / scale
    assert_close(_steps(scaled), _steps(_muon(IN_SHAPES)), condition=NEWTON_SCHULZ, eps=eps)


@pytest.mark.parametrize("exponent", [-40, -1, 1, 40])
@pytest.mark.parametrize("nesterov", [False, True])
def test_muon_without_eps_ignores_powers_of_two_bit_for_bit(exponent, nesterov):
    scaled = jax.tree.map(lambda g: np.ldexp(g, exponent), IN_SHAPES)
    settings: dict[str, Any] = {"eps": 0.0, "nesterov": nesterov}
    assert_close(_muon(scaled, **settings), _muon(IN_SHAPES, **settings), 0.0)


def test_transposing_the_gradient_transposes_the_direction_of_muon():
    plain, transposed = _muon(IN_SHAPES), _muon(_transposed(IN_SHAPES))
    assert_close(_steps(transposed), _steps(_transposed(plain)), condition=NEWTON_SCHULZ)


def test_head_wise_muon_is_muon_per_head():
    gradients = _stacked(gradients_like({"query": {"kernel": np.zeros((6, 3, 4))}}, STEPS))
    head_wise = curvax.muon(1.0, matrices=curvax.MatrixRule(head_wise=True))
    updates = _updates(head_wise, gradients)["query"]["kernel"]
    kernel = gradients["query"]["kernel"]
    alone = _updates(curvax.muon(1.0), {f"{h}/kernel": kernel[:, :, h] for h in range(3)})
    for h in range(3):
        expected = alone[f"{h}/kernel"]
        assert_close(list(updates[:, :, h]), list(expected), condition=NEWTON_SCHULZ)


# ASGO


WELL_CONDITIONED = _of_shapes(*share([(5, 9), (9, 5), (6, 6), (1, 7)], of=2))


def _from_momentum(gradients: Any, **setting: Any) -> Any:
    return _asgo(gradients, "from_momentum", **{"b2": 0.0, "eps": 0.0, **setting})


def _exact_muon(gradients: Any) -> Any:
    return _muon(gradients, 0.9, nesterov=False, method="svd")


def _in_float64(tree: Any) -> Any:
    return jax.tree.map(lambda g: g.astype(np.float64), tree)


def test_asgo_from_momentum_with_b2_0_eps_0_refresh_1_is_exact_muon_without_nesterov():
    with jax.enable_x64(True):
        gradients = _in_float64(WELL_CONDITIONED)
        (directions, states), expected = _from_momentum(gradients), _exact_muon(gradients)
        for name in gradients:
            # V = M Mᵀ has the square of M's condition number, its inverse root M's.
            condition = _largest_condition(states.momentum.mu[name]) ** 2
            assert_close(list(directions[name]), list(expected[name]), condition=condition)


def test_that_relation_of_asgo_and_muon_holds_in_float32_for_well_conditioned_momenta():
    gradients = _gradients(5, 20)
    directions, states = _from_momentum(gradients)
    condition = _largest_condition(states.momentum.mu) ** 2
    assert_close(list(directions), list(_exact_muon(gradients)), condition=condition)


@pytest.mark.parametrize("setting", [{"eps": 1e-6}, {"b2": 0.5}, {"period": 2}])
def test_asgo_from_momentum_is_not_muon_without_these_settings(setting):
    with jax.enable_x64(True):
        gradients = _in_float64(WELL_CONDITIONED)
        directions, _ = _from_momentum(gradients, **setting)
        expected = _exact_muon(gradients)["(5, 9)"]
        with pytest.raises(AssertionError, match="exceeds the bound"):
            assert_close(list(directions["(5, 9)"]), list(expected), condition=1e4)


WIDE_AND_TALL = _of_shapes((4, 9), (9, 4))


@pytest.mark.parametrize("variant", ["practical", "from_momentum"])
def test_transposing_a_non_square_gradient_transposes_the_direction_of_asgo(variant):
    plain, _ = _asgo(WIDE_AND_TALL, variant, period=2)
    transposed, _ = _asgo(_transposed(WIDE_AND_TALL), variant, period=2)
    assert_close(_steps(transposed), _steps(_transposed(plain)), condition=100.0)


def test_a_square_gradient_is_preconditioned_on_the_right_so_that_transposing_it_does_not():
    gradients = _gradients(6, 6)
    plain, _ = _asgo(gradients)
    transposed, _ = _asgo(gradients.mT)
    with pytest.raises(AssertionError, match="exceeds the bound"):
        assert_close(list(transposed), list(plain.mT), condition=100.0)
    right, _ = _asgo(gradients, side="right")
    left, _ = _asgo(gradients.mT, side="left")
    assert_close(plain, right, 0.0)
    assert_close(list(plain), list(left.mT), condition=100.0)


@pytest.mark.parametrize("variant", ["practical", "from_momentum", "theoretical"])
def test_asgo_commutes_with_rotations(variant):
    # The left side of a tall gradient has rank 4 of 9 at first: the range decides without damping.
    cases: list[Any] = [(WIDE_AND_TALL, None)]
    if variant == "theoretical":
        sides = {"(4, 9)": "left", "(9, 4)": "right"}
        cases = [({name: WIDE_AND_TALL[name]}, side) for name, side in sides.items()]
    for gradients, side in cases:
        plain, _ = _asgo(gradients, variant, side)
        rotated, _ = _asgo(_rotated(gradients), variant, side)
        assert_close(_steps(rotated), _steps(_rotated(plain)), condition=100.0)


def test_asgo_gives_a_vector_bias_or_scale_one_adaptive_number_as_adagrad_norm():
    b1, b2, eps = 0.8, 0.7, 1e-3
    shapes = {"vector": (5,), "dense/bias": (3,), "norm/scale": (2, 4), "temperature": ()}
    tree = {name: np.zeros(shape) for name, shape in shapes.items()}
    gradients = jax.tree.map(np.asarray, gradients_like(tree, STEPS, dtype="float32"))
    updates = _steps(_updates(curvax.asgo(1.0, b1=b1, b2=b2, eps=eps), _stacked(gradients)))
    for name in shapes:
        m, v = np.zeros(shapes[name]), 0.0
        for t, gradient in enumerate(gradients):
            g = np.asarray(gradient[name], np.float64)
            m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * np.sum(g**2)
            assert_close(updates[t][name], -m / np.sqrt(v + eps))


def test_theoretical_asgo_of_a_vector_is_adagrad_norm():
    tree, eps = {"vector": np.zeros(5)}, 0.1
    gradients = gradients_like(tree, STEPS, dtype="float32")
    optimizer = curvax.asgo(1.0, variant="theoretical", eps=eps)
    updates, total = _steps(_updates(optimizer, _stacked(gradients))), 0.0
    for update, gradient in zip(updates, gradients, strict=True):
        g = np.asarray(gradient["vector"], np.float64)
        total += np.sum(g**2)
        assert_close(update["vector"], -g / (np.sqrt(total) + eps))


def test_head_wise_asgo_is_asgo_per_head():
    """By `head_wise`, and by what is said of the heads in columns and in rows."""
    kernel = _stacked(gradients_like({"kernel": np.zeros((6, 3, 4))}, STEPS, dtype="float32"))
    kernel = kernel["kernel"]
    gradients = {
        "query": {"kernel": kernel},
        "columns": kernel.reshape(STEPS, 6, 12),
        "rows": kernel.transpose(0, 2, 1, 3).reshape(STEPS, 18, 4),
    }
    axes = {
        "columns": curvax.MatrixAxes(0, 1, column_heads=3),
        "rows": curvax.MatrixAxes(0, 1, row_heads=3),
    }
    settings: dict[str, Any] = {"eps": 1e-3, "refresh": 2}
    rule = curvax.MatrixRule(weight_dimension_numbers=axes, head_wise=True)
    optimizer = curvax.asgo(1.0, matrices=rule, **settings)
    updates = _updates(optimizer, gradients)
    by_head = {
        "head_wise": updates["query"]["kernel"],
        "column_heads": updates["columns"].reshape(STEPS, 6, 3, 4),
        "row_heads": updates["rows"].reshape(STEPS, 3, 6, 4).transpose(0, 2, 1, 3),
    }
    alone, _ = _asgo(kernel.transpose(0, 2, 1, 3), eps=1e-3, period=2)
    for h in range(3):
        for ours in by_head.values():
            assert_close(list(-ours[:, :, h]), list(alone[:, h]), condition=30.0)


# DASGO


def test_dasgo_on_a_matrix_with_one_row_is_adam_without_bias_correction_its_epsilon_inside():
    b1, b2, eps = 0.8, 0.7, 1e-3
    tree = {"row": {"kernel": np.zeros((1, 6))}, "vector": np.zeros(5), "scalar": np.zeros(())}
    gradients = jax.tree.map(np.asarray, gradients_like(tree, STEPS, dtype="float32"))
    updates = _steps(_updates(curvax.dasgo(1.0, b1=b1, b2=b2, eps=eps), _stacked(gradients)))
    m, v = (jax.tree.map(np.zeros_like, gradients[0]) for _ in "mv")
    for update, gradient in zip(updates, gradients, strict=True):
        m = optax.tree.update_moment(gradient, m, b1, 1)
        v = optax.tree.update_moment(gradient, v, b2, 2)
        assert_close(update, jax.tree.map(lambda m, v: -m / np.sqrt(v + eps), m, v))


# Shampoo's refresh policies


def _stale_shampoo(refresh: Any) -> Any:
    """Shampoo as FOAM and DR-Shampoo have it, with another refresh policy."""
    return curvax.scale_by_shampoo(
        refresh=refresh,
        b2=0.995,
        eps=1e-4,
        root=2,
        statistics_every=1,
        graft="adam",
        damping_mode="absolute",
        initial=0.0,
    )


POLICIES: dict[str, tuple[Any, dict[str, float], int, list[int]]] = {
    "foam with an infinite threshold is stale shampoo refreshed once": (
        curvax.scale_by_foam,
        {"threshold": float("inf"), "max_damping": 1.0},
        10**6,
        [1] * STEPS,
    ),
    "foam with a threshold next to 0 is shampoo refreshed at every check": (
        curvax.scale_by_foam,
        {"threshold": 1e-12, "max_damping": 1e-3},
        2,
        [1, 1, 2, 2, 3, 3],
    ),
    "dr_shampoo with a threshold next to 0 is shampoo refreshed at every check": (
        curvax.scale_by_dr_shampoo,
        {"threshold": 1e-12},
        2,
        [1, 1, 2, 2, 3, 3],
    ),
}


@pytest.mark.parametrize("relation", POLICIES)
def test_a_refresh_policy_at_its_limit_is_shampoo(relation):
    factory, data, period, refreshes = POLICIES[relation]
    with jax.enable_x64(True):
        gradients = _gradients(4, 6).astype(np.float64)
        directions, states = _both(factory, gradients, data, check_every=2, eps=1e-4)
        expected, _ = _both(_stale_shampoo, gradients, {"period": period})
        # Both factors have norm at most 1, and are damped by eps.
        assert_close(list(directions), list(expected), condition=1e4)
        for factor in ("left", "right"):
            assert getattr(states.direction, factor).refreshes.tolist() == refreshes


# RACS


def _leading_pair(squares: np.ndarray) -> tuple[np.ndarray, np.ndarray, float]:
    """The unit vectors `q` and `s` of the leading singular pair, and the singular value."""
    u, values, vt = np.linalg.svd(squares, full_matrices=False)
    return np.abs(u[:, 0]), np.abs(vt[0]), float(values[0])


IN_MANY_ROUNDS = {
    str(shape): _stacked(gradients_like(np.zeros(shape), STEPS, dtype="float32"))
    for shape in ((6, 10), (10, 6), (1, 5))
}


def test_without_averaging_and_with_many_iterations_the_scales_are_the_leading_singular_pair():
    _, states = _racs(IN_MANY_ROUNDS, 12, b2=0.0)
    for name, gradients in IN_MANY_ROUNDS.items():
        q, s = states[0].rows[name][0], states[0].columns[name][0]
        expected_q, expected_s, value = _leading_pair(gradients[0].astype(np.float64) ** 2)
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
        scales = jax.jit(lambda x: [curvax.row_column_scales(x, rounds) for rounds in (1, 2, 5)])
        for q, s in jax.tree.map(np.asarray, scales(squares)):
            errors.append(np.linalg.norm(np.outer(q, s) - best) / value)
    assert 1e-3 < errors[0] < 5e-2 and errors[2] < 1e-6
    assert errors[1] <= errors[0] * (second / value) ** 2
    assert errors[2] <= errors[1] * (second / value) ** 6


GRADIENTS = _gradients(5, 8)


@pytest.mark.parametrize("exponent", [-40, -20, -1, 1, 20, 40])
def test_directions_of_racs_do_not_depend_on_the_scale_of_the_gradient_when_b2_is_0(exponent):
    # Powers of two are exact: not one bit may change.
    scaled, _ = _racs(np.ldexp(GRADIENTS, exponent), b2=0.0)
    assert_close(scaled, _racs(GRADIENTS, b2=0.0)[0], 0.0)


JUMPING = np.float32(3.7 ** (np.arange(STEPS) % 3))[:, None, None] * GRADIENTS


def test_directions_of_racs_do_not_depend_on_the_scales_of_single_gradients_when_b2_is_0():
    (scaled, _), (plain, _) = _racs(JUMPING, b2=0.0), _racs(GRADIENTS, b2=0.0)
    assert_close(list(scaled), list(plain), 32.0)


def test_directions_of_racs_do_depend_on_the_scales_of_single_gradients_when_b2_is_not_0():
    (scaled, _), (plain, _) = _racs(JUMPING, gamma=1e6), _racs(GRADIENTS, gamma=1e6)
    with pytest.raises(AssertionError, match="exceeds the bound"):
        assert_close(list(scaled), list(plain), 32.0)


def test_racs_removes_scales_of_rows_and_columns():
    # diag(a) X diag(c) with constant |X| has rank 1 in its squares: RACS gives back X, scaled.
    generator = np.random.default_rng(0)
    signs = np.where(generator.random((5, 8)) < 0.5, -1.0, 1.0)
    rows, columns = 10 ** generator.uniform(-2, 2, 5), 10 ** generator.uniform(-2, 2, 8)
    gradient = np.float32(rows[:, None] * signs * columns)
    directions, _ = _racs(np.stack([gradient] * STEPS), b2=0.0, scale=1.0)
    assert_close(directions[0], signs)


def test_the_first_direction_of_racs_is_longer_by_1_over_1_minus_b2():
    (plain, _), (averaged, _) = _racs(GRADIENTS, b2=0.0), _racs(GRADIENTS, b2=0.75)
    corrected, _ = _racs(GRADIENTS, bias_correction=True, b2=0.75)
    assert_close(averaged[0], 4 * plain[0])
    assert_close(corrected[0], plain[0])


def test_racs_commutes_with_permutations_and_signs_but_not_with_rotations():
    generator = np.random.default_rng(0)
    rows, columns = generator.permutation(5), generator.permutation(8)

    def moved(x: np.ndarray) -> np.ndarray:
        return -x[:, rows][:, :, columns]

    plain, _ = _racs(GRADIENTS)
    permuted, _ = _racs(moved(GRADIENTS))
    assert_close(list(permuted), list(moved(plain)), 32.0)
    rotation = orthogonal(jax.random.key(0), 8, 8).astype(np.float32)
    rotated, _ = _racs(GRADIENTS @ rotation)
    with pytest.raises(AssertionError, match="exceeds the bound"):
        assert_close(list(rotated), list(plain @ rotation), 32.0)


def test_transposing_the_gradient_transposes_the_direction_of_racs_in_the_limit():
    # The five rounds of the paper start from the rows. Averages of s and q depend on their ratio,
    # which the fixed point leaves open.
    wide = _gradients(6, 10)
    given = {**IN_MANY_ROUNDS, "(6, 10)": wide, "(10, 6)": wide.mT}
    directions, _ = _racs(given, 12, b2=0.0)
    assert_close(list(directions["(10, 6)"]), list(directions["(6, 10)"].mT), 32.0)


# The limiter


def _limited(gamma: float, gradients: np.ndarray) -> np.ndarray:
    return _both(curvax.limit_norm_growth, gradients, {"gamma": gamma})[0]


def _norms(matrices: np.ndarray) -> np.ndarray:
    return np.linalg.norm(matrices.astype(np.float64), axis=(-2, -1))


def _jumping() -> np.ndarray:
    """A batch of two whose norms jump by factors between 1e-3 and 1e3."""
    generator = np.random.default_rng(0)
    scales = 10 ** generator.uniform(-3, 3, (20, 2, 1, 1))
    return (scales * generator.standard_normal((20, 2, 4, 6))).astype(np.float32)


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
    assert_close(np.sum(directions * gradients, axis=(-2, -1)), norms * given, eps=EPS)


def test_norms_of_bfloat16_never_grow_by_more_than_gamma_and_its_rounding():
    gradients = _jumping().astype(jnp.bfloat16)
    directions = _limited(1.01, gradients)
    assert directions.dtype == jnp.bfloat16
    # Rounding does not build up: the norm to compare with is kept in float32.
    ideal = [_norms(gradients[:1])[0]]
    for norm in _norms(gradients)[1:]:
        ideal.append(np.minimum(norm, 1.01 * ideal[-1]))
    norms = _norms(directions)
    assert np.all(norms <= np.stack(ideal) * (1 + BFLOAT16_EPS))


def test_a_zero_gradient_does_not_stop_the_limited_direction_forever():
    gradients = _jumping()
    gradients[2] = 0
    directions = _limited(1.01, gradients)
    assert np.array_equal(directions[2], gradients[2])
    assert np.array_equal(directions[3], gradients[3])
    assert np.all(_norms(directions)[3:] > 0)


def test_a_matrix_whose_first_gradients_are_zero_is_not_limited_by_them():
    gradients = _jumping()
    gradients[:2] = 0
    directions = _limited(1.01, gradients)
    assert np.array_equal(directions[2], gradients[2])


def test_an_infinite_gamma_is_the_identity():
    gradients = _jumping()
    assert_close(_limited(float("inf"), gradients), gradients, 0.0)
    racs, _ = _racs(gradients, gamma=float("inf"), scale=1.0)
    scaled, _ = _both(curvax.scale_by_rows_and_columns, gradients, {"b2": 0.9})
    assert_close(racs, scaled, 0.0)


def test_matrices_of_a_batch_are_limited_apart():
    gradients = _jumping()
    together = _limited(1.01, gradients)
    for b in range(2):
        assert_close(list(together[:, b]), list(_limited(1.01, gradients[:, b])), 4.0)
