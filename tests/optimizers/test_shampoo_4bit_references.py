"""4-bit Shampoo against its transcription: quantized, cholesky, cholesky with error feedback.

The trajectory in float64 is the transcription's: codes are equal, and what is kept in full differs
by rounding times the condition number κ of what is decomposed or inverted. For κ the largest of all
steps is taken. In float32 an element next to a midpoint may get the other code, after which nothing
further on could be compared: every step is then compared with one step of the transcription from
the same stored state.

The paper stores factors in the gradient's own coordinates and their roots beside them.
"""

import functools

import jax
import numpy as np
import pytest

import curvax
from tests.cells import cells
from tests.helpers import assert_close, at
from tests.reference.shampoo_4bit import cq, cq_ef, linear2_codebook, load, shampoo_4bit, store, vq
from tests.shared.stored import (
    B2,
    BE,
    EPS,
    EPS32,
    HALF_GAP,
    MODES,
    STEPS,
    T1,
    T2,
    as_triples,
    decode_stored,
    drifting_gradients,
    shampoo,
    storage_of,
    trajectories,
)

AS_PRINTED = curvax.eigenbases.stored_roots()

# Trajectories in float64


def _stated(mode: str, side: str):
    """The names of the statistic's triples in the transcription's states."""
    names = {"vq": ["{}_bar"], "cq": ["C_bar_{}"], "cq_ef": ["C_bar_{}", "E_bar_{}"]}
    return [name.format(side) for name in names[mode]]


SHAPES = {16: {"wide": (2, 17, 66)}, 64: {"tall": (65, 18)}}
SMALLEST = {16: 1, 64: 4096}  # tiles of 64 for what is coded by default


@functools.cache
def _ours(mode: str, block: int):
    with jax.enable_x64(True):
        return trajectories(
            shampoo(storage_of(mode, block, SMALLEST[block]), method=AS_PRINTED),
            drifting_gradients(SHAPES[block]),
        )


def _condition(x: np.ndarray) -> float:
    values = np.linalg.eigvalsh(x)
    return values[-1] / values[0]


def _damped_condition(x: np.ndarray) -> float:
    """The same with negative eigenvalues at 0 and relative damping."""
    values = np.linalg.eigvalsh(x)
    return 1 / (max(values[0], 0) / values[-1] + EPS)


def _assert_stored(ours, theirs, condition: float, what: str):
    if theirs[0] is None:
        return assert_close(ours, theirs[2], STEPS, condition=condition)
    codes, scales, diagonal = ours
    wrong = (codes != theirs[0]).sum()
    assert wrong == 0, f"{what}: {wrong} of {codes.size} codes differ"
    assert_close(diagonal, theirs[2], condition=condition)
    # Scales are of entries beside the diagonal, whose rounding is relative to the largest of all.
    found, expected = (
        np.concatenate([np.ravel(x) for x in pair]) for pair in ((scales, diagonal), theirs[1:])
    )
    assert_close(found, expected, condition=condition)


def _assert_same_factor(factor, state, side, mode, kappa, what) -> float:
    """Compares one factor at one step; the condition of its root."""
    order = len(state[side])
    if hasattr(root := factor.inverse_root, "codes"):
        stored, root = as_triples(factor.statistic, order), as_triples(root, order)[0]
    else:
        stored, mode = [factor.statistic], "vq"
    for one, name in zip(stored, _stated(mode, side), strict=True):
        _assert_stored(one, state[name], kappa, what)
    condition = kappa + _damped_condition(state[side])
    _assert_stored(root, state[f"{side}_hat_bar"], condition, f"root of {what}")
    assert factor.indefinite == state[f"indefinite_{side}"], what
    assert factor.rejected == 0 and np.all(getattr(factor.statistic, "failures", 0) == 0)
    return condition


def _decomposed_condition(states, side: str, g: np.ndarray) -> np.ndarray:
    """κ of what Eq. 7 decomposes at every step, the largest so far."""
    before = [EPS * np.eye(len(states[0][side])), *(state[side] for state in states[:-1])]
    grams = g @ g.mT if side == "L" else g.mT @ g
    damped = B2 * np.stack(before) + (1 - B2) * grams + EPS * np.eye(len(before[0]))
    return np.maximum.accumulate([_condition(x) for x in damped])


def _assert_same_trajectory(our_mode: str, our_block: int, **other):
    directions, states = _ours(our_mode, our_block)
    settings = {"mode": our_mode, "b": B2, "be": BE, "eps": EPS, "block": our_block}
    settings |= {"statistics_every": T1, "refresh_every": T2}
    settings |= {"min_elements": SMALLEST[our_block]}
    for name, batch in drifting_gradients(SHAPES[our_block]).items():
        for i in np.ndindex(batch.shape[1:-2]):
            g = batch[:, *i]
            desired, expected = shampoo_4bit(list(g), **settings | other)
            kappas = {side: np.ones(STEPS) for side in "LR"}
            if our_mode != "vq":
                kappas = {side: _decomposed_condition(expected, side, g) for side in "LR"}
            for t, state in enumerate(expected):
                condition = 0.0
                own = states.direction[name]
                for side, factors in (("L", own.left), ("R", own.right)):
                    factor = at(factors, t, *i)
                    assert factor.refreshes == (t + 1) // T2
                    what = f"{name} {i}, {side}, step {t + 1}"
                    kappa = kappas[side][t]
                    condition += _assert_same_factor(factor, state, side, our_mode, kappa, what)
                norms = [np.linalg.norm(x, 2) for x in (state["L_hat"], g[t], state["R_hat"])]
                condition *= np.prod(norms) / np.linalg.norm(state["G_hat"])
                assert_close(directions[name][t, *i], desired[t], condition=condition)


OTHERS = {"vq": {"statistics_every": 3}, "cq": {"b": 0.95}, "cq_ef": {"be": 0.5}}


@pytest.mark.parametrize(("block", "mode"), cells(SHAPES, MODES, of=6))
def test_trajectories_follow_the_transcription(mode, block):
    """Orders on both sides of 64: those below stay dense in the default setting."""
    _assert_same_trajectory(mode, block)
    with pytest.raises(AssertionError):  # the negative control
        _assert_same_trajectory(mode, block, **OTHERS[mode])
    if block == 16:
        _, states = _ours(mode, block)
        factors = [f for own in states.direction.values() for f in (own.left, own.right)]
        indefinite = np.concatenate([f.indefinite[-1].ravel() for f in factors])
        if mode == "vq":
            assert indefinite.max() > 0, "what is counted has not been seen"
        else:
            assert not indefinite.any()


# Steps in float32


def _next_of_transcription(mode: str, before, gram, after, block: int):
    """The transcription's triples one step on, and what they are codes of, with its condition."""
    x = load(before[0], block)
    if mode == "vq":
        x = B2 * x + (1 - B2) * gram
        return [vq(before[0], gram, b=B2, block=block)], [x], 1.0
    damped = B2 * x @ x.T + (1 - B2) * gram + EPS * np.eye(len(x))
    c, settings = np.linalg.cholesky(damped), {"b": B2, "eps": EPS, "block": block}
    if mode == "cq":
        return [cq(before[0], gram, **settings)], [c], _condition(damped)
    stored, _ = cq_ef(before[0], before[1], gram, be=BE, **settings)
    e = load(before[1], block)
    # Eq. 11 of the codes that the library took.
    error = BE * e + (1 - BE) * (c + e - load(after[0], block))
    error -= np.diag(np.diag(error))
    return [stored, store(error, block)], [c + e, error], _condition(damped)


def _assert_next_to(found, desired, of, slack: float, block: int) -> tuple[int, int]:
    """Codes differ next to midpoints alone; how many could not, and how many did."""
    codes, scales, diagonal = found
    order = len(codes)
    assert (np.abs(scales - desired[1]) <= slack).all()
    assert (np.abs(diagonal - desired[2]) <= slack).all()
    of = of - np.diag(np.diag(of))
    wide = np.repeat(np.repeat(desired[1], block, 0), block, 1)[:order, :order]
    safe = np.where(wide > 0, wide, 1)
    book = linear2_codebook(4)
    distance = np.abs((of / safe)[..., None] - (book[1:] + book[:-1]) / 2).min(axis=-1)
    decided = (distance > 2 * slack / safe) | (wide == 0)
    assert np.array_equal(codes[decided], desired[0][decided])
    decoded = load(found, block) - np.diag(diagonal)
    assert (np.abs(decoded - of) <= HALF_GAP * wide + 3 * slack).all()
    return decided.sum(), (codes != desired[0]).sum()


@pytest.mark.parametrize("mode", cells(MODES, of=3))
def test_every_float32_step_is_that_of_the_transcription(mode):
    """From the same stored state: a code differs by one step, and only next to a midpoint."""
    block, order, decided, flipped, compared = 8, 21, 0, 0, 0
    g = np.stack(list(drifting_gradients(dict.fromkeys("ab", (order, 26))).values()), axis=1)
    # Sums over 30 steps keep the factors' condition far below 1 / eps(float32).
    optimizer = shampoo(storage_of(mode, block), initial=1.0, side="left", method=AS_PRINTED)
    _, states = trajectories(optimizer, {"w": np.float32(g)})
    for i, gs in enumerate(g.swapaxes(0, 1)):
        factor = at(states.direction["w"].left, slice(None), i)
        for t in range(2 * T1 - 1, STEPS, T1):
            before, after = (as_triples(at(factor.statistic, k), order) for k in (t - 1, t))
            gram = gs[t] @ gs[t].T
            triples, targets, condition = _next_of_transcription(mode, before, gram, after, block)
            slack = 8 * condition * EPS32 * np.abs(targets[0]).max()
            for one, other, of in zip(after, triples, targets, strict=True):
                counted = _assert_next_to(one, other, of, slack, block)
                decided, flipped = decided + counted[0], flipped + counted[1]
                compared += one[0].size
        for t in range(T2 - 1, STEPS, T2):
            found = as_triples(at(factor.inverse_root, t), order)[0]
            d, q = np.linalg.eigh(decode_stored(at(factor.statistic, t), order, block))
            damped = np.maximum(d, 0) + EPS * d[-1]
            root = (q * damped**-0.25) @ q.T
            slack = order * EPS32 * d[-1] / damped.min() * np.abs(root).max()
            assert slack < 0.05 * np.abs(root).max()
            _assert_next_to(found, store(root, block), root, slack, block)
    assert decided > 0.9 * compared and flipped < 1e-3 * compared
