"""What the Kronecker-factored methods are to each other, named after their docstrings' "Relations".

Each identity is asserted over a trajectory of 20 steps, on wide and tall matrices; those between
policies, to which shapes are nothing, on wide ones. With CURVAX_ALL_CELLS all are, and on a square
matrix as well. Both sides of an identity are the same work in floating point, but not in the same
order: bounds are `c · κ · eps` with the condition `κ` of the damped factors. Where one side could
agree with anything, something next to it has to disagree.

Trees of gradients, updates and states hold all steps, which come first. What differs between runs
of a method is data of one program where it can be: decay rates, damping, roots, periods,
thresholds.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import ALL_CELLS, assert_close, gradients_like, orthogonal, share

import curvax
from curvax.transforms.kronecker._factor import Factor

STEPS = 20
EPS = 2.0**-4  # beside factors of size up to 10
KAPPA = 10 / EPS
SQUARE = {"square": (5, 5)}
SHAPES = {"wide": (2, 4, 7), "tall": (2, 7, 4)} | (SQUARE if ALL_CELLS else {})
AXES = {name: curvax.MatrixAxes(-2, -1) for name in SHAPES}
FOREVER = 10**6
ENDLESS, NEXT_TO_0 = float("inf"), 1e-12  # thresholds

pytestmark = pytest.mark.xdist_group("Kronecker reductions")  # which share compiled programs


def _gradients(shapes: Any) -> Any:
    params = jax.tree.map(np.zeros, shapes, is_leaf=lambda x: isinstance(x, tuple))
    return jax.tree.map(lambda *g: np.stack(g), *gradients_like(params, STEPS, dtype="float32"))


def _wide(trees: Any) -> Any:
    """What identities between policies are asserted on."""
    return {name: x for name, x in trees.items() if ALL_CELLS or name == "wide"}


GRADIENTS = _gradients(SHAPES)
WIDE = _wide(GRADIENTS)
Trajectory = Callable[..., tuple[Any, Any]]  # from gradients to updates and states


def _family(make: Any, default: Any = GRADIENTS) -> Trajectory:
    """Updates and states of `make(value)`: one program for all values, which are traced."""

    @jax.jit
    def trajectory(value: Any, gradients: Any) -> Any:
        transformation = optax.with_extra_args_support(make(value))
        params = jax.tree.map(lambda g: jnp.ones_like(g[0]), gradients)

        def step(state: Any, gradient: Any) -> Any:
            update, state = transformation.update(gradient, state, params)
            return state, (update, state)

        return jax.lax.scan(step, transformation.init(params), gradients)[1]

    def run(value: Any, gradients: Any = default) -> tuple[Any, Any]:
        return jax.tree.map(np.asarray, trajectory(value, gradients))

    return run


@functools.cache
def _of_one(transformation: Any) -> Trajectory:
    return _family(lambda _: transformation)


def _run(transformation: Any, gradients: Any = GRADIENTS) -> Any:
    return _of_one(transformation)(None, gradients)[0]


def _refreshes(states: Any, field: str = "refreshes") -> np.ndarray:
    """How often each matrix's factors were refreshed at each step, or what else was counted."""
    is_factor = lambda x: isinstance(x, Factor)  # noqa: E731
    factors = [x for x in jax.tree.leaves(states, is_leaf=is_factor) if is_factor(x)]
    return np.concatenate([getattr(x, field).reshape(STEPS, -1) for x in factors], axis=1)


@functools.cache
def _shampoos(damping: str, graft: str | None, side: str, sums: bool) -> Trajectory:
    def make(value: Any) -> optax.GradientTransformation:
        return curvax.scale_by_shampoo(
            b1=value.get("b1"),
            b2=None if sums else value["b2"],
            eps=value["eps"],
            root=value["root"] if side == "both" else 2,  # which ASGO has bit for bit
            refresh=curvax.every(value["period"], offset=1),
            initial=value["initial"],
            statistics_every=1,
            damping_mode=damping,
            graft=graft,
            side=side,
        )

    return _family(make)


def _shampoo(
    gradients: Any = GRADIENTS,
    damping: str = "absolute",
    graft: str | None = None,
    side: str = "both",
    sums: bool = False,
    **value: float,
) -> tuple[Any, Any]:
    defaults = {"b2": 0.9, "eps": EPS, "root": 2, "initial": 0.0, "period": 2}
    return _shampoos(damping, graft, side, sums)({**defaults, **value}, gradients)


def _original(gradients: Any = GRADIENTS, root: int = 4, side: str = "both") -> tuple[Any, Any]:
    """Shampoo of 2018: sums from εI, damped by that alone, refreshed at every step."""
    return _shampoo(gradients, "floor", side=side, sums=True, initial=EPS, root=root, period=1)


FOAM = _family(lambda value: curvax.scale_by_foam(check_every=2, graft=None, **value))
DR = _family(lambda value: curvax.scale_by_dr_shampoo(check_every=2, graft=None, **value))


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


def _at(trees: Any, step: int) -> Any:
    return jax.tree.map(lambda x: x[step], trees)


def _assert_same(one: Any, other: Any, condition: float = KAPPA, factor: float = 16.0) -> None:
    for t in range(len(jax.tree.leaves(one)[0])):
        assert_close(_at(one, t), _at(other, t), factor, condition=condition)


def _assert_different(one: Any, other: Any) -> None:
    """Every matrix, by much more than rounding."""
    last = [jax.tree.leaves(_at(x, -1)) for x in (one, other)]
    for x, y in zip(*last, strict=True):
        assert np.max(np.abs(x - y)) > 0.03 * np.max(np.abs(y))


def _assert_equal(one: Any, other: Any) -> None:
    _assert_same(one, other, factor=0.0)


def _transposed(trees: Any) -> Any:
    """Every matrix transposed, under the name of its new shape."""
    names = {"wide": "tall", "tall": "wide", "square": "square"}
    return {names[old]: x.mT for old, x in trees.items()}


# Shampoo


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
    _assert_same(_run(optimizer), _run(base(0.1)), condition=1.0)


def test_shampoo_that_is_refreshed_is_not_its_base_optimizer():
    optimizer = curvax.shampoo(1.0, refresh=2, statistics_every=1, base=optax.sgd)
    gradients = _gradients(SQUARE)
    _assert_different(_run(optimizer, gradients), _run(optax.sgd(1.0), gradients))


SAME_ON_BOTH_SIDES = {
    "practical Shampoo": functools.partial(
        _shampoo, damping="relative", graft="norm", root=4, initial=EPS
    ),
    "Shampoo²": _shampoo,
    "original Shampoo": _original,
    "FOAM": _foam,
    "DR-Shampoo": _dr,
}
every_method = pytest.mark.parametrize("method", SAME_ON_BOTH_SIDES)


@every_method
def test_transposing_the_gradient_transposes_the_direction_of_shampoo(method):
    run = SAME_ON_BOTH_SIDES[method]
    _assert_same(run(_transposed(GRADIENTS))[0], _transposed(run()[0]))


def test_transposing_the_gradient_exchanges_the_sides_of_one_sided_shampoo():
    left, right = (functools.partial(_shampoo, side=side, b1=0.8) for side in ("left", "right"))
    transposed = _transposed(left()[0])
    _assert_same(right(_transposed(GRADIENTS))[0], transposed)
    _assert_different(left(_transposed(GRADIENTS))[0], transposed)


@every_method
def test_shampoo_commutes_with_rotations(method):
    def rotated(x: np.ndarray) -> np.ndarray:
        u, v = (orthogonal(jax.random.key(i), n, n) for i, n in enumerate(x.shape[-2:]))
        return u.astype(x.dtype) @ x @ v.astype(x.dtype)

    run = SAME_ON_BOTH_SIDES[method]
    turned, _ = run(jax.tree.map(rotated, GRADIENTS))
    _assert_same(turned, jax.tree.map(rotated, run()[0]))


def test_adagrad_does_not_commute_with_rotations():
    """The negative control."""
    rotation = orthogonal(jax.random.key(0), 5, 5).astype(np.float32)
    adagrad, gradients = optax.scale_by_rss(), _gradients(SQUARE)["square"]
    _assert_different(_run(adagrad, rotation @ gradients), rotation @ _run(adagrad, gradients))


# Scales


def _scaled(trees: Any, exponent: int) -> Any:
    return jax.tree.map(lambda x: np.ldexp(x, exponent), trees)


PRACTICAL: dict[str, Any] = {"root": 4, "damping": "relative"}


@pytest.mark.parametrize("exponent", [-40, -2, 2, 24])
def test_shampoo_with_relative_damping_ignores_scales_bit_for_bit(exponent):
    """Even powers of two, whose square roots the roots of order 4 have in them."""
    scaled, _ = _shampoo(_scaled(GRADIENTS, exponent), **PRACTICAL)
    _assert_equal(scaled, _shampoo(**PRACTICAL)[0])


@pytest.mark.parametrize("exponent", [-3, 1])
def test_shampoo_with_relative_damping_ignores_other_scales_up_to_rounding(exponent):
    scaled, _ = _shampoo(_scaled(GRADIENTS, exponent), **PRACTICAL)
    _assert_same(scaled, _shampoo(**PRACTICAL)[0])


@pytest.mark.parametrize("exponent", [-30, -1, 1, 24])
@pytest.mark.parametrize(("root", "graft", "power"), [(2, None, -1), (2, "norm", 1)])
def test_directions_of_shampoo_scale_as_a_power_of_the_gradients(root, graft, power, exponent):
    """`s^(1 - 4/p)`; norm grafting makes it `s`. The powers of two are exact."""
    settings = PRACTICAL | {"root": root, "graft": graft}
    scaled, _ = _shampoo(_scaled(GRADIENTS, exponent), **settings)
    _assert_equal(scaled, _scaled(_shampoo(**settings)[0], power * exponent))


@pytest.mark.parametrize("setting", [{"damping": "absolute"}, {"initial": EPS}])
def test_shampoo_does_not_ignore_scales_without_these_settings(setting):
    settings = PRACTICAL | setting
    _assert_different(_shampoo(_scaled(GRADIENTS, -4), **settings)[0], _shampoo(**settings)[0])


def _foam_of_scale(gradients: Any, scale: float) -> tuple[Any, Any]:
    return _foam(gradients, 0.8, scale * 2.0**-2, b2=0.9, eps=scale * EPS)


def test_foam_does_not_depend_on_scales_if_its_dampings_follow():
    plain, states = _foam_of_scale(GRADIENTS, 1.0)
    scaled, scaled_states = _foam_of_scale(_scaled(GRADIENTS, 6), 2.0**12)
    _assert_same(scaled, _scaled(plain, -6))
    assert np.array_equal(_refreshes(states), _refreshes(scaled_states))
    number = _refreshes(states)[-1]
    assert min(number) < STEPS // 2 and max(number) > 1  # decisions each way


def test_the_dampings_of_foam_are_absolute():
    _, states = _foam_of_scale(GRADIENTS, 1.0)
    _, scaled_states = _foam_of_scale(_scaled(GRADIENTS, -6), 1.0)
    assert max(_refreshes(states)[-1]) > 1
    assert set(_refreshes(scaled_states)[-1]) == {1}  # beside eps the gradients are nothing


def test_the_threshold_of_dr_shampoo_does_not_depend_on_scales():
    _, states = _dr(threshold=0.4, b2=0.9)
    for exponent in (-12, 7):
        _, scaled = _dr(_scaled(GRADIENTS, exponent), threshold=0.4, b2=0.9)
        assert np.array_equal(_refreshes(states), _refreshes(scaled))
    number = _refreshes(states)[-1]
    assert min(number) < STEPS // 2 and max(number) > 1  # decisions each way


# Shampoo and AdaGrad, Shampoo and Muon


def test_shampoo_of_one_entry_is_adagrad():
    gradients = _gradients((6, 1, 1))
    adagrad = optax.scale_by_rss(initial_accumulator_value=EPS, eps=0.0)
    _assert_same(_original(gradients)[0], _run(adagrad, gradients), condition=1.0)


def test_original_shampoo_of_diagonal_gradients_is_adagrad():
    adagrad = optax.scale_by_rss(initial_accumulator_value=EPS, eps=0.0)
    gradients = jax.tree.map(lambda x: x * np.eye(*x.shape[-2:], dtype=x.dtype), GRADIENTS)
    _assert_same(_original(gradients)[0], _run(adagrad, gradients))
    _assert_different(_original()[0], _run(adagrad))


@pytest.mark.parametrize("layout", share(["a row", "a column"], of=2))
def test_original_shampoo_of_one_row_is_full_matrix_adagrad_between_norms(layout):
    """`D = (ε + Σ‖g‖²)^(-1/4) g (εI + Σgᵀg)^(-1/4)`; on that side alone, with p = 2, AdaGrad."""
    column = layout == "a column"
    rows = _gradients((3, 1, 6))
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
    return _shampoo(IN_FLOAT64, **settings)[0]


@functools.cache
def _exact_muon() -> Any:
    return _run(curvax.scale_by_muon(method="svd", nesterov=False, b1=0.0), IN_FLOAT64)


def test_shampoo_with_b2_0_eps_0_is_exact_muon_without_momentum():
    condition = max(float(np.max(np.linalg.cond(g))) for g in GRADIENTS.values()) ** 2
    assert condition < 1e7  # L has the square of G's
    with jax.enable_x64(True):
        _assert_same(_shampoo_near_muon(), _exact_muon(), condition)


@pytest.mark.parametrize("setting", [{"b2": 0.5}, {"eps": 1.0}, {"root": 2}], ids=str)
def test_shampoo_is_not_muon_without_these_settings(setting):
    with jax.enable_x64(True):
        _assert_different(_shampoo_near_muon(**setting), _exact_muon())


# Blocks


def test_blocks_of_shampoo_are_matrices_of_their_own():
    """The last one of a row or column may be smaller."""
    size = 3
    gradients = _gradients({"wide": (3, 5), "tall": (5, 3), "square": (6, 6)})

    def parts(x: np.ndarray) -> list[np.ndarray]:
        rows, columns = (range(0, n, size) for n in x.shape[-2:])
        return [x[:, r : r + size, c : c + size] for r in rows for c in columns]

    shampoo = functools.partial(
        curvax.shampoo, 1.0, eps=EPS, refresh=2, statistics_every=1, base=None
    )
    blocks = curvax.MatrixRule("all", block_size=size)
    together = _run(shampoo(matrices=blocks), gradients)
    apart = {"parts": jax.tree.map(parts, gradients), "whole": gradients["square"]}
    apart = _run(shampoo(matrices="all"), apart)
    _assert_same(jax.tree.map(parts, together), apart["parts"])
    _assert_different(together["square"], apart["whole"])


# FOAM and DR-Shampoo


SHARED: dict[str, Any] = {
    "eps": EPS,
    "b2": 0.9,
    "weight_dimension_numbers": {name: AXES[name] for name in WIDE},
    "weight_decay": 0.1,
}
METHODS = {
    "foam": _family(
        lambda threshold: curvax.foam(
            1.0, check_every=2, threshold=threshold, max_damping=1.0, **SHARED
        ),
        WIDE,
    ),
    "dr_shampoo": _family(
        lambda threshold: curvax.dr_shampoo(1.0, check_every=2, threshold=threshold, **SHARED),
        WIDE,
    ),
}
# Shampoo as FOAM and DR-Shampoo are it, by the period of its refreshes.
AS_THEY_ARE = _family(
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
    _assert_same(updates, AS_THEY_ARE(FOREVER)[0])
    _assert_different(updates, AS_THEY_ARE(2)[0])
    assert set(_refreshes(states)[-1]) == {1}
    assert set(_refreshes(states, "checks")[-1]) == {STEPS // 2}


@pytest.mark.parametrize("method", METHODS)
def test_with_a_threshold_next_to_0_it_is_shampoo_refreshed_at_every_check(method):
    updates, states = METHODS[method](NEXT_TO_0)
    _assert_same(updates, AS_THEY_ARE(2)[0])
    assert set(_refreshes(states)[-1]) == {STEPS // 2}


@pytest.mark.parametrize("method", METHODS)
def test_with_a_threshold_between_it_is_neither(method):
    updates, states = METHODS[method](0.3)
    _assert_different(updates, AS_THEY_ARE(FOREVER)[0])
    _assert_different(updates, AS_THEY_ARE(2)[0])
    assert min(_refreshes(states)[-1]) < STEPS // 2


def _by_policy(policy: Any) -> optax.GradientTransformation:
    settings = {"statistics_every": 1, "damping_mode": "absolute", "initial": 0.0, "graft": None}
    return curvax.scale_by_shampoo(b2=0.9, eps=EPS, root=2, refresh=policy, **settings)


ABLATIONS = {
    "FOAM without adaptive damping": _family(
        lambda t: _by_policy(curvax.policies.foam(2, t, 1.0, adaptive_damping=False)), WIDE
    ),
    "DR without new eigenvalues": _family(
        lambda t: _by_policy(curvax.policies.diagonal_residual(2, t, update_eigenvalues=False)),
        WIDE,
    ),
}


@pytest.mark.parametrize("policy", ABLATIONS)
def test_ablated_policies_have_the_same_limits(policy):
    once, at_every_check = (_wide(_shampoo(period=period)[0]) for period in (FOREVER, 2))
    _assert_same(ABLATIONS[policy](ENDLESS)[0], once)
    _assert_same(ABLATIONS[policy](NEXT_TO_0)[0], at_every_check)
    _assert_different(once, at_every_check)


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
    expected, _ = _shampoo(gradients)
    directions, states = _dr(gradients, threshold, b2=0.9)
    _assert_same(directions, expected)
    assert set(_refreshes(states)[-1]) == {1}
    stale, states = ABLATIONS["DR without new eigenvalues"](threshold, _wide(gradients))
    _assert_different(stale, _wide(expected))
    assert set(_refreshes(states)[-1]) == {1}
    _, states = ABLATIONS["FOAM without adaptive damping"](threshold, _wide(gradients))
    assert min(_refreshes(states)[-1]) > 1


# ASGO


def _asgo(refresh: Any) -> optax.GradientTransformation:
    return curvax.scale_by_asgo(eps=EPS, refresh=refresh)


ASGO_BY_PERIOD = _family(lambda period: _asgo(curvax.every(period, offset=1)), WIDE)
ASGO_BY_THRESHOLD = {
    "foam": _family(lambda threshold: _asgo(curvax.policies.foam(2, threshold, 1.0)), WIDE),
    "diagonal_residual": _family(
        lambda threshold: _asgo(curvax.policies.diagonal_residual(2, threshold)), WIDE
    ),
}


def test_asgo_with_foam_and_an_infinite_threshold_is_asgo_refreshed_once():
    directions, states = ASGO_BY_THRESHOLD["foam"](ENDLESS)
    _assert_same(directions, ASGO_BY_PERIOD(FOREVER)[0])
    _assert_different(directions, ASGO_BY_PERIOD(2)[0])
    assert set(_refreshes(states)[-1]) == {1}


@pytest.mark.parametrize("policy", ASGO_BY_THRESHOLD)
def test_asgo_with_a_threshold_next_to_0_is_asgo_refreshed_at_every_check(policy):
    directions, states = ASGO_BY_THRESHOLD[policy](NEXT_TO_0)
    _assert_same(directions, ASGO_BY_PERIOD(2)[0])
    assert set(_refreshes(states)[-1]) == {STEPS // 2}


@functools.cache
def _one_sided_asgos(side: str) -> Trajectory:
    def make(value: Any) -> optax.GradientTransformation:
        refresh = curvax.every(value["period"], offset=1)
        numbers = {name: value[name] for name in ("b1", "b2", "eps")}
        return curvax.scale_by_asgo(side=side, refresh=refresh, **numbers)

    return _family(make)


def _one_sided_asgo(gradients: Any = GRADIENTS, side: str = "right", period: int = 2) -> Any:
    value = {"b1": 0.8, "b2": 0.9, "eps": EPS, "period": period}
    return _one_sided_asgos(side)(value, gradients)[0]


@pytest.mark.parametrize("side", ["left", "right"])
def test_asgo_is_shampoo_of_order_2_on_one_side(side):
    asgo = _one_sided_asgo(side=side)
    left, right = (_shampoo(b1=0.8, side=x)[0] for x in ("left", "right"))
    shampoo, other = (left, right) if side == "left" else (right, left)
    _assert_equal(asgo, shampoo)
    _assert_different(asgo, other)


# DASGO


ONE_ROW = {"row": (1, 6), "rows": (3, 1, 5), "vector": (4,)}
ONE_ROW_AXES = {"rows": curvax.MatrixAxes(-2, -1)}


def _dasgo(**settings: Any) -> Any:
    axes = ONE_ROW_AXES if settings.pop("one_row") else AXES
    return curvax.dasgo(1.0, weight_dimension_numbers=axes, **settings)


def test_on_a_matrix_with_one_row_dasgo_is_adam_without_bias_correction():
    """`m / √v` from Optax's Adam, whose corrections are taken out again."""
    b1, b2 = 0.8, 0.9
    gradients = _gradients(ONE_ROW)
    updates = _run(_dasgo(one_row=True, b1=b1, b2=b2, eps=0.0), gradients)
    adam = _run(optax.scale_by_adam(b1, b2, eps=0.0), gradients)
    for i, t in enumerate(range(1, STEPS + 1)):
        correction = (1 - b1**t) / np.sqrt(1 - b2**t)
        expected = jax.tree.map(lambda d, c=correction: -d * c, _at(adam, i))
        assert_close(_at(updates, i), expected)


def test_the_epsilon_of_dasgo_is_inside_the_root():
    gradients = _gradients(ONE_ROW)
    updates = _run(_dasgo(one_row=True, b1=0.0, b2=0.9, eps=EPS), gradients)
    inside, outside = (
        jax.tree.map(np.negative, _run(optax.scale_by_rms(0.9, EPS, eps_in_sqrt=where), gradients))
        for where in (True, False)
    )
    _assert_same(updates, inside, condition=1.0)
    with pytest.raises(AssertionError, match="exceeds the bound"):
        _assert_same(updates, outside, condition=1.0)


def test_on_matrices_with_more_rows_dasgo_is_not_adam():
    updates = _run(_dasgo(one_row=False, b1=0.0, b2=0.9, eps=EPS))
    rms = _run(optax.scale_by_rms(0.9, EPS))
    _assert_different(updates, jax.tree.map(np.negative, rms))


DASGO = curvax.scale_by_dasgo(b1=0.8, b2=0.9, eps=EPS)


def test_on_gradients_whose_columns_do_not_overlap_dasgo_is_right_sided_asgo():
    """Then `GᵀG` is diagonal; DASGO does not see more of it."""

    def apart(x: np.ndarray) -> np.ndarray:
        rows, columns = (np.arange(n) for n in x.shape[-2:])
        return x * (rows[:, None] % len(columns) == columns)

    gradients = jax.tree.map(apart, GRADIENTS)
    _assert_same(_run(DASGO, gradients), _one_sided_asgo(gradients, period=1))
    _assert_different(_run(DASGO), _one_sided_asgo(period=1))
