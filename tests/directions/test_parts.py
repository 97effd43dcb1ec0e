"""The building blocks one by one: formulas by hand, states, and which work is really done."""

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_close, gradients_like, share
from reference.racs import fixed_point

import curvax

STEPS = 8
EPS = float(np.finfo(np.float32).eps)


@functools.cache
def _program(transformation: Any) -> Any:
    """The updates and states of all steps; compiled once for gradients of the same shapes."""
    transformation = optax.with_extra_args_support(transformation)

    def trajectory(gradients: Any, params: Any) -> Any:
        def step(state: Any, gradient: Any) -> Any:
            update, state = transformation.update(gradient, state, params)
            return state, (update, state)

        return jax.lax.scan(step, transformation.init(params), gradients)[1]

    return jax.jit(trajectory)


def run(transformation: Any, gradients: list[Any], params: Any) -> tuple[list[Any], list[Any]]:
    """The updates and states of every step, from one program; parameters stay as they are."""
    stacked = jax.tree.map(lambda *g: np.stack(g), *gradients)
    found = jax.tree.map(np.asarray, _program(transformation)(stacked, params))
    steps = [jax.tree.map(lambda x, t=t: x[t], found) for t in range(len(gradients))]
    return [update for update, _ in steps], [state for _, state in steps]


# Momentum


def _momentum(gradients, b1, accumulate, nesterov, bias_correction):
    """Outputs and stored momenta, from the definitions."""
    m, outputs, stored = 0.0, [], []
    for t, g in enumerate(gradients, start=1):
        if accumulate == "sum":
            m = b1 * m + g
            outputs.append(b1 * m + g if nesterov else m)
        else:
            m = b1 * m + (1 - b1) * g
            now, following = (1 - b1**t, 1 - b1 ** (t + 1)) if bias_correction else (1.0, 1.0)
            ahead = b1 * m / following + (1 - b1) * g / now
            outputs.append(ahead if nesterov else m / now)
        stored.append(m)
    return outputs, stored


@pytest.mark.parametrize("b1", [0.0, 0.95])
@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize(
    ("accumulate", "bias_correction"), [("ema", False), ("ema", True), ("sum", False)]
)
def test_momentum_is_its_formula(b1, nesterov, accumulate, bias_correction):
    tree = {"scalar": np.zeros(()), "batch": np.zeros((2, 3, 4))}
    settings = {
        "accumulate": accumulate,
        "nesterov": nesterov,
        "bias_correction": bias_correction,
    }
    with jax.enable_x64(True):
        gradients = gradients_like(tree, STEPS, dtype=jnp.float64)
        updates, states = run(curvax.momentum(b1, **settings), gradients, gradients[0])
        for name in tree:
            sequence = [np.asarray(g[name]) for g in gradients]
            outputs, stored = _momentum(sequence, b1, **settings)
            # 1 - b1 loses up to a factor 1 / (1 - b1) of relative precision.
            assert_close([u[name] for u in updates], outputs, condition=1 / (1 - b1))
            assert_close([s.mu[name] for s in states], stored)
    assert [int(s.count) for s in states] == list(range(1, STEPS + 1))


@pytest.mark.parametrize("accumulate", ["ema", "sum"])
def test_momentum_of_equal_gradients_is_the_gradient_and_its_geometric_sum(accumulate):
    gradient = np.float32([1.0, -3.0])
    corrected = accumulate == "ema"
    transformation = curvax.momentum(0.5, accumulate=accumulate, bias_correction=corrected)
    updates, _ = run(transformation, [gradient] * 4, gradient)
    factors = np.ones(4) if accumulate == "ema" else 2 - 0.5 ** np.arange(4)
    assert_close(updates, [f * np.asarray(gradient, np.float64) for f in factors])


@pytest.mark.parametrize("dtype", [None, jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("parameters", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("given", [jnp.float32, jnp.bfloat16])
def test_the_dtype_of_the_momentum_is_that_asked_for_at_every_step(dtype, parameters, given):
    params = np.zeros((2, 3), parameters)
    transformation = curvax.momentum(0.9, nesterov=True, bias_correction=True, dtype=dtype)
    updates, states = run(transformation, gradients_like(params, 3, dtype=given), params)
    assert all(update.dtype == given for update in updates)
    for state in (jax.eval_shape(transformation.init, params), *states):
        assert state.mu.dtype == (parameters if dtype is None else dtype)
        assert state.count.dtype == jnp.int32


# Norm growth


def test_the_limiter_remembers_the_norm_after_limiting():
    x = np.float32([[3.0, 0.0], [0.0, 4.0]])
    sequence = [x, 10 * x, 2 * x, 0 * x, 7 * x, 8 * x]
    updates, states = run(curvax.limit_norm_growth(1.5), sequence, x)
    norms = [5.0, 7.5, 10.0, 0.0, 35.0, 40.0]
    assert_close([state.norm for state in states], norms, eps=EPS)
    assert_close(updates, [norm / 5 * np.asarray(x, np.float64) for norm in norms])


def test_the_limiter_has_one_norm_for_each_matrix_in_float32():
    tree = {
        "matrix": np.zeros((3, 4), jnp.bfloat16),
        "batch": np.zeros((2, 5, 3, 4), jnp.bfloat16),
    }
    _, (state,) = run(curvax.limit_norm_growth(), gradients_like(tree, 1), tree)
    assert {name: norm.shape for name, norm in state.norm.items()} == {
        "matrix": (),
        "batch": (2, 5),
    }
    assert all(norm.dtype == jnp.float32 for norm in state.norm.values())


# Rows and columns


_scales = jax.jit(curvax.row_column_scales, static_argnums=1)


@pytest.mark.parametrize("shape", [(5, 8), (6, 1)], ids=str)
@pytest.mark.parametrize("rounds", [1, 5])
def test_row_and_column_scales_follow_the_transcription(shape, rounds):
    gradient = np.random.default_rng(0).standard_normal((3, *shape)).astype(np.float32)
    q, s = map(np.asarray, _scales(gradient**2, rounds))
    for b in range(3):
        expected_s, expected_q = fixed_point(gradient[b], rounds)
        assert_close(q[b], expected_q)
        assert_close(s[b], expected_s)


def test_zero_rows_and_columns_give_zero_and_change_nothing_else():
    zero = np.zeros((6, 7), np.float32)
    gradients = [np.asarray(g).copy() for g in gradients_like(zero, 3)]
    for g in gradients:
        g[2], g[:, 4] = 0, 0
    transformation = curvax.scale_by_rows_and_columns(0.9, iterations=10)
    directions, states = run(transformation, gradients, zero)
    rows, columns = [0, 1, 3, 4, 5], [0, 1, 2, 3, 5, 6]
    for direction, state in zip(directions, states, strict=True):
        assert np.array_equal(direction[2], np.zeros(7))
        assert np.array_equal(direction[:, 4], np.zeros(6))
        assert state.rows[2] == 0 and state.columns[4] == 0
    # Without them only the start of the iteration, q = 1 of another length, differs.
    inner = [g[rows][:, columns] for g in gradients]
    left = [d[rows][:, columns] for d in directions]
    right = run(transformation, inner, inner[0])[0]
    for one, other in zip(left, right, strict=True):
        assert_close(one / np.linalg.norm(one), other / np.linalg.norm(other), 64.0)


def test_a_row_that_was_zero_so_far_and_a_zero_gradient_are_finite():
    gradients = [np.zeros((3, 4), np.float32), np.eye(3, 4, dtype=np.float32), np.ones((3, 4))]
    gradients = [g.astype(np.float32) for g in gradients]
    directions, _ = run(curvax.scale_by_rows_and_columns(0.5), gradients, gradients[0])
    assert np.array_equal(directions[0], np.zeros((3, 4)))
    assert np.array_equal(directions[1][:, 3], np.zeros(3))
    assert all(np.isfinite(d).all() for d in directions)
    assert np.all(np.asarray(directions[2]) > 0)


def test_corrected_averages_of_equal_gradients_are_the_scales_of_one():
    gradient = np.asarray(gradients_like(np.zeros((4, 6), np.float32), 1)[0])
    corrected = curvax.scale_by_rows_and_columns(0.9, bias_correction=True)
    directions, states = run(corrected, [gradient] * 5, gradient)
    (alone,), _ = run(curvax.scale_by_rows_and_columns(0.0), [gradient], gradient)
    # 1 - b loses a factor 1 / (1 - b) of relative precision.
    assert_close(directions, [alone] * 5, condition=10.0)
    assert [int(state.count) for state in states] == [1, 2, 3, 4, 5]
    q, _ = _scales(gradient**2, 5)
    assert_close([s.rows for s in states], [(1 - 0.9**t) * np.asarray(q) for t in range(1, 6)])


# Refresh policies


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("k", range(1, 8))
def test_every_is_due_at_the_steps_of_its_definition(k, first):
    for offset in range(-3, 11):
        policy = curvax.every(k, offset=offset, first=first)
        steps = range(1, 30)
        expected = [t % k == offset % k or (first and t == 1) for t in steps]
        assert [bool(policy.due(t)) for t in steps] == expected
        counts = jnp.arange(1, 30, dtype=jnp.int32)
        assert jax.vmap(policy.due)(counts).tolist() == expected


def test_policies_are_values():
    assert curvax.every(3, offset=1) == curvax.every(3, offset=1) != curvax.every(3)
    assert not callable(curvax.every(3))
    assert hash(curvax.every(3)) == hash(curvax.every(3))


# Preconditioning


def _inverse_root(a: np.ndarray, root: int, eps: float, damping: str) -> np.ndarray:
    d, q = np.linalg.eigh(a)
    d = np.maximum(d, 0)
    if damping == "outside":
        values = 1 / (d ** (1 / root) + eps)
    else:
        added = {"absolute": d + eps, "relative": d + eps * d.max(), "floor": np.maximum(d, eps)}
        values = added[damping] ** (-1 / root)
    return (q * values) @ q.T


def _preconditioned(gradients, shape, settings):
    """Directions and states of `precondition` from its definition, for one matrix."""
    s = {"side": "both", "square": "left", "root": 4, "b2": 0.95, "eps": 1e-6} | settings
    m, n = shape
    smaller = s["square"] if m == n else ("left" if m < n else "right")
    sides = {"both": ("left", "right"), "smaller": (smaller,)}.get(s["side"], (s["side"],))
    orders = {"left": m, "right": n}
    statistics = {x: s.get("initial", 0.0) * np.eye(orders[x]) for x in sides}
    roots = {x: np.eye(orders[x]) for x in sides}
    momentum, directions, states = np.zeros(shape), [], []
    for t, g in enumerate(gradients, start=1):
        momentum = s["b1"] * momentum + (1 - s["b1"]) * g if "b1" in s else g
        source = momentum if s.get("statistics") == "momentum" else g
        for x in sides:
            gram = source @ source.T if x == "left" else source.T @ source
            if t % s.get("statistics_every", 1) == 0:
                kept, new = (1.0, 1.0) if s["b2"] is None else (s["b2"], 1 - s["b2"])
                statistics[x] = kept * statistics[x] + new * gram
            if s["refresh"].due(t):
                damping = s.get("damping_mode", "absolute")
                roots[x] = _inverse_root(statistics[x], s["root"], s["eps"], damping)
        direction = momentum
        if "left" in sides:
            direction = roots["left"] @ direction
        if "right" in sides:
            direction = direction @ roots["right"]
        directions.append(direction * (t > s.get("warmup_steps", 0)))
        states.append({x: (statistics[x], roots[x]) for x in sides})
    return directions, states


PRECONDITIONS = {
    "both sides, root 4": {"refresh": curvax.every(3), "eps": 1e-4},
    "both sides, root 2, sums": {
        "refresh": curvax.every(2, offset=1),
        "root": 2,
        "b2": None,
        "eps": 1e-3,
    },
    "left, root 3": {"refresh": curvax.every(1), "side": "left", "root": 3, "b2": 0.5},
    "right": {"refresh": curvax.every(4, first=False), "side": "right", "eps": 1e-3},
    "smaller, square right": {
        "refresh": curvax.every(2, offset=1),
        "side": "smaller",
        "square": "right",
        "root": 2,
    },
    "statistics of the momentum": {
        "refresh": curvax.every(2),
        "b1": 0.7,
        "statistics": "momentum",
        "eps": 1e-2,
    },
    "statistics of the gradient": {"refresh": curvax.every(2), "b1": 0.7, "eps": 1e-2},
    "damping outside": {
        "refresh": curvax.every(1),
        "damping_mode": "outside",
        "eps": 0.3,
        "side": "smaller",
    },
    "relative damping": {"refresh": curvax.every(1), "damping_mode": "relative", "eps": 1e-2},
    "floor": {"refresh": curvax.every(1), "damping_mode": "floor", "eps": 0.5, "side": "smaller"},
    "rare statistics, start, warm-up": {
        "refresh": curvax.every(3),
        "statistics_every": 2,
        "initial": 0.1,
        "warmup_steps": 2,
    },
}


@pytest.mark.parametrize("case", PRECONDITIONS)
def test_preconditioning_is_its_formula(case):
    """Of a tall or of a square matrix, in turns; of both for the first case."""
    settings, place = PRECONDITIONS[case], list(PRECONDITIONS).index(case)
    tree = {"square": np.zeros((4, 4)), "tall": np.zeros((5, 3))}
    if place:
        tree = dict(share([*tree.items(), *tree.items()][place % 2 :][:2], of=2))
    arguments = {name: value for name, value in settings.items() if name != "b1"}
    momentum = curvax.momentum(settings["b1"]) if "b1" in settings else None
    with jax.enable_x64(True):
        gradients = gradients_like(tree, STEPS, dtype=jnp.float64)
        transformation = curvax.precondition(momentum, **arguments)
        directions, states = run(transformation, gradients, gradients[0])
        for name, x in tree.items():
            sequence = [np.asarray(g[name]) for g in gradients]
            expected, expected_states = _preconditioned(sequence, x.shape, settings)
            # Eigenvalues lie between eps (or rounding, in a direction that is not used) and 100.
            condition = 100 / settings.get("eps", 1e-6)
            for t in range(STEPS):
                assert_close(directions[t][name], expected[t], condition=condition)
                for side in ("left", "right"):
                    factor = getattr(states[t], side)[name]
                    assert (factor is not None) == (side in expected_states[t])
                    if factor is not None:
                        statistic, root = expected_states[t][side]
                        assert_close(factor.statistic, statistic)
                        assert_close(factor.inverse_root, root, condition=condition)


def test_before_the_first_refresh_nothing_is_preconditioned():
    refresh = curvax.every(3, first=False)
    gradients = gradients_like(np.zeros((4, 5), np.float32), 3)
    directions, _ = run(curvax.precondition(refresh=refresh), gradients, gradients[0])
    assert_close(directions[:2], gradients[:2], 0.0)
    with pytest.raises(AssertionError, match="exceeds the bound"):
        assert_close(directions[2], gradients[2], 1e3)


def test_both_sides_of_root_4_whiten_one_gradient_as_its_polar_factor():
    # (GGᵀ)^(-1/4) G (GᵀG)^(-1/4) = U Vᵀ; one side of root 2 does the same.
    with jax.enable_x64(True):
        gradient = np.asarray(gradients_like(np.zeros((5, 5)), 1, dtype=jnp.float64)[0])
        condition = float(np.linalg.cond(gradient)) ** 2
        u, _, vt = np.linalg.svd(gradient)
        expected = u @ vt
        for settings in ({"root": 4}, {"root": 2, "side": "left"}, {"root": 2, "side": "right"}):
            whitening = curvax.precondition(refresh=curvax.every(1), b2=0.0, eps=0.0, **settings)
            (direction,), _ = run(whitening, [gradient], gradient)
            assert_close(direction, expected, condition=condition)


def test_a_statistic_that_is_not_finite_leaves_the_last_root_in_place():
    transformation = curvax.precondition(refresh=curvax.every(1))
    params = np.zeros((2, 3, 4), np.float32)
    step, state = jax.jit(transformation.update), jax.jit(transformation.init)(params)
    first, second, third = gradients_like(params, 3)
    for gradient in (first, second):
        state = jax.tree.map(np.array, step(gradient, state)[1])
    # The left statistic of one matrix of the batch is lost.
    state.left.statistic[1] = np.nan
    after = jax.tree.map(np.asarray, step(third, state)[1])
    assert np.array_equal(after.left.inverse_root[1], state.left.inverse_root[1])
    assert not np.array_equal(after.left.inverse_root[0], state.left.inverse_root[0])
    assert after.left.rejected.tolist() == [0, 1] and after.left.refreshes.tolist() == [3, 2]
    assert after.right.rejected.tolist() == [0, 0] and after.right.refreshes.tolist() == [3, 3]


def test_matrices_of_a_batch_are_preconditioned_apart():
    transformation = curvax.precondition(refresh=curvax.every(2), eps=1e-2)
    gradients = gradients_like(np.zeros((3, 4, 5), np.float32), STEPS)
    together, _ = run(transformation, gradients, gradients[0])
    for b in range(3):
        alone, _ = run(transformation, [g[b] for g in gradients], gradients[0][b])
        assert_close([d[b] for d in together], alone, condition=30.0)


# Which work is really done


@pytest.fixture
def executed(monkeypatch) -> list[float]:
    """Grows by one entry whenever an eigendecomposition really runs."""
    entries: list[float] = []
    eigh = jnp.linalg.eigh

    def counted(a: jax.Array, *args: Any, **kwargs: Any) -> Any:
        jax.debug.callback(lambda x: entries.append(float(x)), a[..., 0, 0])
        return eigh(a, *args, **kwargs)

    monkeypatch.setattr(jnp.linalg, "eigh", counted)
    return entries


FACTORS = {  # 2 + 2 and 1 + 1 factors
    "batch": np.zeros((2, 4, 6), np.float32),
    "matrix": np.zeros((5, 3), np.float32),
}


def _refreshes(state: Any) -> list[int]:
    """The counter of every factor of every matrix."""
    factors = [f for side in (state.left, state.right) for f in side.values()]
    return [int(x) for factor in factors for x in np.ravel(factor.refreshes)]


def test_only_due_decompositions_are_executed_step_by_step(executed):
    @jax.jit
    def step(gradient: Any, state: Any, period: Any) -> Any:
        transformation = curvax.precondition(refresh=curvax.every(period))
        return transformation.update(gradient, state)

    init = jax.jit(curvax.precondition(refresh=curvax.every(1)).init)
    for period in (3, 4):
        state = init(FACTORS)
        for t, gradient in enumerate(gradients_like(FACTORS, STEPS), start=1):
            executed.clear()
            before = _refreshes(state)
            _, state = step(gradient, state, period)
            jax.effects_barrier()
            due = t == 1 or t % period == 0
            assert len(executed) == (6 if due else 0), t
            assert _refreshes(state) == [n + due for n in before]


def test_only_due_decompositions_are_executed_in_a_scan(executed):
    gradients = jax.tree.map(lambda *g: np.stack(g), *gradients_like(FACTORS, STEPS))
    never = curvax.every(100, first=False)

    @jax.jit
    def train(gradients: Any, period: Any, offset: Any) -> Any:
        refresh = dataclasses.replace(never, period=period, offset=offset)
        transformation = curvax.precondition(refresh=refresh)

        def step(state: Any, gradient: Any) -> Any:
            direction, state = transformation.update(gradient, state)
            return state, direction

        return jax.lax.scan(step, transformation.init(FACTORS), gradients)

    for policy in (curvax.every(3, offset=1, first=False), never):
        executed.clear()
        state, _ = jax.block_until_ready(train(gradients, policy.period, policy.offset))
        jax.effects_barrier()
        due = sum(bool(policy.due(t)) for t in range(1, STEPS + 1))
        assert len(executed) == 6 * due
        assert _refreshes(state) == [due] * 6


def test_staggered_refreshes_come_once_a_period_and_never_all_at_once(executed):
    period = 3
    policy = curvax.every(period, first=False, stagger=True)
    transformation = curvax.precondition(refresh=policy)
    step, state = jax.jit(transformation.update), jax.jit(transformation.init)(FACTORS)
    counts, history = [], [_refreshes(state)]
    for gradient in gradients_like(FACTORS, 4 * period):
        executed.clear()
        _, state = step(gradient, state)
        jax.effects_barrier()
        counts.append(len(executed))
        history.append(_refreshes(state))
    for start in range(len(counts) - period + 1):
        assert sum(counts[start : start + period]) == 6
        advance = np.subtract(history[start + period], history[start])
        assert advance.tolist() == [1] * 6
    assert max(counts) < 6


def _primitives(jaxpr: Any, inside: bool = False) -> list[tuple[str, bool]]:
    """All primitives, and whether they stand inside a branch or a loop of open length."""
    found = []
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        found.append((name, inside))
        below = inside or name in ("cond", "while")
        for value in itertools.chain.from_iterable(map(jax.tree.leaves, equation.params.values())):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                found += _primitives(inner, below)
    return found


def test_no_decomposition_stands_where_it_would_always_run():
    transformation = curvax.precondition(refresh=curvax.every(3))
    state = jax.eval_shape(transformation.init, FACTORS)
    jaxpr = jax.make_jaxpr(transformation.update)(FACTORS, state).jaxpr
    places = [inside for name, inside in _primitives(jaxpr) if name == "eigh"]
    assert places and all(places)


def test_the_search_for_decompositions_finds_one_that_always_runs():
    always = lambda a: jax.lax.map(jnp.linalg.eigh, a)  # noqa: E731
    jaxpr = jax.make_jaxpr(always)(np.ones((2, 3, 3), np.float32)).jaxpr
    assert ("eigh", False) in _primitives(jaxpr)
