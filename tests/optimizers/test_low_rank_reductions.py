"""What GaLore, Fira, Alice, APOLLO and SUMO are in special cases."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import curvax
from curvax import subspaces
from curvax.transforms.directions._moment_ratio import moment_ratio
from tests.helpers import assert_close, scanned, share

STEPS = 12
NEVER = curvax.every(10**6)  # but for the first step
SHAPES = share([(6, 9), (7, 7), (9, 6)], of=3)


def _gradients(shape):
    return np.random.default_rng(shape).standard_normal((STEPS, *shape))


def _directions(transformation, gradients):
    """Of all steps, from one program for all leaves."""
    return scanned(transformation)(gradients)[0]


def _assert_same(first, second, shapes=SHAPES):
    gradients = {str(shape): _gradients(shape) for shape in shapes}
    with jax.enable_x64(True):
        found, expected = (_directions(x, gradients) for x in (first, second))
    assert_close(found, expected, 64, condition=1e4)


def test_galore_at_full_rank_with_one_basis_is_adam_in_that_basis():
    with jax.enable_x64(True):
        g = _gradients((6, 9))
        u = np.asarray(jax.jit(lambda g: subspaces.svd().find(_check(g), 6))(g[0]))
        adam = _directions(optax.scale_by_adam(), u.T @ g)
        galore = _directions(curvax.scale_by_galore(rank=6, refresh=NEVER, scale=1.0), g)
        assert_close(galore, u @ adam, 64, condition=1e4)


def _check(g):
    return subspaces.SubspaceCheck(g, g, None, None, jnp.bool_(True), jax.random.key(0))


def test_alice_without_its_parts_is_galore():
    """Without tracking, switching and compensation, around GaLore's Adam, with exact bases."""
    alice = curvax.in_subspace(
        moment_ratio(0.9, 0.999, 1e-8, bias_correction=True),
        3,
        basis=subspaces.svd(),
        refresh=curvax.every(4, offset=0),
    )
    parts = curvax.scale_by_alice(
        rank=3,
        b2=0.999,
        eps=1e-8,
        bias_correction=True,
        b3=None,
        switching="evd",
        compensation=None,
        scale=1.0,
        refresh=4,
    )
    galore = curvax.scale_by_galore(rank=3, refresh=4, scale=1.0)
    _assert_same(alice, galore)
    _assert_same(parts, galore)


def test_fira_at_full_rank_is_galore():
    _assert_same(curvax.scale_by_fira(rank=9, refresh=4), curvax.scale_by_galore(rank=9, refresh=4))


def test_alice_at_full_rank_with_one_basis_is_eigen_adam():
    alice = curvax.scale_by_alice(
        rank=9, b1=0.9, b2=0.95, scale=1.0, switching="none", refresh=NEVER
    )
    eigen_adam = curvax.scale_by_eigen_adam(b1=0.9, b2=0.95, refresh=NEVER, side="smaller")
    _assert_same(alice, eigen_adam)


def test_apollo_mini_is_apollo_of_one_column():
    """One row in all is projected to a number: its columns are the whole matrix's only one."""
    with jax.enable_x64(True):
        g = _gradients((6, 1))
        mini = _directions(curvax.scale_by_apollo(rank=1, whole=True, side="left"), g)
        apollo = _directions(curvax.scale_by_apollo(rank=1, side="left"), g)
        assert_close(mini, apollo, 64)


def test_sumo_at_full_rank_without_momentum_is_exact_muon():
    """On the larger side a basis holds the range of its own gradient alone."""
    muon = curvax.scale_by_muon(b1=0.0, nesterov=False, method="svd")
    for side, refresh in (("smaller", 4), ("larger", 1)):
        sumo = curvax.scale_by_sumo(rank=9, b1=0.0, refresh=refresh, side=side)
        _assert_same(sumo, muon)
