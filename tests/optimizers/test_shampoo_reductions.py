"""What Shampoo, FOAM and DR-Shampoo are to each other and to other methods.

Each identity is asserted over a trajectory of 20 steps, on wide and tall matrices; those between
policies, for which shapes do not matter, on wide ones. With CURVAX_ALL_CELLS all are, and on a
square matrix as well. Both sides of an identity are the same work in floating point, but not in the
same order: bounds are `c · κ · eps` with the condition `κ` of the damped factors. Where one side
could agree with anything, something next to it has to disagree.
"""

import functools
from typing import Any

import jax
import numpy as np
import optax
import pytest

import curvax
from tests.helpers import assert_close, orthogonal, share
from tests.shared.kronecker import (
    AXES,
    ENDLESS,
    EPS,
    FOREVER,
    GRADIENTS,
    NEXT_TO_0,
    SHAPES,
    SQUARE,
    STEPS,
    WIDE,
    all_transposed,
    assert_different,
    assert_equal,
    assert_same,
    family,
    gradients_of,
    refreshes_of,
    run_shampoo,
    updates_of,
    wide,
)

pytestmark = pytest.mark.xdist_group("Kronecker reductions")  # which share compiled programs


def _original(gradients: Any = GRADIENTS, root: int = 4, side: str = "both") -> tuple[Any, Any]:
    """Shampoo of 2018: sums from εI, damped by that alone, refreshed at every step."""
    return run_shampoo(gradients, "floor", side=side, sums=True, initial=EPS, root=root, period=1)


FOAM = family(lambda value: curvax.scale_by_foam(check_every=2, graft=None, **value))
DR = family(lambda value: curvax.scale_by_dr_shampoo(check_every=2, graft=None, **value))


def _foam(
    gradients: Any = GRADIENTS,
    threshold: float = 0.75,
    most: float = 1.0,
    b2: float = 0.995,
    eps: float = EPS,
) -> tuple[Any, Any]:
    value = {"threshold": threshold, "max_damping": most, "b2": b2, "eps": eps}
    return FOAM(value, gradients)


def _dr(gradients: Any = GRADIENTS, threshold: float = 0.3, b2: float = 0.995) -> tuple[Any, Any]:
    return DR({"threshold": threshold, "b2": b2, "eps": EPS}, gradients)


# Grafting


# Without a refresh one side is like the other.
BASES = {
    "AdamW": (functools.partial(optax.adamw, weight_decay=0.1), "both"),
    "RMSprop": (optax.rmsprop, "smaller"),
    "SGD with momentum": (functools.partial(optax.sgd, momentum=0.9, nesterov=True), "smaller"),
}


@pytest.mark.parametrize("name", share(BASES, of=2))
def test_grafted_and_never_refreshed_shampoo_is_its_base_optimizer(name):
    base, side = BASES[name]
    settings = {"side": side, "matrices": "all", "weight_dimension_numbers": AXES}
    optimizer = curvax.shampoo(0.1, refresh=FOREVER, statistics_every=1, base=base, **settings)
    assert_same(updates_of(optimizer), updates_of(base(0.1)), condition=1.0)


def test_shampoo_that_is_refreshed_is_not_its_base_optimizer():
    optimizer = curvax.shampoo(1.0, refresh=2, statistics_every=1, base=optax.sgd)
    gradients = gradients_of(SQUARE)
    assert_different(updates_of(optimizer, gradients), updates_of(optax.sgd(1.0), gradients))


# Transposes and rotations


SAME_ON_BOTH_SIDES = {
    "practical Shampoo": functools.partial(
        run_shampoo, damping="relative", graft="norm", root=4, initial=EPS
    ),
    "Shampoo²": run_shampoo,
    "original Shampoo": _original,
    "FOAM": _foam,
    "DR-Shampoo": _dr,
}
some_methods = pytest.mark.parametrize("method", share(SAME_ON_BOTH_SIDES, of=2))


@some_methods
def test_transposing_the_gradient_transposes_the_direction_of_shampoo(method):
    run = SAME_ON_BOTH_SIDES[method]
    assert_same(run(all_transposed(GRADIENTS))[0], all_transposed(run()[0]))


def test_transposing_the_gradient_exchanges_the_sides_of_one_sided_shampoo():
    left, right = (functools.partial(run_shampoo, side=side, b1=0.8) for side in ("left", "right"))
    transposed = all_transposed(left()[0])
    assert_same(right(all_transposed(GRADIENTS))[0], transposed)
    assert_different(left(all_transposed(GRADIENTS))[0], transposed)


@some_methods
def test_shampoo_commutes_with_rotations(method):
    def rotated(x: np.ndarray) -> np.ndarray:
        u, v = (orthogonal(jax.random.key(i), n, n) for i, n in enumerate(x.shape[-2:]))
        return u.astype(x.dtype) @ x @ v.astype(x.dtype)

    run = SAME_ON_BOTH_SIDES[method]
    turned, _ = run(jax.tree.map(rotated, GRADIENTS))
    assert_same(turned, jax.tree.map(rotated, run()[0]))


def test_adagrad_does_not_commute_with_rotations():
    """The negative control."""
    rotation = orthogonal(jax.random.key(0), 5, 5).astype(np.float32)
    adagrad, gradients = optax.scale_by_rss(), gradients_of(SQUARE)["square"]
    assert_different(
        updates_of(adagrad, rotation @ gradients), rotation @ updates_of(adagrad, gradients)
    )


# Scales


def _scaled(trees: Any, exponent: int) -> Any:
    return jax.tree.map(lambda x: np.ldexp(x, exponent), trees)


PRACTICAL: dict[str, Any] = {"root": 4, "damping": "relative"}


@pytest.mark.parametrize("exponent", [-40, -2, 2, 24])
def test_shampoo_with_relative_damping_ignores_scales_bit_for_bit(exponent):
    """Even powers of two, whose square roots the roots of order 4 have in them."""
    scaled, _ = run_shampoo(_scaled(GRADIENTS, exponent), **PRACTICAL)
    assert_equal(scaled, run_shampoo(**PRACTICAL)[0])


@pytest.mark.parametrize("exponent", [-3, 1])
def test_shampoo_with_relative_damping_ignores_other_scales_up_to_rounding(exponent):
    scaled, _ = run_shampoo(_scaled(GRADIENTS, exponent), **PRACTICAL)
    assert_same(scaled, run_shampoo(**PRACTICAL)[0])


@pytest.mark.parametrize("exponent", [-30, -1, 1, 24])
@pytest.mark.parametrize(("root", "graft", "power"), [(2, None, -1), (2, "norm", 1)])
def test_directions_of_shampoo_scale_as_a_power_of_the_gradients(root, graft, power, exponent):
    """`s^(1 - 4/p)`; norm grafting makes it `s`. The powers of two are exact."""
    settings = PRACTICAL | {"root": root, "graft": graft}
    scaled, _ = run_shampoo(_scaled(GRADIENTS, exponent), **settings)
    assert_equal(scaled, _scaled(run_shampoo(**settings)[0], power * exponent))


@pytest.mark.parametrize("setting", [{"damping": "absolute"}, {"initial": EPS}])
def test_shampoo_does_not_ignore_scales_without_these_settings(setting):
    settings = PRACTICAL | setting
    assert_different(run_shampoo(_scaled(GRADIENTS, -4), **settings)[0], run_shampoo(**settings)[0])


def _foam_of_scale(gradients: Any, scale: float) -> tuple[Any, Any]:
    return _foam(gradients, 0.8, scale * 2.0**-2, b2=0.9, eps=scale * EPS)


def test_foam_does_not_depend_on_scales_if_its_dampings_follow():
    plain, states = _foam_of_scale(GRADIENTS, 1.0)
    scaled, scaled_states = _foam_of_scale(_scaled(GRADIENTS, 6), 2.0**12)
    assert_same(scaled, _scaled(plain, -6))
    assert np.array_equal(refreshes_of(states), refreshes_of(scaled_states))
    number = refreshes_of(states)[-1]
    assert min(number) < STEPS // 2 and max(number) > 1  # decisions each way


def test_the_dampings_of_foam_are_absolute():
    _, states = _foam_of_scale(GRADIENTS, 1.0)
    _, scaled_states = _foam_of_scale(_scaled(GRADIENTS, -6), 1.0)
    assert max(refreshes_of(states)[-1]) > 1
    assert set(refreshes_of(scaled_states)[-1]) == {1}  # beside eps the gradients are nothing


def test_the_threshold_of_dr_shampoo_does_not_depend_on_scales():
    """Square gradients: LAPACK's basis of a null space depends on scales, and residuals in it."""
    gradients = gradients_of((STEPS, 2, 5, 5))
    _, states = _dr(gradients, threshold=0.4, b2=0.9)
    for exponent in (-12, 7):
        _, scaled = _dr(_scaled(gradients, exponent), threshold=0.4, b2=0.9)
        assert np.array_equal(refreshes_of(states), refreshes_of(scaled))
    number = refreshes_of(states)[-1]
    assert min(number) < STEPS // 2 and max(number) > 1  # decisions each way


# Shampoo and AdaGrad, Shampoo and Muon


def test_shampoo_of_one_entry_is_adagrad():
    gradients = gradients_of((6, 1, 1))
    adagrad = optax.scale_by_rss(initial_accumulator_value=EPS, eps=0.0)
    assert_same(_original(gradients)[0], updates_of(adagrad, gradients), condition=1.0)


def test_original_shampoo_of_diagonal_gradients_is_adagrad():
    adagrad = optax.scale_by_rss(initial_accumulator_value=EPS, eps=0.0)
    gradients = jax.tree.map(lambda x: x * np.eye(*x.shape[-2:], dtype=x.dtype), GRADIENTS)
    assert_same(_original(gradients)[0], updates_of(adagrad, gradients))
    assert_different(_original()[0], updates_of(adagrad))


@pytest.mark.parametrize("layout", share(["a row", "a column"], of=2))
def test_original_shampoo_of_one_row_is_full_matrix_adagrad_between_norms(layout):
    """`D = (ε + Σ‖g‖²)^(-1/4) g (εI + Σgᵀg)^(-1/4)`; on that side alone, with p = 2, AdaGrad."""
    column = layout == "a column"
    rows = gradients_of((3, 1, 6))
    gradients = rows.mT if column else rows
    shampoo, _ = _original(gradients)
    adagrad, _ = _original(gradients, root=2, side="left" if column else "right")
    total, norm = EPS * np.tile(np.eye(6), (3, 1, 1)), np.full((3, 1, 1), EPS)
    for row, *directions in zip(rows, shampoo, adagrad, strict=True):
        g = row.astype(np.float64)
        gram = np.swapaxes(g, -1, -2) @ g
        total, norm = total + gram, norm + np.trace(gram, axis1=-2, axis2=-1)[:, None, None]
        d, q = np.linalg.eigh(total)
        for root, left, ours in zip((4, 2), (norm**-0.25, 1.0), directions, strict=True):
            power = (q * d[:, None] ** (-1 / root)) @ np.swapaxes(q, -1, -2)
            ours = ours.mT if column else ours
            assert_close(ours, left * g @ power, condition=float(np.max(d) / EPS))


IN_FLOAT64 = jax.tree.map(lambda g: g.astype(np.float64), GRADIENTS)


def _shampoo_near_muon(**setting: float) -> Any:
    settings = {"b2": 0.0, "eps": 0.0, "root": 4, "period": 1} | setting
    return run_shampoo(IN_FLOAT64, **settings)[0]


@functools.cache
def _exact_muon() -> Any:
    return updates_of(curvax.scale_by_muon(method="svd", nesterov=False, b1=0.0), IN_FLOAT64)


def test_shampoo_with_b2_0_eps_0_is_exact_muon_without_momentum():
    condition = max(float(np.max(np.linalg.cond(g))) for g in GRADIENTS.values()) ** 2
    assert condition < 1e7  # L has the square of G's
    with jax.enable_x64(True):
        assert_same(_shampoo_near_muon(), _exact_muon(), condition)


@pytest.mark.parametrize("setting", [{"b2": 0.5}, {"eps": 1.0}, {"root": 2}], ids=str)
def test_shampoo_is_not_muon_without_these_settings(setting):
    with jax.enable_x64(True):
        assert_different(_shampoo_near_muon(**setting), _exact_muon())


# FOAM and DR-Shampoo


SHARED: dict[str, Any] = {
    "eps": EPS,
    "b2": 0.9,
    "weight_dimension_numbers": {name: AXES[name] for name in WIDE},
    "weight_decay": 0.1,
}
METHODS = {
    "foam": family(
        lambda threshold: curvax.foam(
            1.0, check_every=2, threshold=threshold, max_damping=1.0, **SHARED
        ),
        WIDE,
    ),
    "dr_shampoo": family(
        lambda threshold: curvax.dr_shampoo(1.0, check_every=2, threshold=threshold, **SHARED),
        WIDE,
    ),
}


# Shampoo as FOAM and DR-Shampoo are it, by the period of its refreshes.
AS_THEY_ARE = family(
    lambda period: curvax.shampoo(
        1.0,
        root=2,
        refresh=curvax.every(period, offset=1),
        statistics_every=1,
        graft="adam",
        base=None,
        damping_mode="absolute",
        initial=0.0,
        **SHARED,
    ),
    WIDE,
)


def test_with_an_infinite_threshold_foam_is_stale_shampoo_refreshed_once():
    updates, states = METHODS["foam"](ENDLESS)
    assert_same(updates, AS_THEY_ARE(FOREVER)[0])
    assert_different(updates, AS_THEY_ARE(2)[0])
    assert set(refreshes_of(states)[-1]) == {1}
    assert set(refreshes_of(states, "checks")[-1]) == {STEPS // 2}


@pytest.mark.parametrize("method", METHODS)
def test_with_a_threshold_next_to_0_it_is_shampoo_refreshed_at_every_check(method):
    updates, states = METHODS[method](NEXT_TO_0)
    assert_same(updates, AS_THEY_ARE(2)[0])
    assert set(refreshes_of(states)[-1]) == {STEPS // 2}


@pytest.mark.parametrize("method", METHODS)
def test_with_a_threshold_between_it_is_neither(method):
    updates, states = METHODS[method](0.3)
    assert_different(updates, AS_THEY_ARE(FOREVER)[0])
    assert_different(updates, AS_THEY_ARE(2)[0])
    assert min(refreshes_of(states)[-1]) < STEPS // 2


def _by_policy(policy: Any) -> optax.GradientTransformation:
    settings = {"statistics_every": 1, "damping_mode": "absolute", "initial": 0.0, "graft": None}
    return curvax.scale_by_shampoo(b2=0.9, eps=EPS, root=2, refresh=policy, **settings)


ABLATIONS = {
    "FOAM without adaptive damping": family(
        lambda t: _by_policy(curvax.policies.foam(2, t, 1.0, adaptive_damping=False)), WIDE
    ),
    "DR without new eigenvalues": family(
        lambda t: _by_policy(curvax.policies.diagonal_residual(2, t, update_eigenvalues=False)),
        WIDE,
    ),
}


@pytest.mark.parametrize("policy", ABLATIONS)
def test_ablated_policies_have_the_same_limits(policy):
    once, at_every_check = (wide(run_shampoo(period=period)[0]) for period in (FOREVER, 2))
    assert_same(ABLATIONS[policy](ENDLESS)[0], once)
    assert_same(ABLATIONS[policy](NEXT_TO_0)[0], at_every_check)
    assert_different(once, at_every_check)


def _with_fixed_singular_vectors() -> Any:
    generator = np.random.default_rng(0)

    def drawn(shape: tuple[int, ...]) -> np.ndarray:
        *batch, m, n = shape
        u, v = (orthogonal(jax.random.key(i), order, min(m, n)) for i, order in enumerate((m, n)))
        values = generator.uniform(0.5, 2.0, (STEPS, *batch, min(m, n)))
        return ((u * values[..., None, :]) @ v.T).astype(np.float32)

    return {name: drawn(shape) for name, shape in SHAPES.items()}


def test_dr_shampoo_decomposes_once_where_the_singular_vectors_stay():
    """And is Shampoo refreshed at every check all the same; FOAM's `h` sees eigenvalues too."""
    gradients, threshold = _with_fixed_singular_vectors(), 1e-3
    expected, _ = run_shampoo(gradients)
    directions, states = _dr(gradients, threshold, b2=0.9)
    assert_same(directions, expected)
    assert set(refreshes_of(states)[-1]) == {1}
    stale, states = ABLATIONS["DR without new eigenvalues"](threshold, wide(gradients))
    assert_different(stale, wide(expected))
    assert set(refreshes_of(states)[-1]) == {1}
    _, states = ABLATIONS["FOAM without adaptive damping"](threshold, wide(gradients))
    assert min(refreshes_of(states)[-1]) > 1
