"""What methods are to each other and to Optax's in special cases, and how they scale.

Both sides of an identity are the same work in floating point, but not in the same order: bounds are
`c · κ · eps`, with the condition `κ` of what is inverted. Where an identity could hold of anything,
`unlike` has what must differ. With CURVAX_ALL_CELLS the identities of Shampoo's kin are asserted on
tall and square matrices too.
"""

import functools
import inspect
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import curvax
from curvax import subspaces
from curvax.transforms.directions._moment_ratio import moment_ratio
from curvax.transforms.kronecker._factor import Factor
from tests.cells import cells
from tests.helpers import assert_close, orthogonal, scanned, steps_of
from tests.shared.identities import NEWTON_SCHULZ, largest_condition, of_shapes
from tests.shared.soap import soap_gradients

Tree = dict[str, np.ndarray]
STEPS = 20
EPS = 2.0**-4  # beside factors of size up to 10
KAPPA = 10 / EPS
FOREVER = 10**6
ENDLESS, NEXT_TO_0 = float("inf"), 1e-12  # thresholds


def normal(*shape: int) -> np.ndarray:
    """Gradients of all steps."""
    return np.random.default_rng(shape).standard_normal((STEPS, *shape))


def of(*shapes: tuple[int, ...]) -> Tree:
    return {str(shape): normal(*shape) for shape in shapes}


def directions(make: Any, gradients: Tree, dtype: str = "float32", value: Any = None) -> Tree:
    """Of all steps, which come first; parameters are ones."""
    return trajectory(make, gradients, dtype, value)[0]


def trajectory(make: Any, gradients: Tree, dtype: str = "float32", value: Any = None) -> Any:
    with jax.enable_x64(dtype == "float64"):
        given = {name: np.asarray(g, jnp.dtype(dtype)) for name, g in gradients.items()}
        ones = {name: np.ones_like(g[0]) for name, g in given.items()}
        return scanned(make)(given, value, ones)


def assert_same(one: Tree, other: Tree, condition: float = KAPPA, factor: float = 16.0) -> None:
    assert_close(steps_of(one), steps_of(other), factor, condition=condition)


def assert_different(one: Tree, other: Tree) -> None:
    """Every matrix, by much more than rounding."""
    for name, x in one.items():
        assert np.abs(x[-1] - other[name][-1]).max() > 0.03 * np.abs(other[name][-1]).max()


class Identity(NamedTuple):
    """Two transformations with the same directions, and others with different ones."""

    one: Any
    other: Any
    gradients: Tree
    condition: Any = KAPPA  # a number, or from gradients of a matrix
    factor: float = 16.0
    dtype: str = "float32"
    unlike: tuple[Any, ...] = ()


GRADIENTS = of(*cells([(2, 4, 7), (2, 7, 4), (5, 5)], of=3))
SQUARE, ENTRIES = of((5, 5)), of((6, 1, 1))
DIAGONAL = {k: g * np.eye(*g.shape[-2:]) for k, g in GRADIENTS.items()}
AXES: dict[str, Any] = {"weight_dimension_numbers": {"*": curvax.MatrixAxes(-2, -1)}}
IDENTITIES: dict[str, Identity] = {}

# Shampoo

shampoo = functools.partial(
    curvax.scale_by_shampoo,
    b2=0.9,
    eps=EPS,
    root=2,
    refresh=curvax.every(2, offset=1),
    initial=0.0,
    statistics_every=1,
    damping_mode="absolute",
    graft=None,
)
original = functools.partial(  # of 2018: sums from εI, damped by that alone
    shampoo, b2=None, root=4, damping_mode="floor", initial=EPS, refresh=curvax.every(1)
)
ADAGRAD = optax.scale_by_rss(initial_accumulator_value=EPS, eps=0.0)
BASES = {  # without a refresh one side is like the other
    "AdamW": (functools.partial(optax.adamw, weight_decay=0.1), "both"),
    "RMSprop": (optax.rmsprop, "smaller"),
    "SGD with momentum": (functools.partial(optax.sgd, momentum=0.9, nesterov=True), "smaller"),
}
for name, (base, side) in BASES.items():
    grafted = functools.partial(curvax.shampoo, 0.1, statistics_every=1, base=base, side=side)
    stale, refreshed = (grafted(refresh=k, matrices="all", **AXES) for k in (FOREVER, 2))
    IDENTITIES[f"grafted and never refreshed Shampoo is {name}"] = Identity(
        stale, base(0.1), GRADIENTS if side == "both" else SQUARE, 1.0, unlike=(refreshed,)
    )
EXACT_MUON = curvax.scale_by_muon(method="svd", nesterov=False, b1=0.0)
fresh = functools.partial(shampoo, b2=0.0, eps=0.0, root=4, refresh=curvax.every(1))
IDENTITIES |= {
    "original Shampoo of one entry is AdaGrad": Identity(original(), ADAGRAD, ENTRIES, 1.0),
    "original Shampoo of diagonal gradients is AdaGrad": Identity(original(), ADAGRAD, DIAGONAL),
    "fresh and undamped Shampoo is exact Muon without momentum": Identity(
        fresh(),
        EXACT_MUON,
        GRADIENTS,
        lambda g: largest_condition(g) ** 2,  # L has the square of G's
        dtype="float64",
        unlike=(fresh(b2=0.5), fresh(eps=1.0), fresh(root=2)),
    ),
}

# ASGO and DASGO

CONDITIONED = of_shapes(*cells([(5, 9), (9, 5), (6, 6), (1, 7)], of=2))
of_momentum = functools.partial(curvax.scale_by_asgo, b1=0.9, variant="from_momentum")
asgo = functools.partial(curvax.scale_by_asgo, b1=0.8, b2=0.9, eps=EPS)
MUON_OF_MOMENTUM = curvax.scale_by_muon(method="svd", nesterov=False, b1=0.9)


def of_momenta(gradients: np.ndarray) -> float:
    """`V = M Mᵀ` has the square of M's condition, its inverse root M's."""
    momenta = itertools.accumulate(np.float64(gradients), lambda m, g: 0.9 * m + g)
    return largest_condition(np.stack([*momenta])) ** 2


def apart(side: str) -> Tree:
    """Gradients whose lines do not overlap: `GGᵀ` or `GᵀG` is diagonal."""

    def masked(x: np.ndarray) -> np.ndarray:
        rows, columns = (np.arange(n) for n in x.shape[-2:])
        lines = rows[:, None] % len(columns) == columns
        return x * (lines if side == "right" else rows[:, None] == columns % len(rows))

    return jax.tree.map(masked, GRADIENTS)


for side, other in (("left", "right"), ("right", "left")):
    IDENTITIES[f"ASGO on the {side} is Shampoo of order 2 there"] = Identity(
        asgo(side=side, refresh=curvax.every(2, offset=1)),
        shampoo(side=side, b1=0.8),
        GRADIENTS,
        factor=0.0,
        unlike=(shampoo(side=other, b1=0.8),),
    )
    IDENTITIES[f"DASGO of lines apart on the {side} is ASGO"] = Identity(
        curvax.scale_by_dasgo(b1=0.8, b2=0.9, eps=EPS, side=side),
        asgo(side=side, refresh=curvax.every(1)),
        apart(side),
    )
IDENTITIES |= {
    "undamped ASGO from momentum is exact Muon without Nesterov": Identity(
        of_momentum(b2=0.0, eps=0.0),
        MUON_OF_MOMENTUM,
        CONDITIONED,
        of_momenta,
        dtype="float64",
        unlike=(of_momentum(b2=0.5, eps=0.0), of_momentum(b2=0.0, eps=0.0, refresh=2)),
    ),
    "so it is in float32 for well-conditioned momenta": Identity(
        of_momentum(b2=0.0, eps=0.0), MUON_OF_MOMENTUM, of_shapes((5, 20)), of_momenta
    ),
}

# Muon

COSINE = optax.cosine_decay_schedule(0.1, STEPS)
ROWS = ((3.0, -3.2, 1.2), (2.0, -1.5, 0.5))
OF_OPTAX: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "defaults": ({}, {}),
    "weight decay, consistent_rms": ({"consistent_rms": 0.2}, {"consistent_rms": 0.2}),
    "without nesterov, three steps": (
        {"nesterov": False, "method": curvax.polar.newton_schulz(3), "b1": 0.8},
        {"nesterov": False, "ns_steps": 3, "beta": 0.8},
    ),
    "bfloat16 momentum": ({"dtype": jnp.bfloat16}, {"mu_dtype": jnp.bfloat16}),
    "rows of coefficients": (
        {"method": curvax.polar.newton_schulz(2, coefficients=ROWS, eps=1e-3)},
        {"ns_coeffs": ROWS, "ns_steps": 2, "eps": 1e-3},
    ),
}
TAKEN = inspect.signature(optax.contrib.muon).parameters
for name, (ours, theirs) in OF_OPTAX.items():
    if not theirs.keys() <= TAKEN.keys():
        continue  # Optax 0.2.6 has no `consistent_rms`
    decay = {"weight_decay": 0.1} if "decay" in name else {}
    IDENTITIES[f"Muon is Optax's: {name}"] = Identity(
        curvax.muon(COSINE, matrices="all", **decay, **ours),
        optax.contrib.muon(COSINE, **decay, **theirs),
        of((6, 10), (12, 5)),
        NEWTON_SCHULZ,
    )
IDENTITIES["OSGDM without momentum is exact Muon without momentum"] = Identity(
    curvax.osgdm(0.1, b1=0.0, matrices="all"),
    curvax.muon(0.1, b1=0.0, nesterov=False, method="svd", consistent_rms=1 / 3, matrices="all"),
    of((6, 9)),
    4.0,
)

# SOAP

SOAP = {str(x): np.stack(soap_gradients(x)) for x in ((5, 9), (6, 9))}
soap = functools.partial(curvax.scale_by_soap, refresh=2)
NEVER = curvax.every(FOREVER, first=False)
IDENTITIES |= {
    "SOAP before any refresh is Adam without bias correction": Identity(
        curvax.scale_by_soap(refresh=NEVER), curvax.moment_ratio(), SOAP, 1.0
    ),
    "SOAP without sides is Adam without bias correction": Identity(
        soap(max_order=4), curvax.moment_ratio(), SOAP, 1.0, unlike=(soap(),)
    ),
    "SOAP on one side is Eigen-Adam": Identity(
        soap(side="left"), curvax.scale_by_eigen_adam(refresh=2), SOAP, factor=0.0, unlike=(soap(),)
    ),
    **{
        f"SOAP with {x} statistics does not rotate a side above max_order": Identity(
            soap(max_order=8, statistics=x), soap(side="smaller", statistics=x), SOAP, factor=0.0
        )
        for x in ("gradient", "kl")
    },
    **{
        f"momentum in a turning basis is momentum, Nesterov's: {nesterov}": Identity(
            curvax.in_eigenbasis(optax.trace(0.9, nesterov), refresh=curvax.every(4)),
            optax.trace(0.9, nesterov),
            SOAP,
            1.0,
            64.0,
            "float64",
        )
        for nesterov in (False, True)
    },
}

# Low rank

LOW_RANK = of(*cells([(6, 9), (7, 7), (9, 6)], of=3))
ONCE = curvax.every(FOREVER)  # the first step alone
GALORE = curvax.scale_by_galore(rank=3, refresh=4, scale=1.0)
PARTS: dict[str, Any] = {"rank": 3, "b2": 0.999, "eps": 1e-8, "bias_correction": True, "b3": None}
PARTS |= {"switching": "evd", "compensation": None, "scale": 1.0, "refresh": 4}
sumo = functools.partial(curvax.scale_by_sumo, rank=9, b1=0.0)
PAIRS = {
    # Without tracking, switching and compensation, around GaLore's Adam, with exact bases.
    "Alice without its parts is GaLore": (curvax.scale_by_alice(**PARTS), GALORE),
    "a subspace around Adam is GaLore": (
        curvax.in_subspace(
            moment_ratio(0.9, 0.999, 1e-8, bias_correction=True),
            3,
            basis=subspaces.svd(),
            refresh=curvax.every(4),
        ),
        GALORE,
    ),
    "Fira at full rank is GaLore": (
        curvax.scale_by_fira(rank=9, refresh=4),
        curvax.scale_by_galore(rank=9, refresh=4),
    ),
    "Alice at full rank with one basis is Eigen-Adam": (
        curvax.scale_by_alice(rank=9, b1=0.9, b2=0.95, scale=1.0, switching="none", refresh=ONCE),
        curvax.scale_by_eigen_adam(b1=0.9, b2=0.95, refresh=ONCE, side="smaller"),
    ),
    "SUMO at full rank without momentum is exact Muon": (
        sumo(refresh=4, side="smaller"),
        EXACT_MUON,
    ),
    # On the larger side a basis holds the range of its own gradient alone.
    "so it is on the larger side, always refreshed": (sumo(refresh=1, side="larger"), EXACT_MUON),
}
IDENTITIES |= {
    name: Identity(*pair, LOW_RANK, 1e4, 64.0, "float64") for name, pair in PAIRS.items()
}
# One row in all is projected to a number: its columns are the whole matrix's only one.
IDENTITIES["APOLLO-Mini of one column is APOLLO"] = Identity(
    curvax.scale_by_apollo(rank=1, whole=True, side="left"),
    curvax.scale_by_apollo(rank=1, side="left"),
    of((6, 1)),
    4.0,
    dtype="float64",
)


@pytest.mark.parametrize("name", cells(IDENTITIES, of=16))
def test_directions_are_the_same(name: str) -> None:
    case = IDENTITIES[name]
    run = functools.partial(directions, gradients=case.gradients, dtype=case.dtype)
    expected = run(case.other)
    found = run(case.one)
    for k, g in case.gradients.items():
        condition = case.condition(g) if callable(case.condition) else case.condition
        assert_same({k: found[k]}, {k: expected[k]}, condition, case.factor)
    for unlike in case.unlike:
        assert_different(run(unlike), expected)


DIFFERENT = {
    "original Shampoo is not AdaGrad": (original(), ADAGRAD),
    "DASGO is not Adam on matrices with more rows": (
        curvax.scale_by_dasgo(b1=0.0, b2=0.9, eps=EPS),
        optax.scale_by_rms(0.9, EPS),
    ),
    "DASGO is not ASGO where lines overlap": (
        curvax.scale_by_dasgo(b1=0.8, b2=0.9, eps=EPS, side="left"),
        asgo(side="left", refresh=curvax.every(1)),
    ),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_directions_are_different(name: str) -> None:
    one, other = DIFFERENT[name]
    assert_different(directions(one, GRADIENTS), directions(other, GRADIENTS))


@pytest.mark.parametrize("layout", cells(["a row", "a column"], of=2))
def test_original_shampoo_of_one_row_is_full_matrix_adagrad_between_norms(layout: str) -> None:
    """`D = (ε + Σ‖g‖²)^(-1/4) g (εI + Σgᵀg)^(-1/4)`; on that side alone, with p = 2, AdaGrad."""
    column = layout == "a column"
    rows = normal(3, 1, 6)
    gradients = {"w": rows.mT if column else rows}
    side = "left" if column else "right"
    found = [directions(x, gradients)["w"] for x in (original(), original(root=2, side=side))]
    total, norm = EPS * np.tile(np.eye(6), (3, 1, 1)), np.full((3, 1, 1), EPS)
    for g, *both in zip(rows, *found, strict=True):
        gram = g.mT @ g
        total, norm = total + gram, norm + np.trace(gram, axis1=-2, axis2=-1)[:, None, None]
        d, q = np.linalg.eigh(total)
        for root, left, ours in zip((4, 2), (norm**-0.25, 1.0), both, strict=True):
            power = (q * d[:, None] ** (-1 / root)) @ q.mT
            ours = ours.mT if column else ours
            assert_close(ours, left * g @ power, condition=float(np.max(d) / EPS))


def test_galore_at_full_rank_with_one_basis_is_adam_in_that_basis() -> None:
    g = normal(6, 9)
    galore = curvax.scale_by_galore(rank=6, refresh=ONCE, scale=1.0)
    found, states = trajectory(galore, {"w": g}, "float64")
    u = states[0]["w"].subspace.basis[0]
    adam = directions(optax.scale_by_adam(), {"w": u.T @ g}, "float64")
    assert_close(found["w"], u @ adam["w"], 64, condition=1e4)


def test_head_wise_muon_is_muon_per_head() -> None:
    gradients = {"query/kernel": normal(6, 3, 4), "out/kernel": normal(3, 4, 6)}
    head_wise = curvax.muon(1.0, matrices=curvax.MatrixRule(head_wise=True))
    found = directions(head_wise, gradients)["query/kernel"]
    heads = {f"{h}/kernel": gradients["query/kernel"][:, :, h] for h in range(3)}
    alone = directions(curvax.muon(1.0), heads)
    assert_same({f"{h}/kernel": found[:, :, h] for h in range(3)}, alone, NEWTON_SCHULZ)


def test_without_others_muon_decays_all_parameters_alike() -> None:
    params = {"kernel": np.ones((3, 4), np.float32), "scale": np.ones(4, np.float32)}
    for muon, moved in ((curvax.muon, -0.05), (optax.contrib.muon, 0.0)):
        optimizer = muon(0.5, weight_decay=0.1)
        zero = jax.tree.map(np.zeros_like, params)
        updates, _ = jax.jit(optimizer.update)(zero, jax.jit(optimizer.init)(params), params)
        assert_close(updates["kernel"], -0.05 * params["kernel"])
        assert_close(updates["scale"], moved * params["scale"])


# Vectors of ASGO and DASGO


VECTORS = {"vector": normal(5), "bias": normal(3), "norm/scale": normal(2, 4), "scalar": normal()}
LINES = {"left": of((6, 1), (3, 5, 1)), "right": {**of((1, 6), (3, 1, 5)), "vector": normal(5)}}
B1, B2, DAMPING = 0.8, 0.7, 1e-3
MOMENTS: dict[str, Any] = {"b1": B1, "b2": B2, "eps": DAMPING}


def averaged(gradients: np.ndarray, squares: np.ndarray) -> np.ndarray:
    """Momenta over the roots of averaged squares, with ε inside of the root."""
    m, v, found = 0 * gradients[0], 0 * squares[0], []
    for g, s in zip(gradients, squares, strict=True):
        m, v = B1 * m + (1 - B1) * g, B2 * v + (1 - B2) * s
        found.append(-m / np.sqrt(v + DAMPING))
    return np.stack(found)


def summed(g: np.ndarray) -> np.ndarray:
    return np.sum(g**2, axis=tuple(range(1, g.ndim)), keepdims=True)


@pytest.mark.parametrize("method", [curvax.asgo, curvax.dasgo])
def test_a_vector_bias_or_scale_has_one_adaptive_number_as_in_adagrad_norm(method: Any) -> None:
    found = directions(method(1.0, **MOMENTS), VECTORS)
    assert_same(found, {k: averaged(g, summed(g)) for k, g in VECTORS.items()}, 1.0)


def test_theoretical_asgo_of_a_vector_is_adagrad_norm() -> None:
    found = directions(curvax.asgo(1.0, variant="theoretical", eps=0.1), VECTORS)
    expected = {k: -g / (np.cumsum(summed(g), axis=0) ** 0.5 + 0.1) for k, g in VECTORS.items()}
    assert_same(found, expected, 1.0)


@pytest.mark.parametrize("side", LINES)
def test_dasgo_of_lines_is_adam_without_bias_correction_its_epsilon_inside(side: str) -> None:
    """On the right side of one row, as every vector is; on the left of one column."""
    axes = {k: curvax.MatrixAxes(-2, -1) for k, g in LINES[side].items() if g.ndim > 2}
    dasgo = curvax.dasgo(1.0, side=side, weight_dimension_numbers=axes, **MOMENTS)
    found = directions(dasgo, LINES[side])
    assert_same(found, {k: averaged(g, g**2) for k, g in LINES[side].items()}, 1.0)


# Scales


def scaled(trees: Any, exponent: int) -> Any:
    return jax.tree.map(lambda x: np.ldexp(x, exponent), trees)


MUON, SWAN = curvax.scale_by_muon(), curvax.scale_by_swan()
EXACT = curvax.polar.newton_schulz(eps=0.0)
relative = functools.partial(shampoo, root=4, damping_mode="relative")
SCALED: dict[str, tuple[Any, int]] = {  # and the power of the scale that directions have
    "Shampoo": (relative(), 0),
    "Shampoo²": (relative(root=2), -1),
    "grafted Shampoo²": (relative(root=2, graft="norm"), 1),
    "Muon": (curvax.scale_by_muon(method=EXACT), 0),
    "Muon without Nesterov": (curvax.scale_by_muon(method=EXACT, nesterov=False), 0),
    "RACS without averages": (curvax.scale_by_racs(b2=0.0), 0),
    "SWAN": (SWAN, 0),
}


@pytest.mark.parametrize("name", cells(SCALED, of=4))
def test_directions_scale_as_a_power_of_the_gradients_bit_for_bit(name: str) -> None:
    """By even powers of two, whose square roots fourth roots have in them; by others up to
    rounding. Shampoo's have `s^(1 - 4/p)`, with relative damping; grafting makes it `s`."""
    make, power = SCALED[name]
    given = {k: np.float32(g) for k, g in GRADIENTS.items()}
    plain = directions(make, given)
    for exponent in (-40, -2, 2, 24):
        expected = scaled(plain, power * exponent)
        assert_same(directions(make, scaled(given, exponent)), expected, factor=0.0)
    assert_same(directions(make, scaled(given, -3)), scaled(plain, power * -3))


@pytest.mark.parametrize("setting", [{"damping_mode": "absolute"}, {"initial": EPS}], ids=str)
def test_shampoo_does_not_ignore_scales_without_these_settings(setting: Any) -> None:
    make = relative(**setting)
    assert_different(directions(make, scaled(GRADIENTS, -4)), directions(make, GRADIENTS))


@pytest.mark.parametrize("scale", [1e-3, 0.7, 1e4])
def test_muon_hardly_depends_on_the_scale_of_the_gradients(scale: float) -> None:
    given = of_shapes((5, 8), (8, 5), (6, 6))
    pair = [directions(MUON, {k: s * g for k, g in given.items()}) for s in (1, scale)]
    # Besides rounding there is eps = 1e-8 beside a norm of scale · ‖G‖ > scale.
    eps = float(np.finfo(np.float32).eps) + 1e-8 / scale
    assert_close(*map(steps_of, pair), condition=NEWTON_SCHULZ, eps=eps)


def test_swan_does_not_see_offsets_of_rows() -> None:
    found = [directions(SWAN, {"w": normal(5, 8) + c})["w"] for c in (0, 2)]
    assert_close(*found, 256)


def test_swan_in_bfloat16_keeps_the_rank() -> None:
    """Rows sum to 0, so the rank of (8, 6) is 5: rounding must not fill the sixth direction."""
    direction = directions(SWAN, {"w": normal(8, 6)[:1]}, "bfloat16")["w"][0]
    singular = np.linalg.svd(np.asarray(direction, np.float64))[1]
    assert singular[4] > 0.9 and singular[5] < 0.05


# Policies at their limits: FOAM, DR-Shampoo, ablations, and ASGO with the same policies


def refreshes_of(states: Any, field: str = "refreshes") -> np.ndarray:
    """How often each matrix's factors were refreshed at each step, or what else was counted."""
    is_factor = lambda x: isinstance(x, Factor)  # noqa: E731
    factors = [x for x in jax.tree.leaves(states, is_leaf=is_factor) if is_factor(x)]
    return np.concatenate([getattr(x, field).reshape(STEPS, -1) for x in factors], axis=1)


def foam(value: Any) -> Any:
    return curvax.scale_by_foam(check_every=2, graft=None, b2=0.9, **value)


def dr(threshold: Any) -> Any:
    settings: dict[str, Any] = {"b2": 0.9, "eps": EPS, "graft": None}
    return curvax.scale_by_dr_shampoo(check_every=2, threshold=threshold, **settings)


def test_foam_depends_on_scales_unless_its_dampings_follow() -> None:
    def run(exponent: int, scale: float) -> Any:
        value = {"threshold": 0.8, "max_damping": scale * 2.0**-2, "eps": scale * EPS}
        found, states = trajectory(foam, scaled(GRADIENTS, exponent), value=value)
        return found, refreshes_of(states)

    (plain, number), (found, others) = run(0, 1.0), run(6, 2.0**12)
    assert_same(found, scaled(plain, -6))
    assert np.array_equal(number, others)
    assert min(number[-1]) < STEPS // 2 and max(number[-1]) > 1  # decisions each way
    assert set(run(-6, 1.0)[1][-1]) == {1}  # beside eps the gradients are nothing


def test_the_threshold_of_dr_shampoo_does_not_depend_on_scales() -> None:
    """Square gradients: LAPACK's basis of a null space depends on scales, and residuals in it."""
    gradients = of((STEPS, 2, 5, 5))
    numbers = [
        refreshes_of(trajectory(dr, scaled(gradients, exponent), value=0.4)[1])
        for exponent in (0, -12, 7)
    ]
    assert np.array_equal(numbers[1:], numbers[:1] * 2)
    assert min(numbers[0][-1]) < STEPS // 2 and max(numbers[0][-1]) > 1  # decisions each way


WIDE = of((2, 4, 7))
SHARED: dict[str, Any] = {"eps": EPS, "b2": 0.9, "weight_decay": 0.1, **AXES}
AS_THEY_ARE: dict[str, Any] = {"root": 2, "statistics_every": 1, "graft": "adam", "base": None}
AS_THEY_ARE |= {"damping_mode": "absolute", "initial": 0.0, **SHARED}


def full_shampoo(period: Any, **settings: Any) -> Any:
    return curvax.shampoo(1.0, refresh=curvax.every(period, offset=1), **AS_THEY_ARE, **settings)


def shampoo_of(period: Any) -> Any:
    return shampoo(refresh=curvax.every(period, offset=1))


def asgo_of(period: Any) -> Any:
    return curvax.scale_by_asgo(eps=EPS, refresh=curvax.every(period, offset=1))


# By the threshold, and by the period of refreshes.
BY_THRESHOLD: dict[str, tuple[Any, Any]] = {
    "foam": (
        lambda t: curvax.foam(1.0, check_every=2, threshold=t, max_damping=1.0, **SHARED),
        full_shampoo,
    ),
    "foam by rotations": (
        lambda t: curvax.foam(
            1.0, check_every=2, threshold=t, max_damping=1.0, method="rotations", **SHARED
        ),
        functools.partial(full_shampoo, method="rotations"),
    ),
    "dr_shampoo": (
        lambda t: curvax.dr_shampoo(1.0, check_every=2, threshold=t, **SHARED),
        full_shampoo,
    ),
    "FOAM without adaptive damping": (
        lambda t: shampoo(refresh=curvax.policies.foam(2, t, 1.0, adaptive_damping=False)),
        shampoo_of,
    ),
    "DR without new eigenvalues": (
        lambda t: shampoo(
            refresh=curvax.policies.diagonal_residual(2, t, update_eigenvalues=False)
        ),
        shampoo_of,
    ),
    "asgo by FOAM": (
        lambda t: curvax.scale_by_asgo(eps=EPS, refresh=curvax.policies.foam(2, t, 1.0)),
        asgo_of,
    ),
    "asgo by DR": (
        lambda t: curvax.scale_by_asgo(eps=EPS, refresh=curvax.policies.diagonal_residual(2, t)),
        asgo_of,
    ),
}
NEW_EIGENVALUES = ("dr_shampoo", "asgo by DR")  # at each check, whatever the threshold


@pytest.mark.parametrize("name", cells(BY_THRESHOLD, of=7))
def test_limits_of_the_threshold(name: str) -> None:
    """Next to 0 all checks are refreshes; with an infinite threshold only the first one is."""
    by_threshold, by_period = BY_THRESHOLD[name]
    once, at_every_check = (directions(by_period, WIDE, value=k) for k in (FOREVER, 2))
    assert_different(once, at_every_check)
    updates, states = trajectory(by_threshold, WIDE, value=NEXT_TO_0)
    assert_same(updates, at_every_check)
    assert set(refreshes_of(states)[-1]) == {STEPS // 2}
    updates, states = trajectory(by_threshold, WIDE, value=ENDLESS)
    assert set(refreshes_of(states)[-1]) == {1}
    assert set(refreshes_of(states, "checks")[-1]) == {STEPS // 2}
    if name not in NEW_EIGENVALUES:
        assert_same(updates, once)
    if name in ("foam", "dr_shampoo"):
        updates, states = trajectory(by_threshold, WIDE, value=0.3)
        assert_different(updates, once)
        assert_different(updates, at_every_check)
        assert min(refreshes_of(states)[-1]) < STEPS // 2


def test_dr_shampoo_decomposes_once_where_the_singular_vectors_stay() -> None:
    """And is Shampoo refreshed at every check all the same; FOAM's `h` sees eigenvalues too."""
    u, v = (orthogonal(jax.random.key(i), n, 4) for i, n in enumerate((4, 7)))
    values = np.random.default_rng(0).uniform(0.5, 2.0, (STEPS, 2, 1, 4))
    gradients, threshold = {"(2, 4, 7)": (u * values) @ v.T}, 1e-3
    expected = directions(shampoo_of, gradients, value=2)
    found, states = trajectory(dr, gradients, value=threshold)
    assert_same(found, expected)
    assert set(refreshes_of(states)[-1]) == {1}
    ablated = BY_THRESHOLD["DR without new eigenvalues"][0]
    stale, states = trajectory(ablated, gradients, value=threshold)
    assert_different(stale, expected)
    assert set(refreshes_of(states)[-1]) == {1}
    ablated = BY_THRESHOLD["FOAM without adaptive damping"][0]
    _, states = trajectory(ablated, gradients, value=threshold)
    assert min(refreshes_of(states)[-1]) > 1
