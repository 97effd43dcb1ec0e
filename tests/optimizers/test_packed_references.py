"""Packed storage against its transcription in float64: its codes, and in three methods.

Trajectories in float64 are the transcription's: codes are equal at every step, and what is kept in
full differs by rounding times the condition of what is decomposed. For a factor that is κ of the
shifted statistic, for an inverse root κ of the damped statistic, for a basis the largest eigenvalue
over the smallest gap between two, and for a statistic in its basis the ratio of the entries on its
diagonal, by which it is scaled. As errors are carried along, the largest of all steps so far is
taken.

Factors and inverse roots are those of stored roots, in the gradient's own coordinates. SOAP keeps
its statistics in their bases, scaled to a unit diagonal; `soap_in_bases` is its transcription.
"""

import functools
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import curvax
from curvax.transforms.storage._codec import dither_of
from tests.cells import cells
from tests.helpers import assert_close, at
from tests.reference import packed as reference
from tests.reference.packed import Packing, Stored
from tests.reference.soap import divide, fix_signs
from tests.shared.stored import EPS, T1, T2, as_packed, drifting_gradients, trajectories
from tests.shared.stored import shampoo as shampoo_of
from tests.shared.transcriptions import of_smaller

BITS = (4, 6, 8)
BLOCK = 4
EPS64 = float(np.finfo(np.float64).eps)
SHIFT = 1e-6  # the storage's eps

# Codes alone


def storage_of(bits: int, block: int = BLOCK, eps: float = SHIFT):
    return curvax.packed(bits, block, eps=eps, min_elements=1)


def packing_of(bits: int, block: int = BLOCK, shift: float = SHIFT) -> Packing:
    return Packing(bits, block, shift, np.float64)


def _assert_same_stored(ours, theirs: Stored, bits: int, condition: float = 1.0, what=""):
    unit = []  # the diagonal of C, to which rounding of its other entries is relative
    if hasattr(ours, "correlation"):
        coded, unit = ours.correlation, [1.0]
        ours = SimpleNamespace(codes=coded.codes, scales=coded.scales, diagonal=ours.roots)
    codes, scales, diagonal = as_packed(ours, len(theirs.codes), bits)
    wrong = (codes != theirs.codes).sum()
    assert wrong == 0, f"{what}: {wrong} of {codes.size} codes differ"
    pair = [np.append(x, unit) for x in (scales, theirs.scales)]
    assert_close(*pair, condition=condition)
    if theirs.signs is None:
        assert_close(diagonal, theirs.diagonal, condition=condition)
    else:
        assert np.array_equal(np.sign(diagonal), theirs.signs), what
        # Lengths of Householder vectors below the diagonal, where the diagonal is 1.
        assert_close(1 / np.abs(diagonal), 1 / theirs.diagonal, eps=EPS64 * condition, factor=64)


def test_dither_is_that_of_the_formula():
    counts = [1, 2, 3, 1000, 2**31 - 1]
    found = dither_of(jnp.asarray(counts, jnp.int32), 70, 70)
    assert np.array_equal(found, np.stack([reference.dither(70, t) for t in counts]))


@pytest.mark.parametrize("negative", [5, 50, 500, 5000])
def test_failed_decompositions_are_repeated_with_the_same_shifts(negative):
    """An eigenvalue of -c d eps: shifts of 10, 100 and 1000 d eps are tried; then codes stay.

    The first update has only zeros, of which the factor is zero.
    """
    order, shift = 6, 1e-30
    x = np.diag([1.0] * (order - 1) + [-negative * order * EPS64])
    packing = packing_of(8, shift=shift)
    storage = storage_of(8, eps=shift)

    @jax.jit
    def stored_after(updates):
        found = [storage.encode_factor(0 * updates[0], None)]
        for y in updates:
            found.append(storage.encode_factor(y, found[-1]))
        return found

    with jax.enable_x64(True):
        stored = stored_after(np.stack([0 * x, 4 * np.eye(order), x]))
    assert stored[1].updates == 1 and stored[1].failures == 0
    _assert_same_stored(stored[1], reference.store_factor(0 * x, 1, packing), 8)
    before, after = stored[2:4]
    if negative > 1000:
        with pytest.raises(np.linalg.LinAlgError):
            reference.store_factor(x, 3, packing)
        assert after.failures == 1 and after.updates == 2
        assert_close(after.diagonal, np.full(order, 2.0))
        assert np.array_equal(after.codes, before.codes)
        return
    assert after.failures == 0 and after.updates == 3
    theirs = reference.store_factor(x, 3, packing)
    _assert_same_stored(after, theirs, 8)
    assert_close(after.diagonal[-1], theirs.diagonal[-1], 64)


# Trajectories in float64

SHAPES = {
    "wide": (6, 9),
    "tall": (9, 6),
    "square": (5, 5),
    "odd": (7, 11),
    "row": (1, 7),
    "stack": (2, 4, 13),  # the second is of rank 1
}
B2, K, PERIOD = 0.9, 4, 3


class InBasis:
    """One side's H = U' L U and U, packed.

    H is scaled to C_ij = H_ij / sqrt(H_ii H_jj). Stored are the codes of tril(C, -1) with dither,
    whose t counts what was stored before, and sqrt(diag H). A refresh makes the basis U Q of the
    eigenvectors of the decoded H by descending eigenvalue, or of the QR decomposition of its
    columns, sorted by its diagonal. H turns by T = U' W, where W is the new basis as decoded.
    """

    def __init__(self, order: int, packing: Packing):
        self.packing, self.updates, self.condition = packing, 0, 1.0  # of what made the basis
        codes = reference.encode(np.zeros((order, order)), 0.5, packing)
        self.H, self.H_bar = np.zeros((order, order)), Stored(*codes, np.zeros(order))
        self.U, self.U_bar = np.eye(order), reference.store_basis(np.eye(order), packing)

    def store(self, H: np.ndarray) -> None:
        self.updates += 1
        roots = np.sqrt(np.maximum(np.diag(H), 0))
        across = np.outer(roots, roots)
        C = np.divide(H, across, out=np.eye(len(H)), where=across > 0)
        codes = reference.encode(C, reference.dither(len(H), self.updates), self.packing)
        self.H_bar = Stored(*codes, roots)
        unit = Stored(*codes, np.ones(len(H)))
        self.H = reference.load_root(unit, self.packing) * across

    def refreshed(self, by_qr: bool, first: Stored | None) -> tuple[np.ndarray, np.ndarray]:
        """T, and the order in which v follows; `first` is the basis of a null space."""
        order = np.arange(len(self.H))
        if by_qr:
            order = np.argsort(-np.diag(self.H), kind="stable")
            Q = np.linalg.qr(self.H[:, order])[0]
            self.condition = np.linalg.cond(self.H)
        else:
            Q = np.linalg.eigh(self.H)[1][:, ::-1]
            self.condition = _condition_of_basis(self.H)
        V = self.U @ fix_signs(Q)
        self.U_bar = reference.store_basis(V, self.packing)
        if first is not None and self.condition * EPS64 > 0.01:
            self.U_bar, self.condition = first, 1.0
            self._assert_leading(V[:, 0])
        W = reference.load_basis(self.U_bar, self.packing)
        T = self.U.T @ W
        self.U = W
        self.store(T.T @ self.H @ T)
        return T, order

    def _assert_leading(self, q: np.ndarray) -> None:
        """The eigenvector that has an eigenvalue of its own is the column of one reflector.

        It moves by at most 2 sqrt(2) times the reflector's relative error.
        """
        n, unit = reference.levels(self.packing.bits)
        w = reference.load_basis(self.U_bar, self.packing)[:, 0]
        half_gap = np.diff(n).max() / unit / 2
        assert np.linalg.norm(w - q) <= 8**0.5 * half_gap * (len(q) - 1) ** 0.5

    def state(self, side: str) -> dict[str, Any]:
        own = {f"H_{side}": self.H, f"H_{side}_bar": self.H_bar, f"U_{side}_bar": self.U_bar}
        return own | {f"condition_{side}": self.condition}


def soap_in_bases(
    gradients, packing, *, b1=0.95, b2=0.95, b3=0.95, by_qr=False, first=(None, None)
):
    """SOAP (`reference.soap`) with statistics, M and v in packed bases.

    X = U_L' G U_R enters H_L and H_R, then the left basis is refreshed, then the right (t = 1 by
    eigenvectors, and t mod K = 0). M and X turn along; v follows the columns of QR, or stays.

    `first` are the first bases as stored, for what is not determined: the null space of a statistic
    of rank 1, which codes keep, has no basis of its own.

    States: M and v in the bases, H_L and H_R as decoded; H_L, H_R, U_L and U_R as stored, with
    `_bar`.
    """
    m, n = gradients[0].shape
    L, R = InBasis(m, packing), InBasis(n, packing)
    M, v = np.zeros((m, n)), np.zeros((m, n))
    directions, states = [], []
    for t, G in enumerate(gradients, start=1):
        X = L.U.T @ G @ R.U
        L.store(b3 * L.H + (1 - b3) * X @ X.T)
        R.store(b3 * R.H + (1 - b3) * X.T @ X)
        if t == 1 or t % K == 0:
            given = first if t == 1 else (None, None)
            T, order = L.refreshed(by_qr and t > 1, given[0])
            M, X, v = T.T @ M, T.T @ X, v[order]
            T, order = R.refreshed(by_qr and t > 1, given[1])
            M, X, v = M @ T, X @ T, v[:, order]
        M, v = b1 * M + (1 - b1) * X, b2 * v + (1 - b2) * X**2
        directions.append(L.U @ divide(M, v, max(m, n)) @ R.U.T)
        states.append({"M": M, "v": v, **L.state("L"), **R.state("R")})
    return directions, states


SHAMPOO = {"statistics_every": T1, "refresh_every": T2, "b": B2, "eps": EPS}
ROOTS = curvax.eigenbases.stored_roots()
METHODS: dict[str, tuple[Any, Any]] = {
    "shampoo": (
        functools.partial(shampoo_of, method=ROOTS),
        functools.partial(reference.shampoo_packed, **SHAMPOO),
    ),
    "soap": (functools.partial(curvax.scale_by_soap, refresh=K, method="eigh"), soap_in_bases),
    "soap by QR": (
        functools.partial(curvax.scale_by_soap, refresh=K, method="qr"),
        functools.partial(soap_in_bases, by_qr=True),
    ),
    "asgo": (
        functools.partial(curvax.scale_by_asgo, refresh=PERIOD, method=ROOTS),
        lambda g, packing: reference.asgo_packed(g, packing, period=PERIOD, side=of_smaller(g)),
    ),
}


@functools.cache
def _ours(method: str, bits: int, shape: str):
    """Directions and states; cached for the negative control."""
    transformation = METHODS[method][0](storage=storage_of(bits))
    with jax.enable_x64(True):
        return trajectories(transformation, drifting_gradients(SHAPES)[shape])


def _condition(x: np.ndarray, damping: float) -> float:
    values = np.linalg.eigvalsh(x)
    return (values[-1] + damping) / max(values[0] + damping, EPS64 * values[-1])


def _condition_of_basis(x: np.ndarray) -> float:
    values = np.linalg.eigvalsh(x)
    gap = np.diff(values).min(initial=values[-1])
    return values[-1] / max(gap, EPS64 * values[-1])


def _damping(method: str, x: np.ndarray) -> float:
    return EPS * (np.linalg.eigvalsh(x)[-1] if method == "shampoo" else 1)


def _compared(method: str, states):
    """For each side: our state, and the names of the factor and of what is made from it."""
    if method == "asgo":
        return [(states.left or states.right, "V", "Lambda_inv")]
    if method == "shampoo":
        sides = states.direction.left, states.direction.right
        return [(side, X, f"{X}_hat") for side, X in zip(sides, "LR", strict=True)]
    return [(states.left, "H_L", "U_L"), (states.right, "H_R", "U_R")]


def _first_bases(states, bits: int, shape: tuple[int, int], *place: int) -> list[Stored]:
    found = []
    for side, order in zip((states.left, states.right), shape, strict=True):
        codes, scales, diagonal = as_packed(at(side.basis, 0, *place), order, bits)
        found.append(Stored(codes, scales, np.abs(diagonal), np.sign(diagonal)))
    return found


def _conditions(method: str, ours, state, factor: str) -> tuple[float, float, Any]:
    """Of a statistic and of what is made of it, and the latter as stored."""
    x = state[factor]
    if method.startswith("soap"):
        diagonal, condition = np.diag(x), state[f"condition_{factor[-1]}"]
        smallest = diagonal[diagonal > 0].min()  # others are scaled by 0
        return condition + diagonal.max() / smallest, condition, ours.basis
    return _condition(x, 0.0), _condition(x, _damping(method, x)), ours.inverse_root


def _assert_same_trajectory(method: str, bits: int, shape: str, other: bool = False):
    directions, all_states = _ours(method, bits, shape)
    packing, soap = packing_of(bits), method.startswith("soap")
    options: dict[str, Any] = {}
    if other and soap:
        options["b3"] = 0.95 + SHIFT
    elif other:
        packing = packing._replace(shift=2 * SHIFT)
    batch = drifting_gradients(SHAPES)[shape]
    for i in np.ndindex(batch.shape[1:-2]):
        gradients = list(batch[:, *i])
        if soap:
            options["first"] = _first_bases(all_states, bits, batch.shape[-2:], *i)
        desired, expected = METHODS[method][1](gradients, packing, **options)
        worst = {name: 1.0 for _, *names in _compared(method, all_states) for name in names}
        for t, state in enumerate(expected):
            for side, factor, used in _compared(method, all_states):
                ours = at(side, t, *i)
                *own, stored = _conditions(method, ours, state, factor)
                for name, condition in zip((factor, used), own, strict=True):
                    worst[name] = max(worst[name], condition)
                what = f"{shape} {i}, step {t + 1}, "
                _assert_same_stored(
                    ours.statistic, state[f"{factor}_bar"], bits, worst[factor], what + factor
                )
                _assert_same_stored(stored, state[f"{used}_bar"], bits, worst[used], what + used)
                assert ours.rejected == 0 and ours.restarted == 0
                assert soap or ours.statistic.failures == 0
            condition = sum(worst.values()) * _amplified(method, gradients[t], state, desired[t])
            assert_close(directions[t, *i], desired[t], condition=condition)


def _amplified(method: str, g: np.ndarray, state, direction: np.ndarray) -> float:
    """By how much errors of roots or bases count in the direction."""
    if method.startswith("soap"):
        root = np.sqrt(state["v"])
        return root.max() / root.min()
    if method == "asgo":
        norms = [np.linalg.norm(state[name], 2) for name in ("Lambda_inv", "M")]
        return float(np.prod(norms) / np.linalg.norm(direction))
    norms = [np.linalg.norm(x, 2) for x in (state["L_hat"], g, state["R_hat"])]
    return float(np.prod(norms) / np.linalg.norm(state["G_hat"]))


@pytest.mark.parametrize(("method", "bits", "shape"), cells(METHODS, BITS, SHAPES, of=72))
def test_trajectories_follow_the_formulas(method, bits, shape):
    _assert_same_trajectory(method, bits, shape)
    with pytest.raises(AssertionError):  # the negative control
        _assert_same_trajectory(method, bits, shape, other=True)
