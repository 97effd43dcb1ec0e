"""Tracked eigenbases: what their bases and roots promise, beside `test_references.py`."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import curvax
from curvax.transforms.linalg import _tracking
from tests.helpers import assert_close, at, scanned, share, trained
from tests.shared.damage import damaged
from tests.shared.meshes import given, mesh_of, on, steps
from tests.shared.soap import soap_trajectory
from tests.tpu_forms import loops_of

INF = float("inf")
ORDER, COLUMNS, STEPS = 24, 40, 30


def _cosine(a: Any, b: Any) -> float:
    a, b = (np.asarray(x, np.float64) for x in (a, b))
    return float(np.sum(a * b) / np.linalg.norm(a) / np.linalg.norm(b))


def _turning(condition: float) -> np.ndarray:
    """Gradients of half the rank, whose covariance of this condition turns at each step."""
    generator = np.random.default_rng(0)
    spectrum = condition ** (-np.arange(ORDER) / (ORDER - 1) / 2)
    spin = 0.02 / np.sqrt(ORDER) * generator.standard_normal((ORDER, ORDER))
    turn = np.linalg.qr(np.eye(ORDER) + spin - spin.T)[0]
    frame = np.linalg.qr(generator.standard_normal((ORDER, ORDER)))[0]
    found = []
    for _ in range(STEPS):
        frame = frame @ turn
        found.append((frame * spectrum) @ generator.standard_normal((ORDER, COLUMNS)))
    return np.stack(found).astype(np.float32)


def _soap(refresh: Any = 1, **options: Any) -> Any:
    return curvax.scale_by_soap(method="tracked", refresh=refresh, limit=INF, **options)


# Compiled once for all tests.
LEFT = functools.partial(_soap, side="left")
IN_4_BITS = functools.partial(LEFT, storage=curvax.quantized(min_elements=1))


@pytest.mark.parametrize("condition", [1e2, 1e4, 1e6])
def test_bases_stay_orthonormal_and_directions_near_those_of_exact_bases(condition: float) -> None:
    """In float32, refreshed at every step. By orthogonal iteration it is 0.6 at step 2."""
    gradients = _turning(condition)
    _, states = soap_trajectory(LEFT, gradients, "float32")
    exact = np.zeros((ORDER, ORDER))
    for t, g in enumerate(gradients.astype(np.float64)):
        exact = 0.95 * exact + 0.05 * g @ g.T
        d, q = np.linalg.eigh(exact)
        u = states.left.basis[t].astype(np.float64)
        assert np.abs(u.T @ u - np.eye(ORDER)).max() < 3e-3
        kept = u @ states.left.statistic[t] @ u.T
        assert np.abs(kept - exact).max() < 2e-3 * np.abs(exact).max()
        directions = []
        for basis in (u, q):
            h = np.maximum(np.diag(basis.T @ exact @ basis), d[-1] * 1e-7)
            directions.append((basis * h**-0.5) @ basis.T @ g)
        assert _cosine(*directions) > 0.998


def test_rotations_from_the_identity_find_eigenvectors() -> None:
    """What a program for a TPU does at the first refresh: nothing is decomposed."""
    g = _turning(1e6)[0]
    near_one, _ = _tracking._near_one(jnp.asarray(g @ g.T))
    u, h = jax.jit(functools.partial(_tracking._rotations, most=80, exactly=True))(near_one)
    assert np.abs(u.T @ u - np.eye(ORDER)).max() < 1e-5
    d = np.linalg.eigvalsh(np.asarray(near_one, np.float64))
    np.testing.assert_allclose(np.sort(np.diag(h)), d, rtol=1e-2, atol=1e-6)


@pytest.mark.parametrize("exponent", [-40, 40])
def test_the_gradients_scale_changes_nothing(exponent: int) -> None:
    gradients = _turning(1e2)
    plain, _ = soap_trajectory(LEFT, gradients, "float32")
    found, _ = soap_trajectory(LEFT, gradients * np.float32(2.0**exponent), "float32")
    # LAPACK scales by other factors.
    np.testing.assert_allclose(found[:4], plain[:4], atol=1e-3)


STORED = {
    "bfloat16": (functools.partial(LEFT, storage=curvax.dense(jnp.bfloat16)), 0.97),
    "4 bits": (IN_4_BITS, 0.5),
    "packed": (functools.partial(LEFT, storage=curvax.packed(min_elements=1)), 0.93),
}


@pytest.mark.parametrize("name", share(STORED, of=3))
def test_storages_round_what_is_graded(name: str) -> None:
    """A storage's basis moves by whole codes: H stays what the stored basis says."""
    make, least = STORED[name]
    gradients = _turning(1e4)
    plain, _ = soap_trajectory(LEFT, gradients, "float32")
    found, states = soap_trajectory(make, gradients, "float32")
    assert _cosine(found[-1], plain[-1]) > least
    scale = states.left.statistic.roots[-1]
    assert scale.max() / scale.min() > 10  # and yet all rows have as many codes


def test_in_four_bits_directions_are_nearer_than_those_of_exact_bases() -> None:
    gradients = _turning(1e4)

    by_eigh = functools.partial(curvax.scale_by_soap, side="left", refresh=1, limit=INF)
    exact, in_bits, tracked = (
        soap_trajectory(make, gradients, "float32")[0][-1]
        for make in (by_eigh(), by_eigh(storage=curvax.quantized(min_elements=1)), IN_4_BITS)
    )
    assert _cosine(tracked, exact) > _cosine(in_bits, exact) + 0.2


def test_damage_starts_anew() -> None:
    """Of a damage that the direction shows, the guard takes care."""
    gradients = _turning(1e2)
    update = jax.jit(LEFT().update)
    _, states = soap_trajectory(LEFT, gradients, "float32")
    for field, value in (("statistic", np.nan), ("basis", 1e3)):
        state = at(states, 4)
        array = getattr(state.left, field).copy()
        array[0, 0] = value
        state = state._replace(left=state.left._replace(**{field: array}))
        for g in gradients[5:8]:
            d, state = update(g, state)
        assert state.left.restarted == 1 and np.isfinite(d).all(), field
        basis = np.asarray(state.left.basis)
        assert np.abs(basis.T @ basis - np.eye(ORDER)).max() < 3e-3, field


def test_a_policy_decides_by_the_share_off_the_diagonal() -> None:
    gradients = _turning(1e2)
    run = scanned(lambda x: LEFT(curvax.policies.diagonal_residual(1, x)))
    for threshold, expected in ((1e-9, STEPS), (10.0, 1)):
        _, states = run(gradients, threshold)
        assert states.left.checks[-1] == STEPS and states.left.refreshes[-1] == expected
    off = [h - np.diag(np.diag(h)) for h in states.left.statistic]
    shares = [
        np.linalg.norm(o) / np.linalg.norm(h)
        for o, h in zip(off, states.left.statistic, strict=True)
    ]
    np.testing.assert_allclose(states.left.proxy[1:], shares[1:], rtol=1e-4)


# Inverse roots from tracked bases: `solver="tracked"`


@functools.cache
def _root(solver: str = "tracked", **options: Any) -> Any:
    settings = {"refresh": curvax.every(1), "side": "left", "root": 2, "eps": 1e-6}
    return curvax.precondition(solver=solver, **{**settings, **options})


def test_directions_of_roots_are_near_those_of_exact_roots() -> None:
    """In float32, refreshed at every step; the iteration by products is as exact as `eigh`."""
    gradients = _turning(1e4)
    (exact, _), (tracked, states), (products, _) = (
        soap_trajectory(_root(solver), gradients, "float32")
        for solver in ("eigh", "tracked", "products")
    )
    for t in range(STEPS):
        assert _cosine(tracked[t], exact[t]) > 0.998
        assert _cosine(products[t], exact[t]) > 0.9999
    h = states.left.statistic
    off = [np.linalg.norm(x - np.diag(np.diag(x))) / np.linalg.norm(x) for x in h]
    np.testing.assert_allclose(states.left.error, off, rtol=1e-3, atol=1e-6)


def test_roots_in_four_bits_follow_the_exact_ones() -> None:
    gradients = _turning(1e2)
    plain, _ = soap_trajectory(_root(), gradients, "float32")
    storage = curvax.quantized(min_elements=1)
    found, _ = soap_trajectory(_root(storage=storage), gradients, "float32")
    assert _cosine(found[-1], plain[-1]) > 0.5


def test_a_policy_decides_about_roots_and_keeps_their_eigenvalues_current() -> None:
    gradients = _turning(1e2)
    policy = curvax.policies.diagonal_residual(1, 10.0)
    _, states = soap_trajectory(_root(refresh=policy), gradients, "float32")
    left = states.left
    assert left.checks[-1] == STEPS and left.refreshes[-1] == 1
    u, h = left.eigenvectors[-1], left.statistic[-1]
    root = (u * (np.diag(h) + 1e-6) ** -0.5) @ u.T
    np.testing.assert_allclose(left.inverse_root[-1], root, rtol=1e-3, atol=1e-3)


REFRESHED_ONCE = curvax.policies.foam(1, max_damping=1e-4, refreshes=False)


@pytest.mark.parametrize(
    ("policy", "before", "after"), [(curvax.every(1), 4, 6), (REFRESHED_ONCE, 1, 2)]
)
def test_damaged_roots_start_anew_and_roots_wait_for_a_gradient(
    policy: Any, before: int, after: int
) -> None:
    gradients = _turning(1e2)
    direction = _root(refresh=policy)
    _, states = soap_trajectory(direction, [0 * gradients[0], *gradients[:4]], "float32")
    assert list(states.left.rejected) == [1] * 5 and states.left.refreshes[-1] == before
    state = jax.tree.map(jnp.asarray, at(states, -1))
    left = state.left._replace(eigenvectors=state.left.eigenvectors.at[0, 0].set(1e3))
    state = state._replace(left=left)
    for g in gradients[5:8]:
        d, state = jax.jit(direction.update)(jnp.asarray(g), state)
    assert state.left.restarted == 1 and np.isfinite(d).all()
    assert state.left.refreshes == after
    u = state.left.eigenvectors
    assert np.abs(u.T @ u - np.eye(ORDER)).max() < 3e-3


def test_a_root_heals_from_any_entry_that_is_not_finite() -> None:
    gradients = _turning(1e2)[:8, None]
    update = jax.jit(_root(refresh=REFRESHED_ONCE).update)
    _, states = soap_trajectory(_root(refresh=REFRESHED_ONCE), gradients[:5], "float32")
    for value in (np.nan, np.inf):
        for place, state in damaged(at(states, -1), value):
            for g in gradients[5:]:
                d, state = update(g, state)
            assert all(np.isfinite(x).all() for x in jax.tree.leaves((d, state))), (place, value)


# Stacks, meshes and checkpoints


def test_a_stack_is_refreshed_as_its_matrices_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the groups that GPUs visit."""
    stacks = np.random.default_rng(0).standard_normal((6, 3, 6, 8)).astype(np.float32)
    alone = [soap_trajectory(LEFT, stacks[:, i], "float32", 2)[0] for i in range(3)]
    loops_of("gpu", monkeypatch)
    found, _ = soap_trajectory(LEFT(2), stacks, "float32")
    np.testing.assert_allclose(found, np.stack(alone, 1), rtol=1e-3, atol=1e-3)


OF_ROOTS: dict[str, Any] = {"eps": 1e-3, "graft": None, "base": None, "side": "left"}
MADE = {
    "foam": functools.partial(curvax.foam, solver="tracked", check_every=1, max_damping=1e-2),
    "shampoo": functools.partial(curvax.shampoo, solver="tracked", refresh=2, **OF_ROOTS),
    "soap": functools.partial(curvax.soap, method="tracked", refresh=2, side="left"),
}


@pytest.mark.parametrize("name", share(MADE, of=2))
def test_a_mesh_and_a_checkpoint_change_nothing(name: str) -> None:
    make, mesh = MADE[name], mesh_of("auto", 2)
    params, gradients = given({"a": (6, 8), "b": (6, 8)}, 3)
    optimizer = make(0.1)
    _, state = trained(optimizer, params, gradients)
    divided = make(0.1, mesh=mesh)
    _, on_mesh = steps(divided, [on(mesh, g) for g in gradients], on(mesh, params), mesh)
    portable = curvax.portable_state(divided, params, on_mesh)
    placed = curvax.place_state(optimizer, params, portable)
    assert_close(placed, state, 1e3)


FORMS = {
    **dict.fromkeys(("soap", "eigen_adam", "kl_shampoo"), "method"),
    **dict.fromkeys(("asgo", "shampoo", "foam", "dr_shampoo"), "solver"),
}


@pytest.mark.parametrize("name", share(FORMS, of=3))
def test_no_program_for_a_tpu_decomposes(name: str) -> None:
    """At the first refresh neither."""
    x = jax.ShapeDtypeStruct((2, 24, 40), jnp.float32)
    for form, decomposes in (("eigh", True), ("tracked", False)):
        made = getattr(curvax, f"scale_by_{name}")(**{FORMS[name]: form})
        update = jax.jit(made.update).trace(x, jax.eval_shape(made.init, x), x)
        assert ("@Eigh" in update.lower(lowering_platforms=("tpu",)).as_text()) == decomposes
