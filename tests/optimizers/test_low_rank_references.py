"""GaLore, Fira, Alice, APOLLO and SUMO against NumPy float64 transcriptions of the papers.

Where a gradient's rank is below that of the subspace, the last columns of a basis are arbitrary;
the transcription is then given the bases that were found.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import curvax
from curvax import policies, subspaces
from curvax.transforms._stacks import key_for
from curvax.transforms.linalg._eigh import with_fixed_signs
from curvax.transforms.linalg._qr import orthogonal_complement
from tests.helpers import assert_close, share
from tests.reference import alice as alice_reference
from tests.reference import galore as galore_reference
from tests.reference.sumo import sumo as sumo_reference
from tests.shared.low_rank import (
    CONDITION,
    GRADIENTS,
    RANK,
    SHAPES,
    STEPS,
    TRANSPOSED,
    due_steps,
    of_shapes,
    oriented,
    trajectories,
)


def _assert_follows(transformation, reference, given=GRADIENTS, value: Any = 1):
    """Every direction, basis and moment of every shape is the transcription's."""
    with jax.enable_x64(True):
        directions, states = trajectories(transformation, given, value=value)
        state = states[0] if isinstance(states, tuple) else states
        for name, gradients in given.items():
            subspace = jax.tree.map(lambda x: x, state[name].subspace)
            desired, theirs = reference(gradients, subspace)
            assert_close(directions[name], np.stack(desired), 64, condition=CONDITION)
            if subspace.basis is not None:
                bases = np.stack([s["U"] for s in theirs])
                assert_close(subspace.basis, bases, 64, condition=CONDITION)
            for field, key in (("mu", "m"), ("nu", "v")):
                found = oriented(name, getattr(state[name].inner, field))
                wanted = np.stack([s[key] for s in theirs])
                assert_close(found, wanted, 64, condition=CONDITION)
    return next(iter(state.values())).subspace


def _galore(period):
    return curvax.scale_by_galore(rank=RANK, refresh=curvax.every(period))


@pytest.mark.xdist_group("GaLore by period")
@pytest.mark.parametrize("period", [1, 4, 7])
def test_galore_follows_the_transcription(period):
    subspace = _assert_follows(
        _galore, lambda g, _: galore_reference.galore(g, rank=RANK, K=period), value=period
    )
    assert subspace.refreshes[-1] == len(due_steps(period))


FIRA: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "complement": ({}, {}),
    "official": (
        {"compensation": subspaces.fira(residual=0.3, weight=1 / 0.3)},
        {"residual": "scaled", "scale_compensation": False},
    ),
    "plus": ({"compensation": "fira+"}, {"plus": True}),
    "unlimited": ({}, {"limiter": False}),
}


def _fira(gamma):
    return curvax.scale_by_fira(rank=RANK, refresh=4, compensation=subspaces.fira(gamma=gamma))


shares_fira = pytest.mark.xdist_group("Fira with its complement")


@pytest.mark.parametrize(
    ("variant", "gamma"),
    share(
        [
            pytest.param("complement", 1.01, marks=shares_fira),
            pytest.param("unlimited", float("inf"), marks=shares_fira),
            ("official", None),  # with the limiter as it is without saying so
            ("plus", None),
        ],
        of=2,
    ),
)
def test_fira_follows_the_transcription(variant, gamma):
    ours, theirs = FIRA[variant]
    static = curvax.scale_by_fira(rank=RANK, refresh=4, **ours)
    _assert_follows(
        _fira if gamma else static,
        lambda g, _: galore_reference.fira(g, rank=RANK, K=4, **theirs),
        GRADIENTS if gamma else of_shapes(variant, FIRA),
        gamma,
    )


@jax.jit
def _keys(own):
    """Of all draws, from a parameter's own key: for a basis drawn as a whole, and in part."""
    drawn = jax.vmap(lambda draws: key_for(own, draws))(jnp.arange(STEPS))
    return drawn, jax.vmap(jax.random.split)(drawn)[:, 1]


_permuted = jax.jit(jax.random.permutation, static_argnums=1)
_normal = jax.jit(jax.random.normal, static_argnums=(1, 2))
_complement = jax.jit(lambda u: with_fixed_signs(orthogonal_complement(u)))


def _draws(subspace, period, mixed):
    """The transcription's random choices, from the keys in our state."""
    due, keys = due_steps(period), _keys(subspace.key[0])[mixed]
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
UNTRACKED = ("alice_0", "gaussian")  # a drawn basis takes nothing from what is tracked


SWITCHED = {"complement", "full_basis", "gaussian_mix"}


@functools.cache
def _alice(variant):
    theirs = {"rank": RANK, "leading": 2, "b3": 0.9, **ALICE[variant]}
    ours = {name: x for name, x in theirs.items() if name not in ("leading", "tracking")}
    switching = theirs.get("switching", "complement")
    if switching in SWITCHED:
        ours["switching"] = getattr(subspaces, switching)(theirs["leading"])
    if variant in UNTRACKED:
        ours["b3"] = None
    if theirs.get("compensation") == "none":
        ours["compensation"] = None
    return theirs, lambda period: curvax.scale_by_alice(refresh=curvax.every(period), **ours)


def _shares_alice(variant):
    return pytest.mark.xdist_group(f"Alice: {variant}")


@pytest.mark.parametrize(
    ("variant", "period"),
    [
        pytest.param(variant, period, marks=_shares_alice(variant))
        for variant, period in [
            ("alice", 7),
            *((variant, 4) for variant in share(ALICE, of=4)),
        ]
    ],
)
def test_alice_follows_the_transcription(variant, period):
    options, make = _alice(variant)
    subspace = _assert_follows(
        make,
        lambda g, subspace: alice_reference.alice(
            g, K=period, **_draws(subspace, period, variant != "gaussian"), **options
        ),
        TRANSPOSED if variant == "evd" else of_shapes(variant, ALICE),
        period,
    )
    assert (subspace.tracked is None) == (variant in UNTRACKED)


@_shares_alice("alice")
def test_alices_tracked_moment_and_energies_follow_the_transcription():
    with jax.enable_x64(True):
        options, make = _alice("alice")
        _, (state, _) = trajectories(make, value=4)
        for name, gradients in GRADIENTS.items():
            subspace = state[name].subspace
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
    "svd": ({"basis": subspaces.svd()}, {"variant": "svd"}),
    "mini": ({"rank": 1, "whole": True}, {"mini": True, "rank": 1}),
    "official": (
        {"gamma": 1.01, "scale": 4.0**0.5},
        {"limiter": True, "sqrt_scale": True, "alpha": 4.0},
    ),
}


@pytest.mark.parametrize("variant", share(APOLLO, of=2))
def test_apollo_follows_the_transcription(variant):
    ours, theirs = APOLLO[variant]
    due = due_steps(4)

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

    transformation = curvax.scale_by_apollo(**{"rank": RANK, "refresh": 4, **ours})
    subspace = _assert_follows(transformation, reference, of_shapes(variant, APOLLO))
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
    share(
        [
            pytest.param(
                variant,
                period,
                marks=pytest.mark.xdist_group(f"SUMO: {variant.replace('shape', 'plain')}"),
            )
            for variant, period in [
                ("plain", 1),
                ("plain", 7),
                *((variant, 4) for variant in share(SUMO, of=2)),
            ]
        ],
        of=2,
    ),
)
def test_sumo_follows_the_transcription(variant, period):
    ours, theirs = SUMO[variant]
    given, make, value = of_shapes(variant, SUMO), _sumo(variant), {"refresh": period}
    if variant in ("plain", "shape"):
        given, make, value = GRADIENTS, _sumo("plain"), {**value, "scale": ours.get("scale", 1.0)}
    with jax.enable_x64(True):
        directions, (state, _) = trajectories(make, given, value=value)
        for name, gradients in given.items():
            options = dict(theirs)
            if "side" in ours:
                m, n = SHAPES[name]
                options["side"] = "left" if m <= n else "right"
            desired, states = sumo_reference(gradients, rank=RANK, period=period, **options)
            assert_close(directions[name], np.stack(desired), 64, condition=CONDITION)
            moments = np.stack([s["M"] for s in states])
            assert_close(state[name].inner[0].mu, moments, 64, condition=CONDITION)
            bases = np.stack([s["Q"] for s in states])
            assert_close(state[name].subspace.basis, bases, 64, condition=CONDITION)
            assert state[name].subspace.refreshes[-1] == len(due_steps(period, 1))


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
        directions, (state, _) = trajectories(transformation, gradients)
        for name, gs in gradients.items():
            desired, states = sumo_reference(gs, rank=RANK, threshold=threshold, limiter=True)
            assert_close(directions[name], np.stack(desired), 64, condition=CONDITION)
            refreshed = np.cumsum([s["refreshed"] for s in states])
            assert_close(state[name].subspace.refreshes, refreshed, factor=0)
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
        directions, (state, _) = trajectories(_fira, together, value=float("inf"))
        for name, gs in gradients.items():
            bases = state[name].subspace.basis
            desired, _ = galore_reference.fira(
                gs,
                rank=RANK,
                K=4,
                basis=lambda t, _: np.asarray(bases[t - 1]),  # noqa: B023
                limiter=False,  # at a refresh only rounding is outside, of which no norm is sure
            )
            # At step 1 Adam raises rounding by the inverse of its epsilon.
            assert_close(directions[name], np.stack(desired), 64, condition=1e8)


# Equivariances of the same programs


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
            trajectories(make, gradients, value=value)[0]
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
            trajectories(_sumo("plain"), gradients, value={"refresh": 4, "scale": 1.0})[0]["tall"]
            for gradients in (GRADIENTS, turned)
        )
        assert_close(found_turned, q @ found, 64, condition=CONDITION)
