"""GaLore, Fira, Alice, APOLLO and SUMO against NumPy float64 transcriptions of the papers.

Random choices of the transcription come from the keys in our state. Where a gradient's rank is
below that of the subspace, the last columns of a basis are arbitrary; the transcription is then
given the bases that were found.
"""

import functools
from types import SimpleNamespace
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
from tests.cells import cells
from tests.helpers import assert_close
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
    oriented,
)
from tests.shared.transcriptions import Case, assert_follows, of_smaller


def state_of(states: Any, name: str) -> Any:
    """The subspace, and moments as the transcription has them; SUMO's have no second ones."""
    own = (states[0] if isinstance(states, tuple) else states)[name]
    inner = own.inner if hasattr(own.inner, "mu") else own.inner[0]
    moments = {x: oriented(name, getattr(inner, x)) for x in ("mu", "nu") if hasattr(inner, x)}
    return SimpleNamespace(subspace=own.subspace, raw=getattr(inner, "mu", None), **moments)


MOMENTS: Any = {"mu": ("m", None), "nu": ("v", None)}
WITH_BASIS: Any = {**MOMENTS, "subspace.basis": ("U", None)}
case = functools.partial(Case, condition=CONDITION, factor=64.0, state_of=state_of)
CASES: dict[str, Case] = {}


@jax.jit
def _keys(own: Any) -> Any:
    """Of all draws, from a parameter's own key: for a basis drawn as a whole, and in part."""
    drawn = jax.vmap(lambda draws: key_for(own, draws))(jnp.arange(STEPS))
    return drawn, jax.vmap(jax.random.split)(drawn)[:, 1]


_permuted = jax.jit(jax.random.permutation, static_argnums=1)
_normal = jax.jit(jax.random.normal, static_argnums=(1, 2))
_complement = jax.jit(lambda u: with_fixed_signs(orthogonal_complement(u)))


def _draws(state: Any, period: int, mixed: bool) -> Any:
    """The transcription's random choices."""
    due, keys = due_steps(period), _keys(state.subspace.key[0])[mixed]
    key = lambda t: keys[due.index(t)]  # noqa: E731
    return {
        "draw": lambda t, available, count: np.asarray(_permuted(key(t), available))[:count],
        "gaussian": lambda t, shape: np.asarray(_normal(key(t), shape, "float64")),
        "complement": lambda t, u: np.asarray(_complement(u)),
    }


# GaLore and Fira


def galore(period: Any) -> Any:
    return curvax.scale_by_galore(rank=RANK, refresh=curvax.every(period))


CASES["GaLore"] = case(
    galore,
    lambda g, k: galore_reference.galore(g, rank=RANK, K=k),
    GRADIENTS,
    states=WITH_BASIS,
    periods=(1, 4),
)
FIRA: dict[str, tuple[Any, dict[str, Any]]] = {
    "complement": (subspaces.fira(limit=np.inf), {}),
    "official": (
        subspaces.fira(residual=0.3, weight=1 / 0.3, limit=np.inf),
        {"residual": "scaled", "scale_compensation": False},
    ),
    "plus": ("fira+", {"plus": True}),
}
for name, (compensation, theirs) in FIRA.items():
    CASES[f"Fira, {name}"] = case(
        curvax.scale_by_fira(rank=RANK, refresh=4, compensation=compensation),
        functools.partial(galore_reference.fira, rank=RANK, K=4, **theirs),
        GRADIENTS,
        states=WITH_BASIS,
    )

# Alice

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
TRACKED: Any = {"subspace.tracked": ("Q_tilde", None)}
TRACKED |= {f"subspace.compensation.{x}": (y, None) for x, y in (("energy", "p"), ("norm", "phi"))}


def alice_of(variant: str) -> Case:
    theirs = {"rank": RANK, "leading": 2, "b3": 0.9, **ALICE[variant]}
    ours = {name: x for name, x in theirs.items() if name not in ("leading", "tracking")}
    switching = theirs.get("switching", "complement")
    if switching in SWITCHED:
        ours["switching"] = getattr(subspaces, switching)(theirs["leading"])
    if variant in UNTRACKED:
        ours["b3"] = None
    if theirs.get("compensation") == "none":
        ours["compensation"] = None
    elif theirs.get("compensation") == "fira":
        ours["compensation"] = subspaces.fira(limit=np.inf)

    def reference(gradients: Any, period: int, state: Any) -> Any:
        assert (state.subspace.tracked is None) == (variant in UNTRACKED)
        drawn = _draws(state, period, variant != "gaussian")
        return alice_reference.alice(gradients, K=period, **drawn, **theirs)

    return case(
        lambda period: curvax.scale_by_alice(refresh=curvax.every(period), **ours),
        reference,
        TRANSPOSED if variant == "evd" else GRADIENTS,
        states={**WITH_BASIS, **(TRACKED if variant == "alice" else {})},
        periods=(4,),
        with_state=True,
    )


CASES |= {f"Alice, {variant}": alice_of(variant) for variant in ALICE}

# APOLLO

APOLLO: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "random": ({}, {}),
    "svd": ({"basis": subspaces.svd()}, {"variant": "svd"}),
    "mini": ({"rank": 1, "whole": True}, {"mini": True, "rank": 1}),
    "official": (
        {"gamma": 1.01, "scale": 4.0**0.5},
        {"limiter": True, "sqrt_scale": True, "alpha": 4.0},
    ),
}


def apollo_of(variant: str) -> Case:
    ours, theirs = APOLLO[variant]

    def reference(gradients: Any, state: Any) -> Any:
        assert (state.subspace.basis is None) == (variant != "svd")
        rank, rows = theirs.get("rank", RANK), min(gradients[0].shape)

        def projection(t: int) -> np.ndarray:
            key = key_for(state.subspace.key[0], jnp.int32(due_steps(4).index(t)))
            return np.asarray(jax.random.normal(key, (rows, rank), "float64")) / np.sqrt(rank)

        given = {"projection": None if variant == "svd" else projection}
        return galore_reference.apollo(gradients, **{"rank": RANK, "K": 4, **given, **theirs})

    return case(
        curvax.scale_by_apollo(**{"rank": RANK, "refresh": 4, "limit": np.inf, **ours}),
        reference,
        GRADIENTS,
        states=WITH_BASIS if variant == "svd" else MOMENTS,
        with_state=True,
    )


CASES |= {f"APOLLO, {variant}": apollo_of(variant) for variant in APOLLO}

# SUMO

SUMO: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {"limiter": True}),
    "average": ({"accumulate": "ema", "b1": 0.8}, {"momentum": "ema", "mu": 0.8}),
    "by Newton-Schulz": ({"method": "newton_schulz"}, {"exact": False, "limiter": True}),
    "smaller side, shape": ({"side": "smaller", "scale": 4.0}, {"alpha": 4.0}),
}


def sumo_of(variant: str) -> Case:
    ours, theirs = SUMO[variant]

    def make(period: Any) -> Any:
        settings = {"rank": RANK, "basis": subspaces.svd(), "gamma": 1.1, **ours}
        return curvax.scale_by_sumo(refresh=curvax.every(period, offset=1), **settings)

    def reference(gradients: Any, period: int) -> Any:
        side = {"side": of_smaller(gradients)} if "side" in ours else {}
        return sumo_reference(gradients, rank=RANK, period=period, **side, **theirs)

    return case(
        make,
        reference,
        GRADIENTS,
        states={"raw": ("M", None), "subspace.basis": ("Q", None)},
        periods=(1, 4) if variant == "plain" else (4,),
        offset=1,
    )


CASES |= {f"SUMO, {variant}": sumo_of(variant) for variant in SUMO}


@pytest.mark.parametrize(
    ("name", "shape"), cells(((name, x) for name in CASES for x in CASES[name].gradients), of=36)
)
def test_directions_follow_the_transcription(name: str, shape: str) -> None:
    assert_follows(CASES[name]._replace(gradients={shape: GRADIENTS[shape]}))


def test_sumo_refreshed_by_norm_follows_the_transcription() -> None:
    gradients = {
        name: [g * (0.01 if t % 5 == 3 else 1) for t, g in enumerate(gs)]
        for name, gs in TRANSPOSED.items()
    }
    norms = [np.linalg.norm(g) for gs in gradients.values() for g in gs]
    threshold = float(np.exp(np.mean(np.log([min(norms), max(norms)]))))

    def reference(gradients: Any, state: Any) -> Any:
        found, states = sumo_reference(gradients, rank=RANK, threshold=threshold, limiter=True)
        refreshed = np.cumsum([s["refreshed"] for s in states])
        assert_close(state.subspace.refreshes, refreshed, factor=0)
        assert 1 < refreshed[-1] < STEPS
        return found, states

    refresh = policies.below_norm(threshold)
    sumo = curvax.scale_by_sumo(rank=RANK, refresh=refresh, basis=subspaces.svd())
    assert_follows(case(sumo, reference, gradients, with_state=True))


def test_given_the_bases_rank_deficient_gradients_follow_the_transcription() -> None:
    """Rank 1 below the subspace's 3, with the compensation."""
    generator = np.random.default_rng(5)

    def rank_one(shape: tuple[int, int]) -> np.ndarray:
        return np.outer(*(generator.standard_normal(size) for size in shape))

    gradients = {name: [rank_one(SHAPES[name]) for _ in range(STEPS)] for name in TRANSPOSED}

    def reference(gradients: Any, state: Any) -> Any:
        found = lambda t, _: np.asarray(state.subspace.basis[t - 1])  # noqa: E731
        # At a refresh only rounding is outside, of which no norm is sure.
        return galore_reference.fira(gradients, rank=RANK, K=4, basis=found, limiter=False)

    unlimited = subspaces.fira(gamma=np.inf, limit=np.inf)
    fira = curvax.scale_by_fira(rank=RANK, refresh=4, compensation=unlimited)
    # At step 1 Adam raises rounding by the inverse of its epsilon.
    assert_follows(case(fira, reference, gradients, condition=1e8, with_state=True))
