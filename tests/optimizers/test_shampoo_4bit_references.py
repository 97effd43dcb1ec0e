"""4-bit Shampoo against its transcription: quantized, cholesky, cholesky with error feedback.

The trajectory in float64 is the transcription's: codes are equal, and what is kept in full differs
by rounding times the condition number κ of what is decomposed or inverted. For κ the largest of all
steps is taken. In float32 an element next to a midpoint may get the other code, after which nothing
further on could be compared: `tests/storage/test_codec.py` has single codes in float32, and
`test_algebra.py` trajectories with bounds from what codes lose.

The paper stores factors in the gradient's own coordinates and their roots beside them.
"""

import functools

import jax
import numpy as np
import pytest

import curvax
from tests.cells import cells
from tests.helpers import assert_close, at
from tests.reference.shampoo_4bit import shampoo_4bit
from tests.shared.stored import (
    B2,
    BE,
    EPS,
    MODES,
    STEPS,
    T1,
    T2,
    as_triples,
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
