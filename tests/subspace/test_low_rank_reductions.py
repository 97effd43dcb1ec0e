"""What low-rank methods are in special cases; SWAN and OSGDM against their transcriptions."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import ALL_CELLS, assert_close, share
from reference import swan as swan_reference
from reference.osgdm import osgdm as osgdm_reference

import curvax
from curvax import subspaces
from curvax.transforms.directions._moment_ratio import moment_ratio

STEPS = 12
NEVER = curvax.every(10**6)  # but for the first step
SHAPES = share([(6, 9), (7, 7), (9, 6)], of=2)


def _gradients(shape, seed=0, steps=STEPS):
    generator = np.random.default_rng([seed, *shape])
    return generator.standard_normal((steps, *shape))


@functools.cache
def _compiled(transformation):
    def step(state, gradient):
        direction, state = transformation.update(gradient, state)
        return state, direction

    def run(gradients):
        first = jax.tree.map(lambda g: g[0], gradients)
        return jax.lax.scan(step, transformation.init(first), gradients)[1]

    return jax.jit(run)


def _directions(transformation, gradients):
    """Of all steps, from one program for all leaves."""
    return jax.tree.map(np.asarray, _compiled(transformation)(gradients))


def _first(transformation, gradient):
    """The direction and the state of a first step."""
    return jax.jit(lambda g: transformation.update(g, transformation.init(g)))(gradient)


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
        tracking=False,
        switching="evd",
        compensation="none",
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
        rank=9, leading=9, b1=0.9, b2=0.95, scale=1.0, switching="none", refresh=NEVER
    )
    eigen_adam = curvax.scale_by_eigen_adam(b1=0.9, b2=0.95, refresh=NEVER, side="smaller")
    _assert_same(alice, eigen_adam)


def test_apollo_mini_is_apollo_of_one_column():
    """One row in all is projected to a number: its columns are the whole matrix's only one."""
    with jax.enable_x64(True):
        g = _gradients((6, 1))
        mini = _directions(curvax.scale_by_apollo(variant="mini", side="left"), g)
        apollo = _directions(curvax.scale_by_apollo(rank=1, side="left"), g)
        assert_close(mini, apollo, 64)


def test_sumo_at_full_rank_without_momentum_is_exact_muon():
    """On the larger side a basis holds the range of its own gradient alone."""
    muon = curvax.scale_by_muon(b1=0.0, nesterov=False, method="svd")
    for place, (side, refresh) in enumerate((("smaller", 4), ("larger", 1))):
        sumo = curvax.scale_by_sumo(rank=9, b1=0.0, refresh=refresh, side=side)
        _assert_same(sumo, muon, SHAPES if ALL_CELLS else SHAPES[place : place + 1])


def test_osgdm_without_momentum_is_exact_muon_without_momentum():
    params = {"dense": {"kernel": np.zeros((6, 9), np.float32)}}
    gradient = {"dense": {"kernel": np.float32(_gradients((6, 9))[0])}}
    osgdm = curvax.osgdm(0.1, b1=0.0)
    muon = curvax.muon(0.1, b1=0.0, nesterov=False, method="svd", consistent_rms=1 / 3)
    updates = [
        jax.jit(o.update)(gradient, jax.jit(o.init)(params), params)[0] for o in (osgdm, muon)
    ]
    assert_close(updates[0], updates[1], 64)


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_osgdm_follows_the_transcription_under_a_schedule(decay):
    """Every direction keeps its own learning rate; weight decay stays out of the momentum."""
    rates = [0.1 / (1 + t) for t in range(STEPS)]
    gradients = _gradients((5, 8))
    wanted, _ = osgdm_reference(list(gradients), rates, gamma=0.9)
    with jax.enable_x64(True):
        optimizer = curvax.osgdm(lambda t: 0.1 / (1 + t), b1=0.9, weight_decay=decay)
        params = {"kernel": np.ones((5, 8))}
        state, step = jax.jit(optimizer.init)(params), jax.jit(optimizer.update)
        for gradient, rate, move in zip(gradients, rates, wanted, strict=True):
            updates, state = step({"kernel": gradient}, state, params)
            expected = -move - rate * decay * np.asarray(params["kernel"])
            assert_close(updates["kernel"], expected, 256)
            params = {"kernel": params["kernel"] + np.asarray(updates["kernel"])}


@pytest.mark.parametrize("method", ["svd", "newton_schulz"])
@pytest.mark.parametrize("shape", [(5, 8), (8, 5), (6, 6)])
def test_swan_follows_the_transcription(method, shape):
    gradients = _gradients(shape, steps=4)
    theirs = {"svd": "exact"}.get(method, method)
    wanted, _ = swan_reference.swan(list(gradients), method=theirs)
    with jax.enable_x64(True):
        found = _directions(curvax.scale_by_swan(method=method), gradients)
        assert_close(found, np.stack(wanted), 256)


def test_swan_does_not_see_scales_nor_what_is_added_to_a_row():
    g = np.float32(_gradients((5, 8))[0])
    of_all = _directions(curvax.scale_by_swan(), np.stack([g, 8 * g, g + 2]))  # nothing is kept
    plain, scaled, shifted = of_all
    assert_close(scaled, plain, 16)
    assert_close(shifted, plain, 256)


def test_swan_in_bfloat16_keeps_the_rank():
    """Rows sum to 0, so the rank of (8, 6) is 5: rounding must not fill the sixth direction."""
    g = _gradients((8, 6))[0].astype(jnp.bfloat16)
    direction, _ = _first(curvax.scale_by_swan(), g)
    singular = np.linalg.svd(np.asarray(direction, np.float64))[1]
    assert singular[4] > 0.9 and singular[5] < 0.05


def test_columns_are_normalized_as_in_the_transcription():
    g = _gradients((5, 8))[0]
    g[:, 3] = 0
    found, _ = _first(curvax.normalize_columns(), np.float32(g))
    assert_close(found, swan_reference.normalize_columns(g), 16)


@pytest.mark.parametrize("shape", [(5, 40), (40, 5), (6, 6)])
def test_orthogonalizing_by_qr_first_changes_nothing(shape):
    deficient = _gradients(shape)[0]
    deficient[0] = deficient[1]
    batch = np.float32([_gradients(shape)[0], deficient, 0 * deficient])
    results = [_first(curvax.orthogonalize(method), batch)[0] for method in ("svd", "qr_svd")]
    assert_close(results[1], results[0], 256)


@pytest.mark.parametrize("method", ["svd", "qr_svd"])
def test_a_matrix_with_an_infinite_entry_gives_zero_and_leaves_others_alone(method):
    batch = np.stack([_gradients((5, 8))[0]] * 2)
    batch[0, 2, 3] = np.inf
    found, state = _first(curvax.orthogonalize(method), np.float32(batch))
    found = np.asarray(found)
    assert not found[0].any() and found[1].any() and np.isfinite(found).all()
    assert state.failures.tolist() == [1, 0]
