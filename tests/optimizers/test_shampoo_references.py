"""Shampoo, FOAM and DR-Shampoo against NumPy float64 transcriptions of the papers.

Every step of 32 is compared: direction, statistics, roots, and where a policy decides its figure,
its damping and its counts. Damping is small beside the factors in float64, and larger in float32,
where whitening by `1/ε` multiplies rounding by `d_max/ε`. Decisions are compared in both; that none
is close is tested separately.

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
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import curvax
from tests.helpers import ALL_CELLS, assert_close, scanned, share
from tests.reference.dr_shampoo import dr_shampoo
from tests.reference.foam import foam
from tests.reference.shampoo import shampoo_original, shampoo_practical, shampoo_stale

STEPS = 32
DTYPES = ("float64", "float32")
PERIODS_AND_ROOTS = [(1, 4), (3, 2), (7, 4), (3, 4), (1, 2), (7, 2)]
B1, B2 = 0.8, 0.9
SMALLEST = {"float64": 1e-7, "float32": 2.0**-5}  # ε0, beside factors of size 1
FOAM_THRESHOLD, DR_THRESHOLD = 0.4, 0.1
LARGEST = {"float64": 1e-4, "float32": 2.0**-2}  # ε_max


def _gradients() -> dict[str, np.ndarray]:
    """Gradients `(STEPS, ..., m, n)`, exact in float32: their row and column spaces drift."""
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
    leaves = {"wide": wide, "tall": drifting(8, 5), "square": drifting(7, 7), "row": drifting(1, 6)}
    return {name: g.astype(np.float32).astype(np.float64) for name, g in leaves.items()}


GRADIENTS = _gradients()


@dataclasses.dataclass(frozen=True)
class Case:
    """A method: the library's, from period, root, ε0 and ε_max, and the paper's."""

    ours: Callable[..., Any]
    theirs: Callable[..., Any]
    grafted: bool = True
    names: tuple[str, ...] = ("wide", "tall")  # the gradients, beside which there are, in float64,
    more: tuple[str, ...] = ()
    roots: tuple[int, ...] = (2, 4)
    policy: str | None = None  # the transcription's name of the policy's figure

    def gradients(self, dtype: str) -> tuple[str, ...]:
        """The names of the gradients of a run."""
        return self.names + (self.more if dtype == "float64" else ())


ADAM = curvax.grafts.adam(B1)


def _shampoo(refresh, root, eps, **settings):
    defaults = {"b2": B2, "statistics_every": 1, "damping_mode": "absolute", "initial": 0.0}
    return curvax.scale_by_shampoo(refresh=refresh, root=root, eps=eps, **{**defaults, **settings})


def _stale(graft=None, b1=None, more=()):
    def ours(period, root, eps, most):
        refresh = curvax.every(period, offset=1)
        return _shampoo(refresh, root, eps, graft=ADAM if graft == "adam" else graft, b1=b1)

    def theirs(gradients, period, root, eps, most):
        preconditioned = "gradient" if b1 is None else "momentum"
        settings = {"b1": B1, "b2": B2, "graft": graft, "precondition": preconditioned}
        return shampoo_stale(gradients, period=period, root=root, eps0=eps, **settings)

    return Case(ours, theirs, graft is not None, more=more)


def _foam(mode="foam", more=(), **ablation):
    threshold = FOAM_THRESHOLD

    def ours(period, root, eps, most):
        policy = curvax.policies.foam(period, threshold, most, rounding_floor=0.0, **ablation)
        return _shampoo(policy, root, eps, graft=ADAM)

    def theirs(gradients, period, root, eps, most):
        settings = {"b1": B1, "b2": B2, "graft": "adam", "threshold": threshold, "mode": mode}
        damping = {"base_damping": eps, "max_damping": most}
        return foam(gradients, check_every=period, root=root, **damping, **settings)

    return Case(ours, theirs, more=more, policy="h")


def _dr(update_eigenvalues, graft, more=()):
    shared = {"b1": B1, "b2": B2, "graft": graft, "threshold": DR_THRESHOLD}
    shared |= {"update_eigenvalues": update_eigenvalues}

    def ours(period, root, eps, most):
        given = {name: x for name, x in shared.items() if name != "b1"}
        given["graft"] = ADAM if graft == "adam" else graft
        return curvax.scale_by_dr_shampoo(check_every=period, root=root, eps=eps, **given)

    def theirs(gradients, period, root, eps, most):
        return dr_shampoo(gradients, check_every=period, root=root, base_damping=eps, **shared)

    return Case(ours, theirs, graft is not None, more=more, policy="residual")


def _practical(graft, statistics_every=2):
    def ours(period, root, eps, most):
        every = {"refresh": curvax.every(period, first=False), "statistics_every": statistics_every}
        return curvax.scale_by_shampoo(b2=B2, eps=eps, root=root, graft=graft, **every)

    def theirs(gradients, period, root, eps, most):
        every = {"refresh_every": period, "statistics_every": statistics_every}
        return shampoo_practical(gradients, b=B2, eps=eps, root=root, graft=graft, **every)

    return ours, theirs


def _original():
    def ours(period, root, eps, most):
        sums = {"b2": None, "damping_mode": "floor", "initial": None}
        return _shampoo(curvax.every(1), 4, eps, graft=None, **sums)

    def theirs(gradients, period, root, eps, most):
        return shampoo_original(gradients, eps=eps)

    return Case(ours, theirs, False, roots=(4,))


def _more(*names: str) -> tuple[str, ...]:
    """Of the gradients that only some methods are given these by default."""
    return ("square", "row") if ALL_CELLS else names


CASES = {
    "stale": _stale(more=_more("square", "row")),
    "stale, Adam grafting": _stale("adam"),
    "stale, of the momentum": _stale("norm", b1=B1),
    "practical": Case(*_practical("norm"), more=_more()),
    "practical, not grafted": Case(*_practical(None), False),
    "original": _original(),
    "FOAM": _foam(more=_more("row")),
    "FOAM without adaptive damping": _foam("no_adaptive_damping", adaptive_damping=False),
    "FOAM without refreshes": _foam("no_refresh", refreshes=False),
    "DR": _dr(True, "adam", _more("square")),
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


def _batched(runs):
    """Directions and states of several matrices, `(STEPS, batch, ...)`."""
    directions = np.stack([np.stack(run[0]) for run in runs], axis=1)
    names = runs[0][1][-1]
    states = {n: np.stack([np.stack([s[n] for s in run[1]]) for run in runs], 1) for n in names}
    return directions, states


def _transcribed(case: str, dtype: str, name: str, period: int, root: int, g: np.ndarray):
    g = g if g.ndim == 4 else g[:, None]
    arguments = (period, root, SMALLEST[dtype], LARGEST[dtype])
    runs = [CASES[case].theirs(list(g[:, i]), *arguments) for i in range(g.shape[1])]
    return _batched(runs)


@functools.cache
def _theirs(case: str, dtype: str, name: str, period: int, root: int):
    """Directions and states of the transcription, and condition numbers step by step."""
    g, change = GRADIENTS[name], 1e-9
    directions, states = _transcribed(case, dtype, name, period, root, g)
    noise = np.random.default_rng(1).choice([-change, change], g.shape)
    moved, moved_states = _transcribed(case, dtype, name, period, root, g * (1 + noise))
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
    g = g if g.ndim == 4 else g[:, None]
    largest = np.maximum(_norm(g), _norm(states["M"])) if "M" in states else _norm(g)
    product = _norm(states["L_hat"]) * largest * _norm(states["R_hat"])
    return product / _norm(states.get("G_hat", directions))


# The comparison


def _assert_same(case: str, dtype: str, period: int, root: int, theirs=None):
    """Compares everything; `theirs` is the period and root of the transcription if not ours."""
    directions, sides = _ours(case, dtype, period, root)
    period, root = theirs or (period, root)
    for name in CASES[case].gradients(dtype):
        desired, states, conditions = _theirs(case, dtype, name, period, root)
        direction = directions[name].reshape(desired.shape)
        for (t, i), condition in np.ndenumerate(conditions["direction"]):
            bound = 16 * condition * float(np.finfo(dtype).eps)
            assert bound < 0.1, f"the bound {bound:.3g} says nothing of {name}, step {t + 1}"
            assert_close(direction[t, i], desired[t, i], 16, condition=condition)
        for side in "LR":
            factor = _flat(sides[side][name])
            assert not factor.rejected.any()
            assert_close(factor.statistic, states[side], STEPS)
            for (t, i), condition in np.ndenumerate(conditions[f"{side}_hat"]):
                hat = states[f"{side}_hat"][t, i]
                assert_close(factor.inverse_root[t, i], hat, 2 * len(hat), condition=1 + condition)
            if CASES[case].policy is None:
                _assert_counted(factor, case, period)
            else:
                _assert_same_decisions(factor, states, conditions, case, side, period, dtype)


def _flat(factor):
    """A factor with one batch axis behind the time."""
    count = max(1, int(np.prod(factor.statistic.shape[1:-2])))
    own = {"statistic": 2, "inverse_root": 2, "eigenvectors": 2, "eigenvalues": 1, "counts": 1}

    def flat(x, axes):
        return x.reshape(STEPS, count, *x.shape[x.ndim - axes :])

    return factor._replace(
        **{
            field: jax.tree.map(functools.partial(flat, axes=own.get(field, 0)), x)
            for field, x in factor._asdict().items()
        }
    )


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
    assert_close(factor.eigenvalues, states[f"d_{side}"], STEPS)
    error = np.abs(factor.proxy - states[figure])[checked]
    bound = 16 * machine * conditions[figure] + 2.0**-23 * np.abs(states[figure])  # kept in float32
    assert (error <= bound[checked]).all(), np.max(error / bound[checked])
    if figure.startswith("h"):
        error = np.abs(factor.damping - states[f"eps_{side}"])
        bound = 16 * machine * conditions[f"eps_{side}"]
        assert (error <= bound).all(), np.max(error / bound)


WAYS = [("float64", *both) for both in PERIODS_AND_ROOTS]
WAYS += [("float32", *both) for both in PERIODS_AND_ROOTS[1:4]]


# By default one way for each method, in turns.
CELLS = [
    (case, *way)
    for i, case in enumerate(CASES)
    for way in (WAYS if ALL_CELLS else [WAYS[i % len(WAYS)]])
]


def _in_one_worker(case, *others):
    """Tests of a case share its compiled programs."""
    return pytest.param(case, *others, marks=pytest.mark.xdist_group(f"Kronecker, {case}"))


@pytest.mark.parametrize(
    ("case", "dtype", "period", "root"),
    share([_in_one_worker(*cell) for cell in CELLS], of=3),
)
def test_trajectories_follow_the_transcription(case, dtype, period, root):
    if root not in CASES[case].roots:
        root = CASES[case].roots[0]
    with jax.enable_x64(dtype == "float64"):
        _assert_same(case, dtype, period, root)


@pytest.mark.parametrize("dtype", share(DTYPES, of=2))
@pytest.mark.parametrize("case", [_in_one_worker(case) for case in CASES if CASES[case].policy])
def test_the_trajectories_contain_every_decision_and_no_close_one(case, dtype):
    refreshed, kept, raised = 0, 0, 0
    for period, root in PERIODS_AND_ROOTS:
        for name in CASES[case].gradients(dtype):
            _, states, _ = _theirs(case, dtype, name, period, root)
            for side in "LR":
                figure = states[f"{CASES[case].policy}_{side}"]
                if CASES[case].policy == "residual":
                    decisive = figure / DR_THRESHOLD
                elif case == "FOAM without adaptive damping":
                    decisive = figure / FOAM_THRESHOLD
                else:
                    start = np.full((1, figure.shape[1]), SMALLEST[dtype])
                    before = np.concatenate([start, states[f"eps_{side}"][:-1]])
                    decisive = before * figure / FOAM_THRESHOLD / LARGEST[dtype]
                    raised += (states[f"eps_{side}"] > SMALLEST[dtype]).sum()
                checks = np.isfinite(decisive).sum()
                assert np.nanmin(np.abs(decisive - 1)) > 2**-11
                refreshed += (states[f"evds_{side}"][-1] - 1).sum()
                kept += checks - (states[f"evds_{side}"][-1] - 1).sum()
    assert kept > 100
    assert refreshed == 0 if case == "FOAM without refreshes" else refreshed > 100
    assert raised > 100 if case in ("FOAM", "FOAM without refreshes") else raised == 0


@pytest.mark.parametrize(
    ("case", "ours", "theirs"),
    [
        _in_one_worker("stale", (3, 2), (1, 2)),
        _in_one_worker("stale", (3, 2), (7, 2)),
        _in_one_worker("practical", (3, 2), (3, 4)),
        _in_one_worker("FOAM", (3, 4), (1, 4)),
        _in_one_worker("FOAM", (7, 4), (7, 2)),
        _in_one_worker("DR", (3, 4), (7, 4)),
    ],
)
def test_the_bounds_tell_periods_and_roots_apart(case, ours, theirs):
    """A negative control."""
    with jax.enable_x64(True), pytest.raises(AssertionError, match="exceeds the bound"):
        _assert_same(case, "float64", *ours, theirs=theirs)


# Blocks


BLOCK = 4
CUTS = (((0, 4), (4, 7)), ((0, 4), (4, 8), (8, 10)))  # balanced: 7 = 4 + 3 rows, 10 = 4 + 4 + 2


def _in_blocks(direction, gradients: np.ndarray, dtype: str):
    """Directions and states of all steps, through the view that cuts matrices into blocks."""
    view = curvax.on_matrices(direction, matrices="all", block_size=BLOCK)

    updates, states = scanned(view)({"w": jnp.asarray(gradients, dtype)})
    return updates["w"], states


def _ragged_gradients() -> np.ndarray:
    generator = np.random.default_rng(2)
    g = generator.standard_normal((STEPS, 7, 10)) + 2 * generator.standard_normal((7, 10))
    return g.astype(np.float32).astype(np.float64)


@pytest.mark.parametrize("dtype", share(DTYPES, of=2))
def test_practical_shampoo_in_ragged_blocks(dtype):
    """Blocks have factors and lengths of their own; padding has no part in them."""
    g, eps = _ragged_gradients(), SMALLEST[dtype]
    settings = {"root": 4, "statistics_every": 2}
    with jax.enable_x64(dtype == "float64"):
        direction = curvax.scale_by_shampoo(b2=B2, eps=eps, refresh=5, **settings)
        ours, states = _in_blocks(direction, g, dtype)
        desired, expected = shampoo_practical(
            list(g), b=B2, eps=eps, refresh_every=5, block_size=BLOCK, **settings
        )
        sides = {
            "L": states.inner["4x4"].inner.direction.left,
            "R": states.inner["4x4"].inner.direction.right,
        }
        for t in range(STEPS):
            blocks = expected[t].items()
            condition = max(
                float(_condition(state[f"{side}_hat"][None], 4)[0])
                for _, state in blocks
                for side in "LR"
            )
            assert_close(ours[t], desired[t], condition=condition)
            for place, (_, state) in enumerate(blocks):
                for side, factor in sides.items():
                    order = len(state[side])
                    mine = factor.statistic[t, place, :order, :order]
                    assert_close(mine, state[side], STEPS)
        assert (sides["L"].refreshes == (np.arange(1, STEPS + 1) // 5)[:, None]).all()


@pytest.mark.parametrize("dtype", share(DTYPES, of=2))
def test_foam_decides_block_by_block(dtype):
    """Each as the matrix that it is: the zeros that pad it have no part in a decision."""
    g, eps, most = _ragged_gradients(), SMALLEST[dtype], LARGEST[dtype]
    with jax.enable_x64(dtype == "float64"):
        policy = curvax.policies.foam(3, FOAM_THRESHOLD, most, rounding_floor=0.0)
        direction = _shampoo(policy, 2, eps, graft=ADAM)
        ours, states = _in_blocks(direction, g, dtype)
    numbers = []
    for place, (i, j) in enumerate(np.ndindex(2, 3)):
        rows, columns = slice(*CUTS[0][i]), slice(*CUTS[1][j])
        arguments = {"check_every": 3, "threshold": FOAM_THRESHOLD, "max_damping": most}
        arguments |= {"base_damping": eps, "root": 2, "b1": B1, "b2": B2, "graft": "adam"}
        desired, expected = foam(list(g[:, rows, columns]), **arguments)
        states_of = {
            "L": states.inner["4x4"].inner.direction.left,
            "R": states.inner["4x4"].inner.direction.right,
        }
        for side, factors in states_of.items():
            factor = jax.tree.map(lambda x, place=place: x[:, place], factors)
            evds = np.array([state[f"evds_{side}"] for state in expected])
            assert np.array_equal(factor.refreshes, evds)
            numbers.append(evds[-1])
        with jax.enable_x64(dtype == "float64"):
            for t in range(STEPS):
                hats = [expected[t][f"{side}_hat"][None] for side in "LR"]
                condition = sum(float(_condition(hat, 2)[0]) for hat in hats)
                assert_close(ours[t, rows, columns], desired[t], 64, condition=condition)
    assert len(set(numbers)) > 1
