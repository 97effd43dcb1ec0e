"""Low-rank methods against their transcriptions, and what holds of every subspace.

Where a gradient's rank is below that of the subspace, the last columns of a basis are arbitrary;
the transcription is then given the bases that were found.
"""

import functools
import itertools
import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_close, share
from reference import alice as alice_reference
from reference import galore as galore_reference
from reference.sumo import sumo as sumo_reference

import curvax
from curvax import policies, subspaces
from curvax.transforms._keys import key_for
from curvax.transforms.subspace._bases import SubspaceCheck, complement_basis

STEPS = 30
RANK = 3
SHAPES = {"wide": (6, 9), "tall": (9, 6), "square": (7, 7)}


def _gradients(shape, seed=0):
    """Noise about a mean of well separated directions."""
    generator = np.random.default_rng([seed, *shape])
    m, n = shape
    left, _ = np.linalg.qr(generator.standard_normal((m, m)))
    right, _ = np.linalg.qr(generator.standard_normal((n, n)))
    k = min(m, n)
    mean = (left[:, :k] * 4.0 ** -np.arange(k)) @ right[:, :k].T
    return [8 * mean + 0.3 * generator.standard_normal(shape) for _ in range(STEPS)]


GRADIENTS = {name: _gradients(shape) for name, shape in SHAPES.items()}
TRANSPOSED = {name: GRADIENTS[name] for name in ("wide", "tall")}  # of transposed shapes


def _of_shapes(variant, variants):
    """The gradients of one of the three shapes, by the variant's place: they take turns.

    Of all three for the first variant, and where CURVAX_ALL_CELLS asks for it.
    """
    place, names = list(variants).index(variant), list(SHAPES)
    taken = share(names[place % 3 :] + names[: place % 3], of=3) if place else names
    return {name: GRADIENTS[name] for name in sorted(taken, key=names.index)}


@functools.cache
def _compiled(make):
    """Directions and states of all steps for all shapes, compiled once for all values.

    From `make(value)`, gradients, and the value, such as a period, which is traced.
    """

    def run(stacked, value):
        transformation = make(value)

        def step(state, gradient):
            direction, state = transformation.update(gradient, state)
            return state, (direction, state)

        first = jax.tree.map(lambda g: g[0], stacked)
        return jax.lax.scan(step, transformation.init(first), stacked)[1]

    return jax.jit(run)


@functools.cache
def _always(transformation):
    return lambda value: transformation


def _trajectories(transformation, gradients=GRADIENTS, dtype="float64", value: Any = 1):
    """Directions and states of a transformation, or of what `transformation(value)` makes."""
    stacked = {name: np.asarray(np.stack(g), dtype) for name, g in gradients.items()}
    make = transformation if callable(transformation) else _always(transformation)
    return jax.tree.map(np.asarray, _compiled(make)(stacked, value))


def _due(period, offset=0):
    return [t for t in range(1, STEPS + 1) if t == 1 or (t - offset) % period == 0]


def _oriented(name, x, side="smaller"):
    """A state of ours as the transcription has it, with the projected side on the left."""
    m, n = SHAPES[name]
    right = side == "right" or (side == "smaller" and m > n)
    return np.swapaxes(x, -1, -2) if right else np.asarray(x)


CONDITION = 1e4  # gaps between singular values; the smallest second moments


def _assert_follows(transformation, reference, given=GRADIENTS, value: Any = 1):
    """Every direction, basis and moment of every shape is the transcription's."""
    with jax.enable_x64(True):
        directions, states = _trajectories(transformation, given, value=value)
        state = (
            states[0] if isinstance(states, tuple) and hasattr(states[0], "subspaces") else states
        )
        for name, gradients in given.items():
            subspace = jax.tree.map(lambda x: x, state.subspaces[name])
            desired, theirs = reference(gradients, subspace)
            assert_close(directions[name], np.stack(desired), 64, condition=CONDITION)
            if subspace.basis is not None:
                bases = np.stack([s["U"] for s in theirs])
                assert_close(subspace.basis, bases, 64, condition=CONDITION)
            inner = state.inner
            for field, key in (("mu", "m"), ("nu", "v")):
                found = _oriented(name, getattr(inner, field)[name])
                wanted = np.stack([s[key] for s in theirs])
                assert_close(found, wanted, 64, condition=CONDITION)
    return next(iter(state.subspaces.values()))


def _galore(period):
    return curvax.scale_by_galore(rank=RANK, refresh=curvax.every(period))


@pytest.mark.xdist_group("GaLore by period")
@pytest.mark.parametrize("period", [1, 4, 7])
def test_galore_follows_the_transcription(period):
    subspace = _assert_follows(
        _galore, lambda g, _: galore_reference.galore(g, rank=RANK, K=period), value=period
    )
    assert subspace.refreshes[-1] == len(_due(period))


FIRA: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "complement": ({}, {}),
    "official": (
        {"residual": "scaled", "scale_compensation": False},
        {"residual": "scaled", "scale_compensation": False},
    ),
    "plus": ({"plus": 0.4}, {"plus": True}),
    "unlimited": ({}, {"limiter": False}),
}


def _fira(gamma):
    return curvax.scale_by_fira(rank=RANK, refresh=4, gamma=gamma)


shares_fira = pytest.mark.xdist_group("Fira with its complement")


@pytest.mark.parametrize(
    ("variant", "gamma"),
    [
        pytest.param("complement", 1.01, marks=shares_fira),
        pytest.param("unlimited", float("inf"), marks=shares_fira),
        ("official", None),  # with the limiter as it is without saying so
        ("plus", None),
    ],
)
def test_fira_follows_the_transcription(variant, gamma):
    ours, theirs = FIRA[variant]
    static = curvax.scale_by_fira(rank=RANK, refresh=4, **ours)
    _assert_follows(
        _fira if gamma else static,
        lambda g, _: galore_reference.fira(g, rank=RANK, K=4, **theirs),
        GRADIENTS if gamma else _of_shapes(variant, FIRA),
        gamma,
    )


@jax.jit
def _keys(own):
    """Of all draws, from a parameter's own key: for a basis drawn as a whole, and in part."""
    drawn = jax.vmap(lambda draws: key_for(own, draws))(jnp.arange(STEPS))
    return drawn, jax.vmap(jax.random.split)(drawn)[:, 1]


_permuted = jax.jit(jax.random.permutation, static_argnums=1)
_normal = jax.jit(jax.random.normal, static_argnums=(1, 2))
_complement = jax.jit(complement_basis)


def _draws(subspace, period, mixed):
    """The transcription's random choices, from the keys in our state."""
    due, keys = _due(period), _keys(subspace.key[0])[mixed]
    key = lambda t: keys[due.index(t)]  # noqa: E731
    return {
        "draw": lambda t, available, count: np.asarray(_permuted(key(t), available))[:count],
        "gaussian": lambda t, shape: np.asarray(_normal(key(t), shape, "float64")),
        "complement": lambda t, u: np.asarray(_complement(u)),
    }


ALICE: dict[str, dict[str, Any]] = {
    "alice": {},
    "alice_0": {"tracking": False},
    "full_basis": {"switching": "full_basis"},
    "gaussian_mix": {"switching": "gaussian_mix"},
    "gaussian": {"switching": "gaussian"},
    "no switch": {"switching": "none"},
    "evd": {"switching": "evd"},
    "fira": {"compensation": "fira"},
    "fira+": {"compensation": "fira+"},
    "none": {"compensation": "none", "bias_correction": True, "eps": 1e-8},
}


@functools.cache
def _alice(variant):
    options = {"rank": RANK, "leading": 2, "b3": 0.9, **ALICE[variant]}
    return options, lambda period: curvax.scale_by_alice(refresh=curvax.every(period), **options)


def _shares_alice(variant):
    return pytest.mark.xdist_group(f"Alice: {variant}")


@pytest.mark.parametrize(
    ("variant", "period"),
    [
        pytest.param(variant, period, marks=_shares_alice(variant))
        for variant, period in [("alice", 1), ("alice", 7), *((variant, 4) for variant in ALICE)]
    ],
)
def test_alice_follows_the_transcription(variant, period):
    options, make = _alice(variant)
    subspace = _assert_follows(
        make,
        lambda g, subspace: alice_reference.alice(
            g, K=period, **_draws(subspace, period, variant != "gaussian"), **options
        ),
        TRANSPOSED if variant == "evd" else _of_shapes(variant, ALICE),
        period,
    )
    assert (subspace.tracked is None) == (variant == "alice_0")


@_shares_alice("alice")
def test_alices_tracked_moment_and_energies_follow_the_transcription():
    with jax.enable_x64(True):
        options, make = _alice("alice")
        _, (state, _) = _trajectories(make, value=4)
        for name, gradients in GRADIENTS.items():
            subspace = state.subspaces[name]
            _, theirs = alice_reference.alice(
                gradients, K=4, **_draws(subspace, 4, True), **options
            )
            for ours, key in (
                (subspace.tracked, "Q_tilde"),
                (subspace.compensation.energy, "p"),
                (subspace.compensation.norm, "phi"),
            ):
                assert_close(ours, np.stack([s[key] for s in theirs]), 64, condition=CONDITION)


APOLLO: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "random": ({}, {}),
    "svd": ({"variant": "svd"}, {"variant": "svd"}),
    "mini": ({"variant": "mini"}, {"mini": True, "rank": 1}),
    "official": (
        {"gamma": 1.01, "sqrt_scale": True, "scale": 4.0},
        {"limiter": True, "sqrt_scale": True, "alpha": 4.0},
    ),
}


@pytest.mark.parametrize("variant", APOLLO)
def test_apollo_follows_the_transcription(variant):
    ours, theirs = APOLLO[variant]
    due = _due(4)

    def reference(gradients, subspace):
        rank = theirs.get("rank", RANK)
        rows = min(gradients[0].shape)

        def projection(t):
            key = key_for(subspace.key[0], jnp.int32(due.index(t)))
            return np.asarray(jax.random.normal(key, (rows, rank), "float64")) / np.sqrt(rank)

        given = None if variant == "svd" else projection
        return galore_reference.apollo(
            gradients, **{"rank": RANK, "K": 4, "projection": given, **theirs}
        )

    transformation = curvax.scale_by_apollo(rank=RANK, refresh=4, **ours)
    subspace = _assert_follows(transformation, reference, _of_shapes(variant, APOLLO))
    assert (subspace.basis is None) == (variant != "svd")


SUMO: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {"limiter": True}),
    "average": ({"accumulate": "ema", "b1": 0.8}, {"momentum": "ema", "mu": 0.8}),
    "by Newton-Schulz": ({"method": "newton_schulz"}, {"exact": False, "limiter": True}),
    "smaller side": ({"side": "smaller"}, {}),
    "shape": ({"scale": 4.0}, {"alpha": 4.0}),
}


@functools.cache
def _sumo(variant):
    """From the period, and of the variants that differ in it from the scale."""
    ours, _ = SUMO[variant]

    def make(value):
        settings = {**ours, **value, "refresh": curvax.every(value["refresh"], offset=1)}
        return curvax.scale_by_sumo(rank=RANK, basis=subspaces.svd(), gamma=1.1, **settings)

    return make


@pytest.mark.parametrize(
    ("variant", "period"),
    [
        pytest.param(
            variant,
            period,
            marks=pytest.mark.xdist_group(f"SUMO: {variant.replace('shape', 'plain')}"),
        )
        for variant, period in [("plain", 1), ("plain", 7), *((variant, 4) for variant in SUMO)]
    ],
)
def test_sumo_follows_the_transcription(variant, period):
    ours, theirs = SUMO[variant]
    given, make, value = _of_shapes(variant, SUMO), _sumo(variant), {"refresh": period}
    if variant in ("plain", "shape"):
        given, make, value = GRADIENTS, _sumo("plain"), {**value, "scale": ours.get("scale", 1.0)}
    with jax.enable_x64(True):
        directions, (state, _) = _trajectories(make, given, value=value)
        for name, gradients in given.items():
            options = dict(theirs)
            if "side" in ours:
                m, n = SHAPES[name]
                options["side"] = "left" if m <= n else "right"
            desired, states = sumo_reference(gradients, rank=RANK, period=period, **options)
            assert_close(directions[name], np.stack(desired), 64, condition=CONDITION)
            moments = np.stack([s["M"] for s in states])
            assert_close(state.inner[0].mu[name], moments, 64, condition=CONDITION)
            bases = np.stack([s["Q"] for s in states])
            assert_close(state.subspaces[name].basis, bases, 64, condition=CONDITION)
            assert state.subspaces[name].refreshes[-1] == len(_due(period, 1))


def test_sumo_refreshed_by_norm_follows_the_transcription():
    gradients = {
        name: [g * (0.01 if t % 5 == 3 else 1) for t, g in enumerate(gs)]
        for name, gs in TRANSPOSED.items()
    }
    norms = [np.linalg.norm(g) for gs in gradients.values() for g in gs]
    threshold = float(np.exp(np.mean(np.log([min(norms), max(norms)]))))
    transformation = curvax.scale_by_sumo(
        rank=RANK, refresh=policies.below_norm(threshold), basis=subspaces.svd()
    )
    with jax.enable_x64(True):
        directions, (state, _) = _trajectories(transformation, gradients)
        for name, gs in gradients.items():
            desired, states = sumo_reference(gs, rank=RANK, threshold=threshold, limiter=True)
            assert_close(directions[name], np.stack(desired), 64, condition=CONDITION)
            refreshed = np.cumsum([s["refreshed"] for s in states])
            assert_close(state.subspaces[name].refreshes, refreshed, factor=0)
            assert 1 < refreshed[-1] < STEPS


@shares_fira
def test_given_the_bases_rank_deficient_gradients_follow_the_transcription():
    """Rank 1 below the subspace's 3, in float64, with every compensation."""
    generator = np.random.default_rng(5)
    gradients = {
        name: [
            np.outer(*(generator.standard_normal(size) for size in SHAPES[name]))
            for _ in range(STEPS)
        ]
        for name in TRANSPOSED
    }
    with jax.enable_x64(True):
        together = {**GRADIENTS, **gradients}
        directions, (state, _) = _trajectories(_fira, together, value=float("inf"))
        for name, gs in gradients.items():
            bases = state.subspaces[name].basis
            desired, _ = galore_reference.fira(
                gs,
                rank=RANK,
                K=4,
                basis=lambda t, _: np.asarray(bases[t - 1]),  # noqa: B023
                limiter=False,  # at a refresh only rounding is outside, of which no norm is sure
            )
            # At step 1 Adam raises rounding by the inverse of its epsilon.
            assert_close(directions[name], np.stack(desired), 64, condition=1e8)


FINDERS = {
    "svd": subspaces.svd(),
    "randomized": subspaces.randomized(2),
    "iterated": subspaces.iterated(),
    "by QR": subspaces.iterated(rotate=False),
    "complement": subspaces.complement(2),
    "full_basis": subspaces.full_basis(1),
    "complement of a random one": subspaces.complement(2, subspaces.randomized(2)),
    "gaussian_mix": subspaces.gaussian_mix(2),
    "gaussian": subspaces.gaussian(kept=False),
}


@functools.cache
def _with_everything(finder):
    """`in_subspace` with this finder and all that the finder allows."""
    basis = FINDERS[finder]
    return curvax.in_subspace(
        optax.scale_by_adam(),
        RANK,
        basis=basis,
        refresh=curvax.every(4),
        carry=subspaces.rotate() if basis.kept else None,
        # Of a basis that is not orthonormal nothing may be outside, step after step.
        compensation=subspaces.optimal() if basis.orthonormal else subspaces.fira(),
        tracking=basis.kept,
    )


def _shared_by_finder(finders):
    marks = {finder: pytest.mark.xdist_group(f"Finder: {finder}") for finder in finders}
    return [pytest.param(finder, marks=mark) for finder, mark in marks.items()]


@pytest.mark.parametrize("finder", _shared_by_finder(FINDERS))
def test_bases_are_what_they_say_and_every_field_advances(finder):
    given = _of_shapes(finder, FINDERS)
    directions, states = _trajectories(_with_everything(finder), given, "float32")
    basis = FINDERS[finder]
    for name in directions:
        assert np.isfinite(directions[name]).all()
        subspace = states.subspaces[name]
        assert subspace.refreshes[-1] == len(_due(4)) and not subspace.rejected.any()
        if basis.orthonormal:
            gram = np.asarray(subspace.basis.mT @ subspace.basis)
            eye = np.broadcast_to(np.eye(RANK), gram.shape)
            assert_close(gram, eye, 32, eps=float(np.finfo("float32").eps))
        if basis.kept:
            moved = [
                t
                for t in range(2, STEPS + 1)
                if (subspace.basis[t - 1] != subspace.basis[t - 2]).any()
            ]
            assert moved == _due(4)[1:]
        for field in ("tracked", "compensation"):
            for leaf in jax.tree.leaves(getattr(subspace, field)):
                for before, after in itertools.pairwise(leaf):
                    assert (before != after).any(), (field, name)
        for moment in (states.inner.mu[name], states.inner.nu[name]):
            assert all((x != y).any() for x, y in itertools.pairwise(moment))


def _turned(name, x):
    """On its smaller side, by an orthogonal matrix."""
    order = min(SHAPES[name])
    q = np.linalg.qr(np.random.default_rng(1).standard_normal((order, order)))[0]
    return q @ x if SHAPES[name][0] == order else x @ q


@pytest.mark.parametrize(
    ("make", "value", "names"),
    [
        pytest.param(_fira, 1.01, list(GRADIENTS), marks=shares_fira, id="fira"),
        pytest.param(_alice("evd")[1], 4, list(TRANSPOSED), marks=_shares_alice("evd"), id="alice"),
    ],
)
def test_turning_the_gradients_turns_the_directions(make, value, names):
    """With leading singular vectors `f(Q G) = Q f(G)` on the left; transposing swaps the sides."""
    plain = {name: np.stack(GRADIENTS[name]) for name in names}
    turned = {name: _turned(name, g) for name, g in plain.items()}
    transposed = {**plain, "wide": plain["tall"].mT, "tall": plain["wide"].mT}
    with jax.enable_x64(True):
        found, found_turned, found_transposed = (
            _trajectories(make, gradients, value=value)[0]
            for gradients in (plain, turned, transposed)
        )
        for name in names:
            # The sign of a column is fixed by its largest entry, which turning changes, and moments
            # that are kept see it: compare up to the first refresh after the first.
            expected = _turned(name, found[name][:3])
            assert_close(found_turned[name][:3], expected, 64, condition=CONDITION)
        for name, other in (("wide", "tall"), ("tall", "wide")):
            assert_close(found_transposed[name], found[other].mT, 64, condition=CONDITION)


@pytest.mark.xdist_group("SUMO: plain")
def test_with_rotate_the_signs_of_a_basis_do_not_matter():
    """On the left, the larger side of a tall gradient."""
    q, _ = np.linalg.qr(np.random.default_rng(1).standard_normal((9, 9)))
    turned = {**GRADIENTS, "tall": [q @ g for g in GRADIENTS["tall"]]}
    with jax.enable_x64(True):
        found, found_turned = (
            _trajectories(_sumo("plain"), gradients, value={"refresh": 4, "scale": 1.0})[0]["tall"]
            for gradients in (GRADIENTS, turned)
        )
        assert_close(found_turned, q @ found, 64, condition=CONDITION)


def test_carry_rules_are_their_formulas():
    turn = np.float32(np.linalg.qr(np.random.default_rng(2).standard_normal((3, 3)))[0])
    moment = np.arange(12, dtype=np.float32).reshape(3, 4)
    assert_close(subspaces.rotate().first(moment, turn), turn @ moment, 4)
    assert_close(subspaces.rotate().second(moment, turn), turn**2 @ moment, 4)
    assert (subspaces.rotate().second(moment, turn) >= 0).all()
    for kind in ("first", "second"):
        assert_close(getattr(subspaces.keep(), kind)(moment, turn), moment, factor=0)
        assert_close(getattr(subspaces.reset(), kind)(moment, turn), 0 * moment, factor=0)


@pytest.mark.parametrize(("carry", "name"), [("rotate", "tall"), ("reset", "wide")])
def test_moments_follow_a_change_of_basis(carry, name):
    inner = optax.scale_by_adam(0.9, 0.99)
    rule = getattr(subspaces, carry)()
    direction = curvax.in_subspace(
        inner, RANK, basis=subspaces.svd(), refresh=curvax.every(4), carry=rule
    )
    with jax.enable_x64(True):
        _, states = _trajectories(direction, {name: GRADIENTS[name]})
        basis = states.subspaces[name].basis
        mu, nu = (_oriented(name, x[name]) for x in (states.inner.mu, states.inner.nu))
        for t in (3, 4):  # before and at the refresh of step 4
            g = _oriented(name, GRADIENTS[name][t - 1])
            turn = basis[t - 1].T @ basis[t - 2]
            before = (mu[t - 2], nu[t - 2])
            if t == 4:
                before = (rule.first(before[0], turn), rule.second(before[1], turn))
            sigma = basis[t - 1].T @ g
            assert_close(mu[t - 1], 0.9 * before[0] + 0.1 * sigma, 64)
            assert_close(nu[t - 1], 0.99 * before[1] + 0.01 * sigma**2, 64)


def test_a_state_of_unknown_fields_cannot_be_carried():
    class State(dict):
        pass

    def init(params):
        return {"memory": params}

    inner = optax.GradientTransformation(init, lambda u, s, p=None: (u, s))
    for carry in (subspaces.rotate(), subspaces.reset()):
        direction = curvax.in_subspace(
            inner, 2, basis=subspaces.svd(), refresh=curvax.every(2), carry=carry
        )
        with pytest.raises(ValueError, match="how it follows a change of basis is known for"):
            direction.init(jnp.zeros((4, 6)))
    kept = curvax.in_subspace(inner, 2, basis=subspaces.svd(), refresh=curvax.every(2))
    kept.init(jnp.zeros((4, 6)))


ELEMENTS = {
    "galore": (curvax.scale_by_galore, lambda m, n, r: m * r + 2 * n * r),
    "fira": (curvax.scale_by_fira, lambda m, n, r: m * r + 2 * n * r + 1),
    "alice": (curvax.scale_by_alice, lambda m, n, r: m * r + 2 * n * r + n + r * r + 1),
    "apollo": (curvax.scale_by_apollo, lambda m, n, r: 2 * n * r),
    "sumo": (curvax.scale_by_sumo, lambda m, n, r: m * r + n * r + 1),
}


@pytest.mark.parametrize("method", ELEMENTS)
@pytest.mark.parametrize("shape", [(16, 40), (40, 16)])
def test_state_elements_are_the_formula(method, shape):
    make, formula = ELEMENTS[method]
    state = jax.eval_shape(make(rank=4).init, jnp.zeros(shape))
    floats = [x for x in jax.tree.leaves(state) if jnp.issubdtype(x.dtype, jnp.floating)]
    # φ of a limiter is one of them; SUMO projects the larger side, the others the smaller.
    assert sum(x.size for x in floats) == formula(*sorted(shape), 4)


@functools.cache
def _by_period(method):
    offset = 1 if method == "sumo" else 0
    return lambda period: ELEMENTS[method][0](
        rank=RANK, refresh=curvax.every(period, offset=offset)
    )


def _in_one_worker(methods):
    """Tests of a method share its compiled program."""
    marks = {method: pytest.mark.xdist_group(f"{method} of a gradient") for method in methods}
    return [pytest.param(method, marks=mark) for method, mark in marks.items()]


@pytest.mark.parametrize("method", _in_one_worker(["alice", "sumo", "apollo"]))
def test_zero_gradients_leave_a_subspace_alone_until_there_is_one(method):
    gradients = {"x": [np.zeros((6, 9))] * 2 + GRADIENTS["wide"][2:]}
    directions, states = _trajectories(_by_period(method), gradients, "float32", 7)
    state = next(s for s in states if hasattr(s, "subspaces"))
    subspace = state.subspaces["x"]
    assert np.isfinite(directions["x"]).all() and not directions["x"][:2].any()
    assert subspace.refreshes[:3].tolist() == [0, 0, 1]
    assert subspace.rejected[:3].tolist() == [1, 2, 2]
    assert directions["x"][2].any()


def test_a_basis_that_is_not_finite_is_not_used():
    direction = curvax.in_subspace(
        optax.identity(), RANK, basis=subspaces.svd(), refresh=curvax.every(4)
    )
    for bad in (np.nan, np.inf):
        gradients = {"x": [g.copy() for g in GRADIENTS["wide"]]}
        gradients["x"][3][0, 0] = bad  # at the refresh of step 4
        _, states = _trajectories(direction, gradients, "float32")
        subspace = states.subspaces["x"]
        assert_close(subspace.basis[3], subspace.basis[2], factor=0)
        assert subspace.rejected[-1] == 1 and np.isfinite(subspace.basis).all()


@pytest.mark.parametrize("method", _in_one_worker(ELEMENTS))
def test_a_gradient_that_is_not_finite_counts_as_zero(method):
    bad = {"x": [g.copy() for g in GRADIENTS["wide"]]}
    bad["x"][0][2, 3] = np.nan
    bad["x"][2][0, 1] = np.inf  # between refreshes
    bad["x"][4][:, 2] = -np.inf  # at the refresh of step 5, or the fourth of every(4)
    bad["x"][3][5, 5] = np.nan
    zero = {"x": [np.where(np.isfinite(g).all(), g, 0) for g in bad["x"]]}
    found, expected = (_trajectories(_by_period(method), g, "float32", 4) for g in (bad, zero))
    still = np.array([not np.isfinite(g).all() for g in bad["x"]])[:, None, None]
    assert_close(found[0], {"x": np.where(still, 0, expected[0]["x"])}, factor=0)
    skipped = found[1][0].subspaces["x"].skipped
    assert skipped.tolist() == np.cumsum([not np.isfinite(g).all() for g in bad["x"]]).tolist()
    plain = expected[1][0].subspaces["x"]
    plain = plain._replace(counts=plain.counts.plus(skipped=skipped))
    assert_close(found[1][0].subspaces, {"x": plain}, factor=0)
    assert_close(found[1][0].inner, expected[1][0].inner, factor=0)


@pytest.mark.parametrize(
    "finder", _shared_by_finder(["svd", "randomized", "complement", "gaussian_mix"])
)
def test_bases_do_not_depend_on_the_gradients_scale(finder):
    """At the first step: second moments of all of them may leave the range of float32."""
    first = []
    for power in (0, -100, 60):
        scaled = jax.tree.map(lambda g: g * 2.0**power, _of_shapes(finder, FINDERS))  # noqa: B023
        _, states = _trajectories(_with_everything(finder), scaled, "float32")
        first.append({name: subspace.basis[0] for name, subspace in states.subspaces.items()})
    assert_close(first[1:], [first[0]] * 2, factor=0)


def test_keys_do_not_depend_on_the_stack():
    params = {"a": {"kernel": jnp.ones((3, 6, 8))}, "b": {"kernel": jnp.ones((6, 8))}}
    axes = {"a/kernel": curvax.MatrixAxes(rows=1, columns=2)}
    inner = curvax.scale_by_apollo(rank=2)
    keys = []
    for stack in (True, False):
        view = curvax.on_matrices(inner, weight_dimension_numbers=axes, stack=stack)
        state = jax.jit(view.init)(params)
        keys.append(
            [
                next(x for p, x in curvax.state_of(view, params, state, name).items() if "key" in p)
                for name in ("a/kernel", "b/kernel")
            ]
        )
    assert_close(keys[0], keys[1], factor=0)
    assert len({tuple(map(int, row)) for key in keys[0] for row in key}) == 4
    seeded = curvax.scale_by_apollo(rank=2, seed=1)
    other = jax.jit(curvax.on_matrices(seeded, weight_dimension_numbers=axes).init)(params)
    assert not (
        jax.tree.leaves(other.inner.inner[0].subspaces["6x8"].key)[0][:3] == keys[0][0]
    ).all()


@pytest.mark.parametrize("rotate", [None, True, False])
@pytest.mark.parametrize("tracking", [True, False])
def test_the_gradients_gram_matrix_is_never_formed(rotate, tracking):
    """Nor any other square of the gradient's order, from the first step on."""
    start = subspaces.randomized(2)
    basis = start if rotate is None else subspaces.iterated(rotate=rotate, start=start)
    direction = curvax.in_subspace(
        optax.identity(), RANK, basis=basis, refresh=curvax.every(4), tracking=tracking
    )
    gradient = jax.ShapeDtypeStruct((64, 80), jnp.float32)
    state = jax.eval_shape(direction.init, gradient)
    program = jax.jit(direction.update).lower(gradient, state).as_text()
    assert "tensor<64x80xf32>" in program
    for square in ("64x64", "80x80"):
        assert square not in program


class CountingFinder:
    """The exact basis, found by a program that says when it runs."""

    orthonormal = kept = True

    def __init__(self):
        self.found = 0

    def find(self, check, rank):
        def count(_):
            self.found += 1

        jax.debug.callback(count, check.gradient[0, 0])
        return subspaces.svd().find(check, rank)


def test_a_parameter_without_gradients_costs_no_decomposition():
    finder = CountingFinder()
    direction = curvax.in_subspace(optax.identity(), 2, basis=finder, refresh=curvax.every(3))
    step = jax.jit(direction.update)
    gradient = np.float32(GRADIENTS["wide"][0])
    state = jax.jit(direction.init)(gradient)
    for g, found in ((0 * gradient, 0), (0 * gradient, 0), (gradient, 1), (gradient, 1)):
        _, state = jax.block_until_ready(step(g, state))
        jax.effects_barrier()
        assert finder.found == found


def test_randomized_bases_capture_nearly_all_that_the_exact_ones_do():
    m, n, rank = 96, 160, 12
    generator = np.random.default_rng(3)
    left = np.linalg.qr(generator.standard_normal((m, m)))[0]
    right = np.linalg.qr(generator.standard_normal((n, m)))[0]
    randomized, exact = (
        jax.jit(functools.partial(basis.find, rank=rank))
        for basis in (subspaces.randomized(), subspaces.svd())
    )
    for power, least in ((1.0, 0.99), (0.5, 0.95)):
        g = np.float32((left * np.arange(1, m + 1) ** -power) @ right.T)
        check = SubspaceCheck(g, g[:, :rank], None, None, jnp.bool_(True), jax.random.key(0))
        energies = [
            float(np.sum((np.asarray(find(check)).T @ g) ** 2)) for find in (randomized, exact)
        ]
        assert least * energies[1] <= energies[0] <= 1.0001 * energies[1]


def test_summaries_show_the_rank_and_errors_name_the_parameter():
    params = {"small": {"kernel": jnp.ones((3, 9))}, "large": {"kernel": jnp.ones((12, 10))}}
    text = curvax.summarize(curvax.galore(0.1, rank=5), params)
    assert "3×9 in stack 3x9; rank 3 instead of 5 on the left" in text
    assert "12×10 in stack 12x10; rank 5 on the right" in text
    with pytest.raises(
        ValueError, match=r"rank must be at most 3 for the parameter 'small/kernel'"
    ):
        curvax.galore(0.1, rank=5, clamp_rank=False).init(params)
    text = curvax.summarize(curvax.alice(0.1, rank=3, leading=2), params)
    assert "rank 3 on the left, leading 3 instead of 2" in text  # no complement of 3 in 3
    assert "rank 3 on the right, leading 2" in text and "leading 2 instead" not in text
    with pytest.raises(ValueError, match=r"leading must be 3 for the parameter 'small/kernel'"):
        curvax.alice(0.1, rank=3, leading=2, clamp_rank=False).init(params)


IN_SUBSPACE: dict[str, Any] = {"basis": subspaces.svd(), "refresh": curvax.every(2)}
BAD = {
    "rank": (lambda: curvax.galore(0.1, rank=0), "rank must be an integer of at least 1, got 0"),
    "leading": (lambda: curvax.alice(0.1, leading=-1), "leading must be an integer"),
    "switching": (lambda: curvax.alice(0.1, switching="x"), "switching must be one of"),
    "compensation": (lambda: curvax.alice(0.1, compensation="x"), "compensation must be one of"),
    "a compensation": (
        lambda: curvax.in_subspace(optax.identity(), 2, compensation=1, **IN_SUBSPACE),
        "compensation must be None or a value",
    ),
    "carry": (lambda: curvax.galore(0.1, carry="rotate"), "carry must be a value"),
    "basis": (lambda: curvax.galore(0.1, basis="svd"), "basis must be a basis such as"),
    "side": (lambda: curvax.galore(0.1, side="both"), "side must be one of"),
    "refresh": (
        lambda: curvax.galore(0.1, refresh=policies.foam(5, threshold=0.5, max_damping=1e-3)),
        "refresh must be .* that examines 'projection'; got Foam.*, which examines 'damping'",
    ),
    "residual": (lambda: curvax.fira(0.1, residual="x"), "residual must be one of"),
    "plus": (lambda: curvax.fira(0.1, plus=-1.0), "plus must be a number in"),
    "plus and residual": (
        lambda: curvax.fira(0.1, plus=0.4, residual="scaled"),
        "residual must be 'complement' for Fira",
    ),
    "gamma": (lambda: curvax.alice(0.1, gamma=0.5), "gamma must be a number in"),
    "scale": (lambda: curvax.galore(0.1, scale=-1.0), "scale must be a number in"),
    "compensation_scale": (
        lambda: curvax.alice(0.1, compensation_scale=-1.0),
        "compensation_scale must be a number in",
    ),
    "variant": (lambda: curvax.apollo(0.1, variant="x"), "variant must be one of"),
    "inner": (lambda: curvax.in_subspace(1, 2, **IN_SUBSPACE), "inner must be an Optax"),
    "b3": (lambda: curvax.alice(0.1, b3=1.0), "b3 must be a number in"),
    "threshold": (lambda: policies.below_norm(-1.0), "threshold must be a number in"),
    "check_every": (lambda: policies.below_norm(1.0, check_every=0), "check_every must be"),
    "oversampling": (lambda: subspaces.randomized(-1), "oversampling must be an integer"),
    "finder": (
        lambda: subspaces.complement(2, subspaces.gaussian()),
        "finder must give an orthonormal basis",
    ),
    "drawn anew": (
        lambda: curvax.in_subspace(
            optax.identity(),
            2,
            basis=subspaces.gaussian(kept=False),
            refresh=curvax.every(2),
            carry=subspaces.rotate(),
        ),
        "basis is drawn anew at each step",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments_are_named(name):
    make, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        make()


def test_a_parameters_key_is_its_paths():
    """Written down, so that keys stay the same in later versions."""
    state = curvax.scale_by_apollo(rank=1, seed=3).init({"a": jnp.zeros((2, 2))})[0]
    own = jax.random.fold_in(jax.random.key(3, impl="threefry2x32"), zlib.crc32(b"a"))
    assert_close(
        state.subspaces["a"].key, jax.random.key_data(jax.random.fold_in(own, 0)), factor=0
    )
