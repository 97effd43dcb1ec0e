"""Tracked eigenbases against a transcription, and what their bases promise."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import curvax
from curvax.transforms.linalg import _tracking
from tests.helpers import assert_close, at, trained
from tests.reference.tracked import tracked
from tests.shared.meshes import given, mesh_of, on, steps
from tests.shared.soap import soap_gradients, soap_trajectory
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


@pytest.mark.parametrize("period", [1, 3])
@pytest.mark.parametrize(("side", "shape"), [("left", (5, 8)), ("both", (5, 5))])
def test_soap_follows_the_transcription(side: str, shape: tuple[int, int], period: int) -> None:
    gradients = soap_gradients(shape)
    desired, expected = tracked(gradients, period=period, side=side)
    with jax.enable_x64(True):
        found, states = soap_trajectory(
            functools.partial(_soap, side=side), gradients, "float64", period
        )
        kappa = float(np.linalg.cond(gradients[0])) ** 4
        # Noise off the diagonal at step 1 is left out of account.
        assert_close(found[1:], np.stack(desired)[1:], 64, condition=kappa)
        assert_close(states.left.basis[-1], expected[-1]["U_L"], 64, condition=kappa)
        assert_close(states.left.statistic[-1], expected[-1]["H_L"], 64, condition=kappa)


@functools.cache
def _kl(refresh: Any) -> Any:
    return curvax.in_eigenbasis(
        curvax.momentum(0.95),
        refresh=curvax.every(refresh),
        statistics="kl",
        divide=True,
        method="tracked",
    )


def test_kl_shampoo_follows_the_transcription() -> None:
    gradients = soap_gradients((5, 5))
    desired, _ = tracked(gradients, period=2, statistics="kl", divide=True)
    with jax.enable_x64(True):
        found, _ = soap_trajectory(lambda _: _kl(2), gradients, "float64", 2)
        assert_close(
            found, np.stack(desired), 64, condition=float(np.linalg.cond(gradients[0])) ** 4
        )


@pytest.mark.parametrize("condition", [1e2, 1e4, 1e6])
def test_bases_stay_orthonormal_and_directions_near_those_of_exact_bases(condition: float) -> None:
    """In float32, refreshed at every step. By orthogonal iteration it is 0.6 at step 2."""
    gradients = _turning(condition)
    _, states = soap_trajectory(functools.partial(_soap, side="left"), gradients, "float32")
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
    gradients = _turning(1e2)[:4]
    plain, _ = soap_trajectory(functools.partial(_soap, side="left"), gradients, "float32")
    scaled = gradients * np.float32(2.0**exponent)
    found, _ = soap_trajectory(functools.partial(_soap, side="left"), scaled, "float32")
    # LAPACK scales by other factors.
    np.testing.assert_allclose(found, plain, atol=1e-3)


STORAGES = {
    "bfloat16": (curvax.dense(jnp.bfloat16), 0.97),
    "packed": (curvax.packed(min_elements=1), 0.93),
    "4 bits": (curvax.quantized(min_elements=1), 0.5),
}


@pytest.mark.parametrize("name", STORAGES)
def test_storages_round_what_is_graded(name: str) -> None:
    """A storage's basis moves by whole codes: H stays what the stored basis says."""
    storage, least = STORAGES[name]
    gradients = _turning(1e4)
    plain, _ = soap_trajectory(functools.partial(_soap, side="left"), gradients, "float32")
    make = functools.partial(_soap, side="left", storage=storage)
    found, states = soap_trajectory(make, gradients, "float32")
    assert _cosine(found[-1], plain[-1]) > least
    scale = states.left.statistic.roots[-1]
    assert scale.max() / scale.min() > 10  # and yet all rows have as many codes


def test_in_four_bits_directions_are_nearer_than_those_of_exact_bases() -> None:
    gradients = _turning(1e4)

    def last(method: str, storage: Any) -> Any:
        make = functools.partial(
            curvax.scale_by_soap, method=method, side="left", limit=INF, storage=storage
        )
        return soap_trajectory(lambda k: make(refresh=k), gradients, "float32")[0][-1]

    exact = last("eigh", None)
    storage = curvax.quantized(min_elements=1)
    tracked, decomposed = (_cosine(last(m, storage), exact) for m in ("tracked", "eigh"))
    assert tracked > decomposed + 0.2


@pytest.mark.parametrize(("field", "value"), [("statistic", np.nan), ("basis", 1e3)])
def test_damage_starts_anew(field: str, value: float) -> None:
    """Of a damage that the direction shows, the guard takes care."""
    gradients = _turning(1e2)
    direction = _soap(side="left")
    _, state = soap_trajectory(direction, gradients[:5], "float32")
    state = jax.tree.map(jnp.asarray, at(state, -1))
    array = getattr(state.left, field)
    left = state.left._replace(**{field: array.at[0, 0].set(value)})
    state = state._replace(left=left)
    for g in gradients[5:8]:
        d, state = jax.jit(direction.update)(jnp.asarray(g), state)
    assert state.left.restarted == 1 and np.isfinite(d).all()
    assert np.abs(state.left.basis.T @ state.left.basis - np.eye(ORDER)).max() < 3e-3


def test_a_policy_decides_by_the_share_off_the_diagonal() -> None:
    gradients = _turning(1e2)
    for threshold, expected in ((1e-9, STEPS), (10.0, 1)):
        policy = curvax.policies.diagonal_residual(1, threshold)
        _, states = soap_trajectory(_soap(policy, side="left"), gradients, "float32")
        assert states.left.checks[-1] == STEPS and states.left.refreshes[-1] == expected
    off = [h - np.diag(np.diag(h)) for h in states.left.statistic]
    shares = [
        np.linalg.norm(o) / np.linalg.norm(h)
        for o, h in zip(off, states.left.statistic, strict=True)
    ]
    np.testing.assert_allclose(states.left.proxy[1:], shares[1:], rtol=1e-4)


def test_a_stack_is_refreshed_as_its_matrices_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the groups that GPUs visit."""
    direction = _soap(2)
    stacks = np.random.default_rng(0).standard_normal((6, 3, 6, 8)).astype(np.float32)
    alone = [soap_trajectory(direction, stacks[:, i], "float32")[0] for i in range(3)]
    loops_of("gpu", monkeypatch)
    found, _ = soap_trajectory(_soap(2), stacks, "float32")
    np.testing.assert_allclose(found, np.stack(alone, 1), rtol=1e-3, atol=1e-3)


def test_a_mesh_and_a_checkpoint_change_nothing() -> None:
    mesh = mesh_of("auto", 2)
    params, gradients = given({"a": (6, 8), "b": (8, 6), "c": (6, 8)}, 4)
    optimizer = curvax.soap(0.1, method="tracked", refresh=2)
    _, state = trained(optimizer, params, gradients)
    divided = curvax.soap(0.1, method="tracked", refresh=2, mesh=mesh)
    _, on_mesh = steps(divided, [on(mesh, g) for g in gradients], on(mesh, params), mesh)
    portable = curvax.portable_state(divided, params, on_mesh)
    placed = curvax.place_state(optimizer, params, portable)
    assert_close(placed, state, 1e3)
