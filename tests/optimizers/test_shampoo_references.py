"""Shampoo, FOAM and DR-Shampoo against NumPy float64 transcriptions of the papers.

Every step of 32 is compared: direction, statistics, roots, and where a policy decides its figure,
its damping and its counts. Damping is small beside the factors in float64, and larger in float32,
where whitening by `1/ε` multiplies rounding by `d_max/ε`. Decisions are compared in both.

One compilation serves all periods and roots of a method: both are traced.

Bounds are `c · eps` times a condition number of the step, the sum of

- `κ` of the damped factors: the relative error of an inverse root, also where it is largest;
- `‖L̂‖ ‖G‖ ‖R̂‖ / ‖Ĝ‖`, by which the products amplify a root's rounding;
- what comes of changing each entry of the gradients by a relative `1e-9`, divided by `1e-9`, for
  which the transcription is run a second time;
- for DR's residual `d_max` over the least gap between two eigenvalues, since it depends on the
  eigenvectors, and those of a multiple eigenvalue are arbitrary.
"""

import functools
import itertools
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest

import curvax
from tests.cells import cells
from tests.helpers import assert_close, scanned
from tests.reference.dr_shampoo import dr_shampoo
from tests.reference.foam import foam
from tests.reference.shampoo import shampoo_original, shampoo_practical, shampoo_stale
from tests.shared.factors import root_of, statistic_of
from tests.shared.transcriptions import Case, assert_follows, machine_epsilon

STEPS, CHANGE = 32, 1e-9
FACTOR = 16.0  # of all bounds
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
CHOSEN = {
    "float64": ("wide", *cells(["tall", "square", "row"], of=3)),
    "float32": ("wide", "tall"),
}


class Method(NamedTuple):
    """The library's direction, from period, root, ε0 and ε_max, and the paper's."""

    ours: Any
    theirs: Any  # from gradients and the same numbers
    grafted: bool = True
    roots: tuple[int, ...] = (2, 4)
    figure: str | None = None  # the transcription's name of the policy's figure
    damping_mode: str = "absolute"
    offset: int = 1  # of refreshes, in the period


def shampoo(refresh: Any, root: Any, eps: Any, **settings: Any) -> Any:
    defaults = {"b2": B2, "statistics_every": 1, "damping_mode": "absolute", "initial": 0.0}
    return curvax.scale_by_shampoo(refresh=refresh, root=root, eps=eps, **{**defaults, **settings})


ADAM = curvax.grafts.adam(B1)


def stale(graft: str | None = None, b1: float | None = None) -> Method:
    grafted, by = ADAM if graft == "adam" else graft, "gradient" if b1 is None else "momentum"
    given = {"b1": B1, "b2": B2, "graft": graft, "precondition": by}
    return Method(
        lambda k, p, eps, most: shampoo(curvax.every(k, offset=1), p, eps, graft=grafted, b1=b1),
        lambda g, k, p, eps, most: shampoo_stale(g, period=k, root=p, eps0=eps, **given),
        graft is not None,
    )


def by_foam(mode: str = "foam", **ablation: Any) -> Method:
    policy = functools.partial(curvax.policies.foam, threshold=FOAM_THRESHOLD, rounding_floor=0.0)
    given = {"b1": B1, "b2": B2, "graft": "adam", "threshold": FOAM_THRESHOLD, "mode": mode}
    return Method(
        lambda k, p, eps, most: shampoo(
            policy(k, max_damping=most, **ablation), p, eps, graft=ADAM
        ),
        lambda g, k, p, eps, most: foam(
            g, check_every=k, root=p, base_damping=eps, max_damping=most, **given
        ),
        figure="h",
    )


def by_residual(update_eigenvalues: bool, graft: str | None) -> Method:
    own = {"b2": B2, "threshold": DR_THRESHOLD, "update_eigenvalues": update_eigenvalues}
    ours = {**own, "graft": ADAM if graft == "adam" else None}
    return Method(
        lambda k, p, eps, most: curvax.scale_by_dr_shampoo(check_every=k, root=p, eps=eps, **ours),
        lambda g, k, p, eps, most: dr_shampoo(
            g, check_every=k, root=p, base_damping=eps, graft=graft, b1=B1, **own
        ),
        graft is not None,
        figure="residual",
    )


PRACTICAL: dict[str, Any] = {"statistics_every": 2, "graft": "norm"}
SUMS: dict[str, Any] = {"b2": None, "damping_mode": "floor", "initial": None, "graft": None}
METHODS = {
    "stale": stale(),
    "stale, Adam grafting": stale("adam"),
    "stale, of the momentum": stale("norm", b1=B1),
    "practical": Method(
        lambda k, p, eps, most: curvax.scale_by_shampoo(
            b2=B2, eps=eps, root=p, refresh=curvax.every(k, first=False), **PRACTICAL
        ),
        lambda g, k, p, eps, most: shampoo_practical(
            g, b=B2, eps=eps, root=p, refresh_every=k, **PRACTICAL
        ),
        damping_mode="relative",
        offset=0,
    ),
    "original": Method(
        lambda k, p, eps, most: shampoo(curvax.every(1), 4, eps, **SUMS),
        lambda g, k, p, eps, most: shampoo_original(g, eps=eps),
        False,
        (4,),
        damping_mode="floor",
    ),
    "FOAM": by_foam(),
    "FOAM without adaptive damping": by_foam("no_adaptive_damping", adaptive_damping=False),
    "FOAM without refreshes": by_foam("no_refresh", refreshes=False),
    "DR": by_residual(True, "adam"),
    "DR with the old eigenvalues": by_residual(False, None),
}


def with_conditions(name: str, dtype: str, period: int, root: int) -> Any:
    """The transcription, with a condition number for each of its states, `of <state>`."""
    method, numbers = METHODS[name], (period, root, SMALLEST[dtype], LARGEST[dtype])
    # Their figures are in float32 here.
    narrow = 2.0**-23 / (FACTOR * machine_epsilon(dtype))

    def run(gradients: list[np.ndarray], _: Any) -> Any:
        directions, states = method.theirs(gradients, *numbers)
        random = np.random.default_rng(1)
        noisy = [g * (1 + random.choice([-CHANGE, CHANGE], g.shape)) for g in gradients]
        moved, others = method.theirs(noisy, *numbers)
        kappas, gaps = dict.fromkeys("LR", 0.0), dict.fromkeys("LR", 0.0)
        for t, (state, other, g) in enumerate(zip(states, others, gradients, strict=True)):
            state["due"] = np.sum(np.arange(1, t + 2) % period == method.offset % period)
            state["none"] = 0
            for side in "LR":
                values = np.linalg.eigvalsh(state[f"{side}_hat"])
                kappas[side] = max(kappas[side], float(values[-1] / values[0]) ** root)
                state[f"of {side}_hat"] = (1 + kappas[side]) * 2 * len(values) / FACTOR
                for figure in ("h", "residual"):
                    if f"{figure}_{side}" in state:
                        x, y = (s[f"{figure}_{side}"] for s in (state, other))
                        condition = kappas[side] + abs(x - y) / CHANGE + narrow * abs(x)
                        condition += gaps[side] if figure == "residual" else 0
                        # Beside 1, since it may be 0; where nothing is checked there is none.
                        state[f"figure_{side}"] = 1 + np.nan_to_num(x)
                        state[f"of figure_{side}"] = np.nan_to_num(condition / (1 + abs(x)))
                if (eps := f"eps_{side}") in state:
                    change = abs(state[eps] - other[eps]) / CHANGE / state[eps]
                    state[f"of {eps}"] = kappas[side] + change
                if t == 0 or state.get(f"evds_{side}") != states[t - 1].get(f"evds_{side}"):
                    gaps[side] = over_gap(state[side])
            product = norm(state["L_hat"]) * max(norm(g), norm(state.get("M", g)))
            product *= norm(state["R_hat"]) / norm(state.get("G_hat", directions[t]))
            change = np.abs(moved[t] - directions[t]).max() / np.abs(directions[t]).max() / CHANGE
            state["of direction"] = change + sum(kappas.values()) + product
        return directions, states

    return run


def norm(x: np.ndarray) -> float:
    return float(np.linalg.norm(x, 2))


def over_gap(statistic: np.ndarray) -> float:
    """`d_max` over the least gap between eigenvalues."""
    values = np.linalg.eigvalsh(statistic)
    with np.errstate(divide="ignore"):
        return float(values[-1] / np.diff(values).min()) if len(values) > 1 else 0.0


def of(name: str) -> Any:
    """The condition numbers of all steps that the states have."""
    return lambda gradients, states: np.array([state[f"of {name}"] for state in states])


@functools.cache
def ours(name: str, dtype: str) -> Any:
    """From a period and a root, one program for all."""
    return lambda both: METHODS[name].ours(*both, SMALLEST[dtype], LARGEST[dtype])


def case_of(name: str, dtype: str, period: int, root: int) -> Case:
    method, due = METHODS[name], np.arange(STEPS) % period == 0
    states: dict[str, Any] = {}
    for side, place in (("L", "left"), ("R", "right")):
        states[f"{place}.statistic"] = side, ROUNDINGS * STEPS / FACTOR
        states[f"{place}.root"] = f"{side}_hat", of(f"{side}_hat")
        states |= {f"{place}.rejected": ("none", 0), f"{place}.checks": ("due", 0)}
        states[f"{place}.refreshes"] = (f"evds_{side}" if method.figure else "due"), 0
        if method.figure:
            states[f"{place}.eigenvalues"] = f"d_{side}", STEPS / FACTOR
            states[f"{place}.figure"] = f"figure_{side}", of(f"figure_{side}")
        if method.figure == "h":
            states[f"{place}.damping"] = f"eps_{side}", of(f"eps_{side}")

    def read(factor: Any) -> Any:
        counts = {name: getattr(factor, name) for name in ("checks", "refreshes", "rejected")}
        found = SimpleNamespace(**factor._asdict(), **counts)
        found.statistic = statistic_of(factor)
        found.root = root_of(factor, root, SMALLEST[dtype], method.damping_mode)
        if method.figure:
            found.eigenvalues = factor.eigenvalues[..., ::-1]
            found.figure = 1 + np.where(due[:, None], np.float64(factor.proxy), 0)
        return found

    def state_of(states: Any, leaf: str) -> Any:
        own = (states.direction if method.grafted else states)[leaf]
        return SimpleNamespace(left=read(own.left), right=read(own.right))

    return Case(
        ours(name, dtype),
        with_conditions(name, dtype, period, root),
        {leaf: GRADIENTS[leaf] for leaf in CHOSEN[dtype]},
        of("direction"),
        states,
        ((period, root),),
        factor=FACTOR,
        dtype=dtype,
        state_of=state_of,
    )


WAYS = [("float64", *both) for both in PERIODS_AND_ROOTS]
WAYS += [("float32", *both) for both in PERIODS_AND_ROOTS[1:4]]


@pytest.mark.parametrize(("name", "way"), cells(METHODS, WAYS, of=6 * len(WAYS)))
def test_directions_follow_the_transcription(name: str, way: tuple[str, int, int]) -> None:
    dtype, period, root = ("float64", 1, 4) if name == "original" else way
    case = case_of(name, dtype, period, root)
    assert_follows(case)
    if dtype == "float64" and name != "original":  # the negative controls
        for other in ((1 if period > 1 else 3, root), (period, 6 - root)):
            with pytest.raises(AssertionError, match="exceeds the bound"):
                assert_follows(case._replace(theirs=with_conditions(name, dtype, *other)))


@pytest.mark.parametrize("dtype", cells(DTYPES, of=2))
@pytest.mark.parametrize("name", [name for name in METHODS if METHODS[name].figure])
def test_the_trajectories_contain_every_decision(name: str, dtype: str) -> None:
    refreshed, kept, raised, method = 0, 0, 0, METHODS[name]
    for both, leaf in itertools.product(PERIODS_AND_ROOTS, CHOSEN[dtype]):
        for gradients in GRADIENTS[leaf].swapaxes(0, 1):
            _, states = method.theirs([*gradients], *both, SMALLEST[dtype], LARGEST[dtype])
            for side in "LR":
                again = states[-1][f"evds_{side}"] - 1
                refreshed += again
                kept += sum(np.isfinite(s[f"{method.figure}_{side}"]) for s in states) - again
                raised += sum(s.get(f"eps_{side}", 0.0) > SMALLEST[dtype] for s in states)
    assert kept > 100
    assert refreshed == 0 if name == "FOAM without refreshes" else refreshed > 100
    assert raised > 100 if name in ("FOAM", "FOAM without refreshes") else raised == 0


# Blocks


BLOCK = 4
CUTS = {"eigh": ((0, 3), (3, 5)), "rotations": ((0, 4), (4, 8))}  # of columns; rows are 4 + 3


@pytest.mark.parametrize("method", cells(CUTS, of=2))
def test_a_matrix_in_ragged_blocks_has_the_directions_of_its_blocks(method: str) -> None:
    """Padding has no part in them, nor in FOAM's statistics, lengths, dampings and decisions.

    A rotated basis is that of its first statistic, which has full rank on the left of `m <= n`.
    """
    policy = curvax.policies.foam(3, FOAM_THRESHOLD, 2.0**-2, rounding_floor=0.0)
    whole = method == "eigh"
    side = "both" if whole else "left"
    foam = shampoo(policy, 2, 2.0**-5, graft=ADAM, method=method, side=side)
    generator = np.random.default_rng(2)
    shape = (7, CUTS[method][-1][-1])
    g = generator.standard_normal((STEPS, *shape)) + 2 * generator.standard_normal(shape)
    cuts = itertools.product(((0, 4), (4, 7)), CUTS[method])
    blocks = [(slice(*i), slice(*j)) for i, j in cuts]
    view = curvax.on_matrices(foam, matrices="all", block_size=BLOCK)
    with jax.enable_x64(True):
        together, states = scanned(view)({"w": g})
        alone, own_states = scanned(foam)({str(b): g[:, *b] for b in blocks})
    (stack,), counts = states.inner.values(), []
    in_blocks = stack.inner.direction
    for place, block in enumerate(blocks):
        m, n = alone[str(block)].shape[1:]
        assert_close(together["w"][:, *block], alone[str(block)], 64, condition=1e4)
        own = own_states.direction[str(block)]
        right = (in_blocks.right, own.right, n)
        for ours, theirs, order in ((in_blocks.left, own.left, m), *([right] if whole else [])):
            found = statistic_of(ours)[:, place, :order, :order]
            assert_close(found, statistic_of(theirs), 64)
            assert np.array_equal(ours.refreshes[:, place], theirs.refreshes)
            counts.append(int(theirs.refreshes[-1]))
    assert len(set(counts)) > whole and max(counts) > 1
