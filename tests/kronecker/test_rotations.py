"""Eigenbases that rotations turn: what bases and roots promise, beside `test_references.py`."""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import curvax
from curvax.transforms.linalg import _turns
from curvax.transforms.storage._graded import Graded
from tests.cells import cells
from tests.helpers import at, scanned
from tests.shared.damage import damaged
from tests.shared.factors import factors_of, statistic_of
from tests.shared.programs import text_for
from tests.shared.soap import soap_trajectory

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


def LEFT(refresh: Any = 1) -> Any:
    return curvax.scale_by_soap(method="rotations", refresh=refresh, limit=INF, side="left")


SOAP = LEFT()  # compiled once for all tests


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
    gram = g @ g.T
    turn = jax.jit(functools.partial(_turns.by_rotations, most=80))(np.eye(ORDER, dtype="f"), gram)
    assert _turns._defect(turn.basis) < _turns.LEAST_DEFECT
    assert np.abs(turn.basis.T @ turn.basis - np.eye(ORDER)).max() < 3e-3
    np.testing.assert_array_equal(turn.matrix, turn.basis)
    d = np.linalg.eigvalsh(gram.astype(np.float64))
    np.testing.assert_allclose(np.sort(np.diag(turn.statistic)), d, rtol=1e-2, atol=1e-6 * d[-1])


def _with_equal_diagonals() -> dict[str, np.ndarray]:
    signs = np.sign(np.random.default_rng(0).normal(size=(16, 24)))
    rows = np.random.default_rng(1).normal(size=(16, 24)) + 1
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    distance = np.abs(np.subtract.outer(np.arange(32), np.arange(32)))
    return {
        "constant gradients": np.ones((64, 64)),
        "gradients of signs": signs @ signs.T / 24,
        "rank one": np.outer(signs[:, 0], signs[:, 0]),
        "normalized rows": rows @ rows.T,
        "Toeplitz": 0.9**distance,
        "nearly equal": np.array([[1, 0.9], [0.9, 1.005]]),
    }


@pytest.mark.parametrize(("name", "h"), _with_equal_diagonals().items())
def test_equal_diagonal_entries_are_turned_too(name: str, h: np.ndarray) -> None:
    """Large entries between them are no sign of close eigenvalues."""
    start = np.eye(len(h), dtype="f"), h.astype("f")
    turn = jax.jit(functools.partial(_turns.by_rotations, most=80, short=0.1))(*start)
    basis, found = (np.asarray(x, np.float64) for x in (turn.basis, turn.statistic))
    assert np.abs(basis.T @ basis - np.eye(len(h))).max() < 3e-3
    assert np.linalg.norm(basis.T @ h @ basis - found) < 1e-3 * np.linalg.norm(h)
    off = np.linalg.norm(found - np.diag(np.diag(found)))
    assert off < 0.1 * np.linalg.norm(h) < np.linalg.norm(h - np.diag(np.diag(h))) / 5


@pytest.mark.parametrize("exponent", [-40, 40])
def test_the_gradients_scale_changes_nothing(exponent: int) -> None:
    gradients = _turning(1e2)
    plain, _ = soap_trajectory(LEFT, gradients, "float32")
    found, _ = soap_trajectory(LEFT, gradients * np.float32(2.0**exponent), "float32")
    # LAPACK scales by other factors.
    np.testing.assert_allclose(found[:4], plain[:4], atol=1e-3)


@pytest.mark.parametrize("name", ["soap", "asgo"])
def test_float64_statistics_turn_in_bfloat16(name: str) -> None:
    """Bases in bfloat16 are read in float32: a step was a `TypeError` about a loop's carry."""
    how: Any = {"method": "rotations", "storage": curvax.dense("bfloat16")}
    made = getattr(curvax, f"scale_by_{name}")(**how)
    with jax.enable_x64(True):
        g = jax.ShapeDtypeStruct((6, 4), jnp.float64)
        state = jax.eval_shape(made.init, g)
        direction, after = jax.eval_shape(made.update, g, state)
    assert direction.dtype == jnp.float64
    assert jax.tree.map(lambda x: x.dtype, after) == jax.tree.map(lambda x: x.dtype, state)


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


@functools.cache
def _root(method: Any = "rotations", **options: Any) -> Any:
    settings = {"refresh": curvax.every(1), "side": "left", "root": 2, "eps": 1e-6}
    return curvax.precondition(method=method, **{**settings, **options})


def test_directions_of_roots_are_near_those_of_exact_roots() -> None:
    """In float32, refreshed at every step; the iteration by products is as exact as `eigh`."""
    gradients = _turning(1e4)
    exact, rotated, products = (
        soap_trajectory(_root(method), gradients, "float32")[0]
        for method in ("eigh", "rotations", "products")
    )
    for t in range(STEPS):
        assert _cosine(rotated[t], exact[t]) > 0.998
        assert _cosine(products[t], exact[t]) > 0.9999


@pytest.mark.parametrize("condition", [1e2, 1e4])
def test_roots_in_four_bits_follow_the_exact_ones(condition: float) -> None:
    """Codes of a basis and of a graded statistic lose less than those of a statistic and a root."""
    gradients, storage = _turning(condition), curvax.quantized(min_elements=1)
    exact = soap_trajectory(_root("eigh"), gradients, "float32")[0][-1]
    stored, rotated, by_eigh = (
        _cosine(soap_trajectory(_root(x, storage=storage), gradients, "float32")[0][-1], exact)
        for x in (curvax.eigenbases.stored_roots(), "rotations", "eigh")
    )
    assert min(rotated, by_eigh) > max(0.7, stored + (0.1 if condition > 1e3 else 0))


def test_a_policy_decides_about_roots_and_keeps_their_eigenvalues_current() -> None:
    gradients = _turning(1e2)
    policy = curvax.policies.diagonal_residual(1, 10.0)
    found, states = soap_trajectory(_root(refresh=policy), gradients, "float32")
    left = states.left
    assert left.checks[-1] == STEPS and left.refreshes[-1] == 1
    assert np.array_equal(left.eigenvalues[1:], [np.diag(h) for h in left.statistic[1:]])
    u = left.basis[-1]
    root = (u * (left.eigenvalues[-1] + 1e-6) ** -0.5) @ u.T
    np.testing.assert_allclose(found[-1], root @ gradients[-1], rtol=1e-3, atol=1e-3)


REFRESHED_ONCE = curvax.policies.foam(1, max_damping=1e-4, refreshes=False)
ONCE_A_STEP = curvax.policies.foam(1, max_damping=1e-3)
ENTRY, COLUMN = (0, 0), np.s_[:, 7]
DAMAGED = [  # of SOAP, or of a root by this policy: what is multiplied by what
    (None, "statistic", ENTRY, np.nan),
    (None, "basis", ENTRY, 1e5),
    (curvax.every(1), "basis", ENTRY, 1e5),
    (REFRESHED_ONCE, "basis", ENTRY, 1e5),
    (ONCE_A_STEP, "basis", COLUMN, 0.0),
    (ONCE_A_STEP, "basis", COLUMN, 2.0),
]


@functools.cache
def _step(direction: Any) -> Any:
    return jax.jit(direction.update)


@pytest.mark.parametrize(("policy", "field", "place", "factor"), cells(DAMAGED, of=2))
def test_what_is_damaged_starts_anew_and_heals(
    policy: Any, field: str, place: Any, factor: float
) -> None:
    """Of a damage that the direction shows, the guard takes care."""
    gradients = _turning(1e2)
    direction = SOAP if policy is None else _root(refresh=policy)
    _, states = soap_trajectory(LEFT if policy is None else direction, gradients, "float32")
    state, update = at(states, 4), _step(direction)
    before, damaged = int(state.left.refreshes), getattr(state.left, field).copy()
    damaged[place] *= factor
    _, state = update(gradients[5], state._replace(left=state.left._replace(**{field: damaged})))
    assert state.left.restarted == 1
    if policy is not None:
        assert np.array_equal(state.left.basis, np.eye(ORDER))
        assert not state.left.statistic.any() and state.left.refreshes == before
    for g in gradients[6:9]:
        d, state = update(g, state)
        assert np.isfinite(d).all()
    u = np.asarray(state.left.basis)
    assert state.left.restarted == 1 and state.left.refreshes > before
    assert np.abs(u.T @ u - np.eye(ORDER)).max() < 3e-3


def test_a_root_heals_from_any_entry_that_is_not_finite() -> None:
    gradients = _turning(1e2)[:8, None]
    update = _step(_root(refresh=REFRESHED_ONCE))
    _, states = soap_trajectory(_root(refresh=REFRESHED_ONCE), gradients[:5], "float32")
    for value in (np.nan, np.inf):
        for place, state in damaged(at(states, -1), value):
            for g in gradients[5:]:
                d, state = update(g, state)
            assert all(np.isfinite(x).all() for x in jax.tree.leaves((d, state))), (place, value)


NAMES = ("soap", "eigen_adam", "kl_shampoo", "asgo", "shampoo", "foam", "dr_shampoo", "apollo")
DECOMPOSITIONS = ("@Eigh", "cusolver", "syevd", "Qr")


@pytest.mark.parametrize("platform", ["tpu", "cuda"])
@pytest.mark.parametrize("name", cells(NAMES, of=8))
def test_no_program_for_an_accelerator_decomposes(name: str, platform: str) -> None:
    """By default, and at the first refresh neither."""
    x = jax.ShapeDtypeStruct((2, 24, 40), jnp.float32)
    asked = {"eigh": True, "rotations": False} if name != "apollo" else {}
    for method, decomposes in ({None: False} | asked).items():
        options = {} if method is None else {"method": method}
        made = getattr(curvax, f"scale_by_{name}")(**options)
        text = text_for(platform, made.update, x, jax.eval_shape(made.init, x), x)
        assert any(x in text for x in DECOMPOSITIONS) == decomposes, method


B = 0.9
ROOTED: dict[str, Any] = {"eps": 1e-6, "graft": None, "base": None, "b2": B, "check_every": 1}
FIRST = {
    "asgo": functools.partial(curvax.asgo, b2=B, refresh=1),
    "foam": functools.partial(curvax.foam, **ROOTED),
    "dr_shampoo": functools.partial(curvax.dr_shampoo, **ROOTED),
    "shampoo": functools.partial(
        curvax.shampoo, b2=B, refresh=1, eps=1e-6, initial=0.0, graft=None, base=None
    ),
    "soap": functools.partial(curvax.soap, b3=B, refresh=1),
    "soap, at every third step": functools.partial(curvax.soap, b3=B, refresh=3),
    "eigen_adam": functools.partial(curvax.eigen_adam, b3=B, refresh=1, side="both"),
    "kl_shampoo": functools.partial(curvax.kl_shampoo, b2=B, refresh=1),
}


NUMBERS: dict[str, dict[str, float]] = {
    "foam": {"threshold": 0.75, "max_damping": 1e-3},
    "dr_shampoo": {"threshold": 0.1},
}
BEGIN = {"zero": 1, "NaN": 1, "three zeros": 3}  # steps


STAYS, ONCE, ALWAYS = 13, 7, 1  # how long a range lasts, in steps


def _hard(first: str = "", rank: int | None = None, lasts: int = STAYS) -> np.ndarray:
    """Gradients of this rank, within ranges that last so many steps, after a hard beginning."""
    generator, shape = np.random.default_rng(2), (13, 8, 12)
    gradients = generator.standard_normal(shape)
    if rank is not None:
        ranges = generator.standard_normal((shape[0], shape[1], rank))
        own = [ranges[t // lasts] for t in range(shape[0])]
        gradients = np.stack([u @ generator.standard_normal((rank, shape[2])) for u in own])
    gradients[: BEGIN.get(first, 0)] = 0
    if first == "NaN":
        gradients[0, 3, 5] = np.nan
    return gradients.astype(np.float32)


@functools.cache
def _program(name: str, **options: Any) -> Any:
    make = functools.partial(FIRST[name], 1.0, method="rotations", **options)
    return scanned(lambda numbers: make(**numbers))


def _run(name: str, gradients: Any, **options: Any) -> tuple[np.ndarray, list[Any]]:
    """Directions, and the factors of the left and the right side, after each step."""
    program = _program(name, **options)
    found, states = program({"kernel": gradients}, NUMBERS.get(name, {}))
    return -found["kernel"], factors_of(states)


def _assert_averages(name: str, gradients: np.ndarray, factors: list[Any]) -> None:
    """`U` is nearly orthonormal, `Uᵀ U = I + E`, and `H = Uᵀ L U` of averages `L`.

    These are of gradients or of whitened gradients. Where both sides have bases, the other one's E
    enters `L`. Then `U H Uᵀ` is `L` up to `E`.
    """
    assert len(factors) == (1 if name == "asgo" else 2)
    given = np.where(np.isfinite(gradients).all(axis=(1, 2), keepdims=True), gradients, 0)
    bases = [x.basis.reshape(len(given), *x.basis.shape[-2:]).astype(np.float64) for x in factors]
    defects = [
        np.linalg.norm(np.swapaxes(u, 1, 2) @ u - np.eye(u.shape[-1]), 2, (1, 2)) for u in bases
    ]
    assert np.max([np.max(x) for x in defects]) < 4e-3
    for i, (factor, u) in enumerate(zip(factors, bases, strict=True)):
        rounds = statistic_of(factor).reshape(u.shape)
        turned = np.linalg.inv(u)
        kept = np.swapaxes(turned, 1, 2) @ factor.statistic.reshape(u.shape) @ turned
        exact = np.zeros(u.shape[1:])
        for t, g in enumerate(given.astype(np.float64)):
            g = g.T if i else g
            if name == "kl_shampoo" and g.any():
                if exact.any():
                    d = factors[1 - i].spectrum[t - 1].reshape(-1).astype(np.float64)
                    whitened = g @ bases[1 - i][t - 1] * d**-0.5
                else:
                    start = np.sqrt(np.mean(g**2))
                    exact, whitened = start * np.eye(len(g)), g / start**0.5
                g = whitened / g.shape[1] ** 0.5
            exact = B * exact + (1 - B) * g @ g.T
            defect = 0 if name == "asgo" else defects[1 - i].max()
            largest = np.abs(exact).max()
            assert np.abs(kept[t] - exact).max() <= (2e-5 + defect) * largest, (i, t)
            defect += 2 * defects[i][t]
            assert np.abs(rounds[t] - exact).max() <= (2e-5 + defect) * np.linalg.norm(exact, 2)


@pytest.mark.parametrize("name", cells(FIRST, of=4))
def test_statistics_are_averages_after_a_hard_beginning_and_of_low_rank(name: str) -> None:
    """Also where a range changes, and a null space becomes a part of it."""
    cases: list[Any] = [(first, None, STAYS) for first in BEGIN]
    if name != "kl_shampoo":
        cases += itertools.product([""], [3, 1], [STAYS, ONCE, ALWAYS])
    for first, rank, lasts in cases:
        gradients, number = _hard(first, rank, lasts), BEGIN.get(first, 0)
        directions, factors = _run(name, gradients)
        assert not directions[:number].any() and np.isfinite(directions).all()
        for factor in factors if first else ():
            rejected = factor.rejected.reshape(len(gradients), -1)
            assert (rejected[-1] == number).all() and not factor.restarted.any()
        _assert_averages(name, gradients, factors)


IN_FEW_BITS = {  # with the largest defect of a basis, and error of an average
    "bfloat16": (curvax.dense(jnp.bfloat16), 0.012, 0.01),
    "packed": (curvax.packed(min_elements=1), 1e-3, 0.02),
    "4 bits": (curvax.quantized(min_elements=1), 0.5, 0.4),
}


@pytest.mark.parametrize(
    ("name", "stored"),
    cells([x for x in FIRST if x not in ("kl_shampoo", "asgo")], IN_FEW_BITS, of=12),
)
def test_statistics_in_few_bits_are_averages(name: str, stored: str) -> None:
    """Of full rank, and of a range that changes once; on one side where there is a choice."""
    storage, defect, error = IN_FEW_BITS[stored]
    how: dict[str, Any] = {} if name in NUMBERS else {"side": "left"}
    decoded = jax.jit(Graded(storage).decode_factor), jax.jit(storage.decode_basis)
    for rank in (None, 3):
        gradients = _hard("", rank, ONCE)
        _, factors = _run(name, gradients, storage=storage, **how)
        for i, factor in enumerate(factors):
            exact: Any = 0.0
            for t, g in enumerate(np.swapaxes(gradients, 1, 2) if i else gradients):
                exact = B * exact + (1 - B) * g.astype(np.float64) @ g.T
                of_step = at(factor, t)
                h, u = (
                    np.asarray(f(x), np.float64).reshape(exact.shape)
                    for f, x in zip(decoded, (of_step.statistic, of_step.basis), strict=True)
                )
                assert np.linalg.norm(u.T @ u - np.eye(len(u)), 2) <= defect
                largest = error * np.linalg.norm(exact)
                assert np.linalg.norm(u @ h @ u.T - exact) <= largest, (i, t)
