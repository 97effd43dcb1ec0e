"""Shampoo, FOAM and DR-Shampoo against NumPy float64 transcriptions of the papers.

Every step of 32 is compared: direction, statistics, roots, and where a policy decides its figure,
its damping and its counts. Damping is small beside the factors in float64, and larger in float32,
where whitening by `1/ε` multiplies rounding by `d_max/ε`. Decisions are compared in both.

One compilation serves all periods and roots of a method: both are traced.

Bounds are `c · eps` times a condition number, the sum of

- `κ` of the damped factors: the relative error of an inverse root, also where it is largest;
- `‖L̂‖ ‖G‖ ‖R̂‖ / ‖Ĝ‖`, by which the products amplify a root's rounding;
- what comes of changing each entry of the gradients by a relative `1e-9`, divided by `1e-9`, for
  which the transcription is run a second time;
- for DR's residual `d_max` over the least gap between two eigenvalues, since it depends on the
  eigenvectors, and those of a multiple eigenvalue are arbitrary.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import curvax
from tests.cells import cells
from tests.helpers import assert_close, scanned
from tests.reference.dr_shampoo import dr_shampoo
from tests.reference.foam import foam
from tests.reference.shampoo import shampoo_original, shampoo_practical, shampoo_stale
from tests.shared.factors import root_of, statistic_of

STEPS, EPS64 = 32, float(np.finfo(np.float64).eps)
ROUNDINGS = 4  # of a statistic in a step: a sum, and three products of a refresh that turns it
DTYPES = ("float64", "float32")
PERIODS_AND_ROOTS = [(1, 4), (3, 2), (7, 4), (3, 4), (1, 2), (7, 2)]
B1, B2 = 0.8, 0.9
SMALLEST = {"float64": 1e-7, "float32": 2.0**-5}  # ε0, beside factors of size 1
FOAM_THRESHOLD, DR_THRESHOLD = 0.4, 0.1
LARGEST = {"float64": 1e-4, "float32": 2.0**-2}  # ε_max


def _gradients() -> dict[str, np.ndarray]:
    """Gradients `(STEPS, batch, m, n)`, exact in float32: their row and column spaces drift."""
    generator = np.random.default_rng(0)
    time = np.arange(STEPS)

    def drifting(*shape: int) -> np.ndarray:
        fixed = generator.standard_normal(shape)
        noise = generator.standard_normal((STEPS, *shape))
        calm = np.where(time % 16 < 9, 1.0, 0.05).reshape(-1, *[1] * len(shape))
        sign = generator.choice([-1.0, 1.0], STEPS).reshape(-1, *[1] * len(shape))
        return 0.5 * (sign * fixed + calm * noise)

    rank_one = generator.standard_normal((STEPS, 5, 1)) @ generator.standard_normal((STEPS, 1, 8))
    one_direction = np.ones((STEPS, 5, 1)) * np.arange(1, 9) / 8
    one_direction = one_direction * (1 + time % 5)[:, None, None] / 4
    wide = np.stack([drifting(5, 8), rank_one, one_direction], axis=1)
    leaves = {"tall": drifting(8, 5), "square": drifting(7, 7), "row": drifting(1, 6)}
    leaves = {"wide": wide, **{name: g[:, None] for name, g in leaves.items()}}
    return {name: g.astype(np.float32).astype(np.float64) for name, g in leaves.items()}


GRADIENTS = _gradients()
IN_FLOAT64 = ("wide", *cells(["tall", "square", "row"], of=3))


@dataclasses.dataclass(frozen=True)
class Case:
    """A method: the library's, from period, root, ε0 and ε_max, and the paper's."""

    ours: Callable[..., Any]
    theirs: Callable[..., Any]
    grafted: bool = True
    roots: tuple[int, ...] = (2, 4)
    policy: str | None = None  # the transcription's name of the policy's figure
    damping_mode: str = "absolute"

    def gradients(self, dtype: str) -> tuple[str, ...]:
        """The names of the gradients of a run."""
        return ("wide", "tall") if dtype == "float32" else IN_FLOAT64


ADAM = curvax.grafts.adam(B1)


def _shampoo(refresh, root, eps, **settings):
    defaults = {"b2": B2, "statistics_every": 1, "damping_mode": "absolute", "initial": 0.0}
    return curvax.scale_by_shampoo(refresh=refresh, root=root, eps=eps, **{**defaults, **settings})


def _graft(name: str | None) -> Any:
    return ADAM if name == "adam" else name


def _stale(graft=None, b1=None):
    def ours(period, root, eps, most):
        return _shampoo(curvax.every(period, offset=1), root, eps, graft=_graft(graft), b1=b1)

    precondition = "gradient" if b1 is None else "momentum"
    given = {"b1": B1, "b2": B2, "graft": graft, "precondition": precondition}

    def theirs(gradients, period, root, eps, most):
        return shampoo_stale(gradients, period=period, root=root, eps0=eps, **given)

    return Case(ours, theirs, graft is not None)


def _foam(mode="foam", **ablation):
    shared = {"b1": B1, "b2": B2, "graft": "adam", "threshold": FOAM_THRESHOLD, "mode": mode}

    def ours(period, root, eps, most):
        floor = {"rounding_floor": 0.0, **ablation}
        policy = curvax.policies.foam(period, FOAM_THRESHOLD, most, **floor)
        return _shampoo(policy, root, eps, graft=ADAM)

    def theirs(gradients, period, root, eps, most):
        damping = {"base_damping": eps, "max_damping": most}
        return foam(gradients, check_every=period, root=root, **damping, **shared)

    return Case(ours, theirs, policy="h")


def _dr(update_eigenvalues, graft):
    shared = {"b2": B2, "threshold": DR_THRESHOLD, "update_eigenvalues": update_eigenvalues}

    def ours(period, root, eps, most):
        given = {"check_every": period, "root": root, "eps": eps, "graft": _graft(graft)}
        return curvax.scale_by_dr_shampoo(**given, **shared)

    def theirs(gradients, period, root, eps, most):
        given = {"check_every": period, "root": root, "base_damping": eps, "graft": graft}
        return dr_shampoo(gradients, b1=B1, **given, **shared)

    return Case(ours, theirs, graft is not None, policy="residual")


def _practical(graft):
    shared = {"statistics_every": 2, "graft": graft}

    def ours(period, root, eps, most):
        refresh = curvax.every(period, first=False)
        return curvax.scale_by_shampoo(b2=B2, eps=eps, root=root, refresh=refresh, **shared)

    def theirs(gradients, period, root, eps, most):
        given = {"b": B2, "eps": eps, "root": root, "refresh_every": period}
        return shampoo_practical(gradients, **given, **shared)

    return Case(ours, theirs, graft is not None, damping_mode="relative")


def _original():
    def ours(period, root, eps, most):
        sums = {"b2": None, "damping_mode": "floor", "initial": None}
        return _shampoo(curvax.every(1), 4, eps, graft=None, **sums)

    def theirs(gradients, period, root, eps, most):
        return shampoo_original(gradients, eps=eps)

    return Case(ours, theirs, False, roots=(4,), damping_mode="floor")


CASES = {
    "stale": _stale(),
    "stale, Adam grafting": _stale("adam"),
    "stale, of the momentum": _stale("norm", b1=B1),
    "practical": _practical("norm"),
    "practical, not grafted": _practical(None),
    "original": _original(),
    "FOAM": _foam(),
    "FOAM without adaptive damping": _foam("no_adaptive_damping", adaptive_damping=False),
    "FOAM without refreshes": _foam("no_refresh", refreshes=False),
    "DR": _dr(True, "adam"),
    "DR with the old eigenvalues": _dr(False, None),
}


# Our side


@functools.cache
def _compiled(case: str, dtype: str):
    """Directions and states of all steps, from gradients, and period and root."""
    eps, most = SMALLEST[dtype], LARGEST[dtype]
    return scanned(lambda value: CASES[case].ours(*value, eps, most))


@functools.cache
def _ours(case: str, dtype: str, period: int, root: int):
    """Directions and both sides' factors, by parameter; the time first, in NumPy."""
    gradients = {name: jnp.asarray(GRADIENTS[name], dtype) for name in CASES[case].gradients(dtype)}
    directions, states = _compiled(case, dtype)(gradients, (period, root))
    assert all(d.dtype == dtype for d in directions.values())
    preconditioned = states.direction if CASES[case].grafted else states
    assert all((own.count == np.arange(1, STEPS + 1)).all() for own in preconditioned.values())
    sides = {
        "L": {name: own.left for name, own in preconditioned.items()},
        "R": {name: own.right for name, own in preconditioned.items()},
    }
    return directions, sides


# Their side


def _transcribed(case: str, dtype: str, period: int, root: int, g: np.ndarray):
    """Directions and states of several matrices, `(STEPS, batch, ...)`."""
    arguments = (period, root, SMALLEST[dtype], LARGEST[dtype])
    runs = [CASES[case].theirs(list(g[:, i]), *arguments) for i in range(g.shape[1])]
    directions = np.stack([np.stack(run[0]) for run in runs], axis=1)
    names = runs[0][1][-1]
    return directions, {
        n: np.stack([np.stack([s[n] for s in run[1]]) for run in runs], 1) for n in names
    }


@functools.cache
def _theirs(case: str, dtype: str, name: str, period: int, root: int):
    """Directions and states of the transcription, and condition numbers step by step."""
    g, change = GRADIENTS[name], 1e-9
    directions, states = _transcribed(case, dtype, period, root, g)
    noise = np.random.default_rng(1).choice([-change, change], g.shape)
    moved, moved_states = _transcribed(case, dtype, period, root, g * (1 + noise))
    of_roots = {side: _condition(states[f"{side}_hat"], root) for side in "LR"}
    sensitivity = _largest(moved - directions) / (change * _largest(directions))
    conditions = {f"{side}_hat": kappa for side, kappa in of_roots.items()}
    conditions["direction"] = sensitivity + of_roots["L"] + of_roots["R"]
    conditions["direction"] += _amplification(g, directions, states)
    for key in (f"{f}_{side}" for f in ("h", "residual", "eps") for side in "LR"):
        if key in states:
            size = states[key] if key.startswith("eps") else 1.0
            change_of_key = np.abs(moved_states[key] - states[key]) / change
            conditions[key] = size * of_roots[key[-1]] + change_of_key
            if key.startswith("residual"):
                conditions[key] += _inverse_gap(states[key[-1]], states[f"evds_{key[-1]}"])
    return directions, states, conditions


def _largest(x: np.ndarray) -> np.ndarray:
    return np.abs(x).max(axis=(-2, -1))


def _norm(x: np.ndarray) -> np.ndarray:
    return np.linalg.norm(x, 2, (-2, -1))


def _condition(roots: np.ndarray, root: int) -> np.ndarray:
    """The condition of the damped factors whose inverse roots these are, the largest so far."""
    values = np.linalg.eigvalsh(roots)
    return np.maximum.accumulate((values[..., -1] / values[..., 0]) ** root)


def _inverse_gap(statistics: np.ndarray, refreshes: np.ndarray) -> np.ndarray:
    """`d_max` over the least gap between eigenvalues at the last refresh before each step."""
    values = np.linalg.eigvalsh(statistics)
    if values.shape[-1] == 1:
        return np.zeros(refreshes.shape)
    gaps = np.diff(values, axis=-1).min(axis=-1)
    with np.errstate(divide="ignore"):
        inverse = values[..., -1] / gaps
    fresh = np.diff(refreshes, axis=0, prepend=0) > 0
    last = np.maximum.accumulate(np.where(fresh, np.arange(STEPS)[:, None], 0))
    return np.take_along_axis(inverse, np.concatenate([last[:1], last[:-1]]), axis=0)


def _amplification(g: np.ndarray, directions: np.ndarray, states) -> np.ndarray:
    """`‖L̂‖ ‖G‖ ‖R̂‖ / ‖Ĝ‖`, or the momentum in place of `G`."""
    largest = np.maximum(_norm(g), _norm(states["M"])) if "M" in states else _norm(g)
    product = _norm(states["L_hat"]) * largest * _norm(states["R_hat"])
    return product / _norm(states.get("G_hat", directions))


# The comparison


def _assert_same(case: str, dtype: str, period: int, root: int, theirs=None):
    """Compares everything; `theirs` is the period and root of the transcription if not ours."""
    directions, sides = _ours(case, dtype, period, root)
    own_root, (period, root) = root, theirs or (period, root)
    machine = float(np.finfo(dtype).eps)
    for name in CASES[case].gradients(dtype):
        desired, states, conditions = _theirs(case, dtype, name, period, root)
        direction = directions[name]
        for (t, i), condition in np.ndenumerate(conditions["direction"]):
            bound = 16 * condition * machine
            assert bound < 0.1, f"the bound {bound:.3g} says nothing of {name}, step {t + 1}"
            assert_close(direction[t, i], desired[t, i], 16, condition=condition)
        for side in "LR":
            factor = sides[side][name]
            assert not factor.rejected.any()
            assert_close(statistic_of(factor), states[side], ROUNDINGS * STEPS, eps=machine)
            roots = root_of(factor, own_root, SMALLEST[dtype], CASES[case].damping_mode)
            for (t, i), condition in np.ndenumerate(conditions[f"{side}_hat"]):
                hat = states[f"{side}_hat"][t, i]
                bound = {"condition": 1 + condition, "eps": machine}
                assert_close(roots[t, i], hat, 2 * len(hat), **bound)
            if CASES[case].policy is None:
                _assert_counted(factor, case, period)
            else:
                _assert_same_decisions(factor, states, conditions, case, side, period, dtype)


def _assert_counted(factor, case: str, period: int):
    t = np.arange(1, STEPS + 1)
    offset, period = (0 if case.startswith("practical") else 1, 1 if case == "original" else period)
    done = np.cumsum(t % period == offset % period)[:, None]
    assert np.array_equal(factor.refreshes, np.broadcast_to(done, factor.refreshes.shape))
    assert np.array_equal(factor.checks, factor.refreshes)


def _assert_same_decisions(factor, states, conditions, case, side, period, dtype):
    machine, figure = float(np.finfo(dtype).eps), f"{CASES[case].policy}_{side}"
    t = np.arange(1, STEPS + 1)
    checked = ((t - 1) % period == 0) & (t > 1)
    assert np.array_equal(factor.refreshes, states[f"evds_{side}"])
    done = np.cumsum((t - 1) % period == 0)[:, None]
    assert np.array_equal(factor.checks, np.broadcast_to(done, factor.checks.shape))
    ascending = factor.eigenvalues[..., ::-1]
    assert_close(ascending, states[f"d_{side}"], STEPS)
    error = np.abs(factor.proxy - states[figure])[checked]
    bound = 16 * machine * conditions[figure] + 2.0**-23 * np.abs(states[figure])  # kept in float32
    assert (error <= bound[checked]).all(), np.max(error / bound[checked])
    if figure.startswith("h"):
        error = np.abs(factor.damping - states[f"eps_{side}"])
        bound = 16 * machine * conditions[f"eps_{side}"]
        assert (error <= bound).all(), np.max(error / bound)


WAYS = [("float64", *both) for both in PERIODS_AND_ROOTS]
WAYS += [("float32", *both) for both in PERIODS_AND_ROOTS[1:4]]


@pytest.mark.parametrize(("case", "way"), cells(CASES, WAYS, of=4 * len(WAYS)))
def test_trajectories_follow_the_transcription(case, way):
    dtype, period, root = way
    if root not in CASES[case].roots:
        root = CASES[case].roots[0]
    with jax.enable_x64(dtype == "float64"):
        _assert_same(case, dtype, period, root)
        if dtype == "float64" and case != "original":  # the negative controls
            for theirs in ((1 if period > 1 else 3, root), (period, 6 - root)):
                with pytest.raises(AssertionError, match="exceeds the bound"):
                    _assert_same(case, dtype, period, root, theirs=theirs)


@pytest.mark.parametrize("dtype", cells(DTYPES, of=2))
@pytest.mark.parametrize("case", [case for case in CASES if CASES[case].policy])
def test_the_trajectories_contain_every_decision(case, dtype):
    refreshed, kept, raised = 0, 0, 0
    for period, root in PERIODS_AND_ROOTS:
        for name in CASES[case].gradients(dtype):
            _, states, _ = _theirs(case, dtype, name, period, root)
            for side in "LR":
                again = (states[f"evds_{side}"][-1] - 1).sum()
                refreshed += again
                kept += np.isfinite(states[f"{CASES[case].policy}_{side}"]).sum() - again
                raised += np.sum(states.get(f"eps_{side}", 0.0) > SMALLEST[dtype])
    assert kept > 100
    assert refreshed == 0 if case == "FOAM without refreshes" else refreshed > 100
    assert raised > 100 if case in ("FOAM", "FOAM without refreshes") else raised == 0


# Blocks


BLOCK = 4
CUTS = (((0, 4), (4, 7)), ((0, 4), (4, 8), (8, 10)))  # balanced: 7 = 4 + 3 rows, 10 = 4 + 4 + 2


@pytest.mark.parametrize("method", cells(["eigh", "rotations"], of=2))
def test_a_matrix_in_ragged_blocks_has_the_directions_of_its_blocks(method):
    """Padding has no part in them, nor in FOAM's statistics, lengths, dampings and decisions.

    A rotated basis is that of its first statistic, which has full rank on the left of `m <= n`.
    """
    policy = curvax.policies.foam(3, FOAM_THRESHOLD, 2.0**-2, rounding_floor=0.0)
    whole = method == "eigh"
    side = "both" if whole else "left"
    foam = _shampoo(policy, 2, 2.0**-5, graft=ADAM, method=method, side=side)
    generator = np.random.default_rng(2)
    shape = (7, 10 if whole else 8)
    g = generator.standard_normal((STEPS, *shape)) + 2 * generator.standard_normal(shape)
    cuts = CUTS if whole else (CUTS[0], CUTS[1][:2])
    blocks = [(slice(*i), slice(*j)) for i, j in itertools.product(*cuts)]
    view = curvax.on_matrices(foam, matrices="all", block_size=BLOCK)
    with jax.enable_x64(True):
        together, states = scanned(view)({"w": g})
        alone, own_states = scanned(foam)({str(b): g[:, *b] for b in blocks})
    in_blocks, counts = states.inner["4x4"].inner.direction, []
    for place, block in enumerate(blocks):
        m, n = alone[str(block)].shape[1:]
        assert_close(together["w"][:, *block], alone[str(block)], 64, condition=1e4)
        own = own_states.direction[str(block)]
        right = (in_blocks.right, own.right, n)
        for ours, theirs, order in ((in_blocks.left, own.left, m), *([right] if whole else [])):
            found = statistic_of(ours)[:, place, :order, :order]
            assert_close(found, statistic_of(theirs), 64, eps=EPS64)
            assert np.array_equal(ours.refreshes[:, place], theirs.refreshes)
            counts.append(int(theirs.refreshes[-1]))
    assert len(set(counts)) > whole and max(counts) > 1
