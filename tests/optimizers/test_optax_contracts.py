"""More of Optax's contracts, on matrices, for every optimizer: what `test_contract.py` leaves out.

Other transformations around it, Flax, debugging modes, 64 bits, hyper-parameters in the state.
"""

import collections
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

import curvax
from curvax import inject_hyperparams
from curvax.transforms._validate import Value
from tests.cells import cells
from tests.contract import (
    PLAIN,
    Model,
    compiled,
    shapes_and_dtypes,
    small_run,
    small_training,
    small_tree,
    small_updates,
    two_stacks,
)
from tests.helpers import (
    assert_close,
    gradients_like,
    run,
    states_by_parameter,
    tolerance,
    zeros_like,
)
from tests.registry import REGISTRY, Row

MASK = {"dense": {"kernel": True, "bias": True}, "head": {"kernel": False}}
RATES = (0.1, 0.05, 0.005)
SCHEDULE = optax.piecewise_constant_schedule(0.1, {1: 0.5, 2: 0.1})  # which counts from zero


def with_head(updates: list[Any], head: Callable[[int], Any]) -> list[Any]:
    return [{**update, "head": head(t)} for t, update in enumerate(updates)]


def without_head(updates: list[Any], factor: float = 1.0) -> list[Any]:
    updates = jax.tree.map(lambda x: factor * x, updates)
    return with_head(updates, lambda t: optax.tree.zeros_like(updates[t]["head"]))


class Inside(NamedTuple):
    """An optimizer inside another transformation."""

    make: Callable[[Row], Any]
    expected: Callable[[Row, list[Any], list[Any]], list[Any]]  # from plain updates and gradients
    given: Callable[[list[Any]], list[Any]] = lambda gradients: gradients
    same_head: bool = False  # bit for bit, and without a state


INSIDE = {
    "a schedule": Inside(
        lambda row: row.make(SCHEDULE), lambda row, plain, g: small_updates(row, RATES)
    ),
    "accumulation": Inside(
        lambda row: optax.MultiSteps(row.make(), every_k_schedule=2),
        lambda row, plain, g: [y for x in plain for y in (optax.tree.zeros_like(x), x)],
        lambda gradients: [optax.tree.scale(c, g) for g in gradients for c in (0.5, 1.5)],
    ),
    "apply_if_finite": Inside(
        lambda row: optax.apply_if_finite(row.make(), max_consecutive_errors=3),
        lambda row, plain, g: [plain[0], optax.tree.zeros_like(plain[0]), *plain[1:]],
        lambda gradients: [gradients[0], optax.tree.scale(jnp.nan, gradients[0]), *gradients[1:]],
    ),
    "masked": Inside(
        lambda row: optax.masked(row.make(), MASK),
        lambda row, plain, g: with_head(plain, lambda t: g[t]["head"]),
        same_head=True,
    ),
    "partition and chain": Inside(
        lambda row: optax.chain(
            optax.scale(3.0),
            optax.scale(1 / 3),
            optax.partition(
                {"ours": row.make(), "frozen": optax.set_to_zero()},
                {"dense": "ours", "head": "frozen"},
            ),
            optax.scale(0.5),
        ),
        lambda row, plain, g: with_head(
            optax.tree.scale(0.5, plain), lambda t: optax.tree.zeros_like(g[t]["head"])
        ),
        same_head=True,
    ),
    "averages": Inside(
        lambda row: curvax.tail_average(curvax.ema_nesterov(row.make(), 0.0), start=2),
        lambda row, plain, g: plain,
    ),
}


@pytest.mark.parametrize(("row", "name"), cells(PLAIN, INSIDE, of=2 * len(PLAIN)))
def test_inside_another_transformation_updates_are_the_plain_ones(row: Row, name: str) -> None:
    case, params = INSIDE[name], small_tree()
    gradients = gradients_like(params, 3)
    optimizer = case.make(row)
    updates, states = run(optimizer, case.given(gradients), params)
    expected = case.expected(row, small_run(row)[0], gradients)
    assert_close(updates, expected, row.growth)
    if case.same_head:
        heads = [[update["head"] for update in found] for found in (updates, expected)]
        assert_close(*heads, factor=0)
        assert not curvax.state_of(optimizer, params, states[-1], "head/kernel")


def by_train_state(row: Row, gradients: list[Any]) -> Any:
    state = TrainState.create(apply_fn=lambda _: None, params=small_tree(), tx=compiled(row))
    for gradient in gradients:
        state = state.apply_gradients(grads=gradient)
    assert state.step == len(gradients)
    return state.params


def by_nnx(row: Row, gradients: list[Any]) -> Any:
    model = Model()
    optimizer = nnx.Optimizer(model, row.make(), wrt=nnx.Param)
    structure = jax.tree.structure(nnx.state(model, nnx.Param))

    @nnx.jit
    def step(model: Model, optimizer: nnx.Optimizer, gradient: Any) -> None:
        optimizer.update(model, structure.unflatten(jax.tree.leaves(gradient)))

    for gradient in gradients:
        step(model, optimizer, gradient)
    return nnx.to_pure_dict(nnx.state(model, nnx.Param))


TRAINERS = {f.__name__: f for f in (by_train_state, by_nnx)}


@pytest.mark.parametrize(("row", "name"), cells(PLAIN, TRAINERS, of=len(PLAIN)))
def test_flax_trains_the_same_parameters(row: Row, name: str) -> None:
    found = TRAINERS[name](row, gradients_like(small_tree(), 3))
    assert_close(found, small_training(row), row.growth)


@pytest.mark.parametrize("row", cells(PLAIN, of=5))
def test_debugging_modes_find_nothing(row: Row) -> None:
    """No NaN, not even for zeros and matrices of rank 1, and JAX's own checks on."""
    params = small_tree()
    first, second, third = gradients_like(params, 3)
    rank_one = lambda g: g[:, :1] * g[:1] if g.ndim == 2 else g  # noqa: E731
    gradients = [first, optax.tree.zeros_like(second), jax.tree.map(rank_one, third)]
    with jax.debug_nans(True), jax.enable_checks(True):
        updates, _ = run(row.make(), gradients, params)
    assert_close(updates[0], small_run(row)[0][0], row.growth)


# 64 bits.

ALWAYS_FLOAT32 = {"proxy", "error"}  # figures that inform or decide


def is_floating(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)


@pytest.mark.parametrize(("row", "wide"), cells(REGISTRY, ["dense", "head"], of=6))
def test_wide_types_are_used_only_by_wide_parameters(row: Row, wide: str) -> None:
    """With 64 bits switched on, float32 stays float32, and counters have 32 bits."""
    dtypes = collections.defaultdict(lambda: "float32", {wide: "float64"})
    params = {
        layer: jax.tree.map(lambda x: np.asarray(x, dtypes[layer]), leaves)  # noqa: B023
        for layer, leaves in two_stacks().items()
    }
    optimizer = row.make()
    with jax.enable_x64(True):
        state = jax.eval_shape(optimizer.init, params)
        updates, after = jax.eval_shape(optimizer.update, params, state, params)
        zeros = zeros_like(state)
        entries_of = states_by_parameter(optimizer, params, zeros)
    assert shapes_and_dtypes(after) == shapes_and_dtypes(state)
    assert [x.dtype for x in jax.tree.leaves(updates)] == [x.dtype for x in jax.tree.leaves(params)]
    owned: set[str] = set()
    for name, entries in entries_of.items():
        for place, x in entries.items():
            if is_floating(x):
                narrow = ALWAYS_FLOAT32 & set(place.split("/"))
                expected = "float32" if narrow else dtypes[name.split("/")[0]]
                assert x.dtype == expected, f"{place}: {x.dtype}"
                owned.add(place)
    leaves = jax.tree.leaves(state)
    assert len(owned) == sum(map(is_floating, leaves))
    assert not {"int64", "uint64"} & {x.dtype.name for x in leaves}


def test_arrays_of_numpy_are_taken_without_a_warning() -> None:
    """In float64, which JAX holds in float32."""
    params = {"dense": {"kernel": np.ones((4, 6)), "bias": np.zeros(6)}}
    optimizer = curvax.muon(0.1)
    updates, _ = optimizer.update(params, optimizer.init(params), params)
    assert {x.dtype.name for x in jax.tree.leaves(updates)} == {"float32"}


@pytest.mark.parametrize("row", cells(PLAIN, of=5))
def test_wide_gradients_give_the_updates_of_narrow_ones(row: Row) -> None:
    narrow = small_tree()
    gradient = gradients_like(narrow, 1)[0]
    with jax.enable_x64(True):
        wide, *gradients = jax.tree.map(lambda x: x.astype("float64"), [narrow, gradient])
        (updates,), _ = run(row.make(), gradients, wide)
        updates = jax.tree.map(np.asarray, updates)
    if row.random:  # draws of another dtype are other numbers
        assert all(np.isfinite(x).all() and np.any(x) for x in jax.tree.leaves(updates))
        return
    expected, eps = small_run(row)[0][0], float(jnp.finfo(jnp.float32).eps)
    growth = row.growth
    assert_close(updates["dense"]["kernel"], expected["dense"]["kernel"], growth, eps=eps)
    # Adam divides by 1 - b2, which in float32 has 1,000 times the relative error of b2.
    assert_close(updates, expected, growth, condition=1 / (1 - 0.999), eps=eps)


@pytest.mark.parametrize("row", cells(PLAIN, of=5))
def test_narrow_gradients_give_the_updates_of_wide_ones(row: Row) -> None:
    """A bfloat16 gradient of float32 parameters is as good as the same numbers in float32."""
    params = small_tree()
    narrow = gradients_like(params, 1, dtype="bfloat16")[0]
    wide = jax.tree.map(lambda g: g.astype(jnp.float32), narrow)
    (updates,), (state,) = run(compiled(row), [narrow], params, jit=False)
    (expected,), (expected_state,) = run(compiled(row), [wide], params, jit=False)
    assert_close(updates, expected, factor=0)
    assert_close(state, expected_state, factor=0)


# Weight decay.


@pytest.mark.parametrize("row", cells(REGISTRY, of=3))
def test_the_state_does_not_depend_on_weight_decay(row: Row) -> None:
    """Off, on or injected, for a rate or a schedule: a checkpoint survives every change."""
    params = small_tree()

    def state_of(rate: Any, decay: Any, make: Any = row.make) -> Any:
        return shapes_and_dtypes(jax.eval_shape(make(rate, weight_decay=decay).init, params))

    mask = jax.tree.map(lambda p: p.ndim > 1, params)
    for rate in (0.1, optax.constant_schedule(0.1)):
        masked = {} if row.on_weights else {"weight_decay_mask": mask}
        for make in (row.make, functools.partial(row.make, **masked)):
            expected = state_of(rate, jnp.float32(0.0), make)
            assert state_of(rate, 0.1, make) == expected
        assert state_of(rate, 0.0) == state_of(rate, 0.1)


# Hyper-parameters in the state.


@pytest.mark.parametrize("row", cells(REGISTRY, of=3))
def test_injected_are_the_numbers_alone(row: Row) -> None:
    """Integers, flags and names stay what they are, whichever way the factory is given them."""
    params = small_tree("bfloat16")
    injected = inject_hyperparams(row.optimizer)(0.1, **row.for_contract())
    state: Any = jax.eval_shape(injected.init, params)
    given = {"learning_rate": 0.1, **row.defaults, **row.for_contract()}
    numbers = {k: v for k, v in given.items() if not isinstance(v, Value)}
    for name, value in given.items():
        if isinstance(value, Value):
            numbers |= {f"{name}_{k}": v for k, v in vars(value).items()}
    assert set(state.hyperparams) == {k for k, v in numbers.items() if isinstance(v, float)}
    assert {x.dtype for x in state.hyperparams.values()} == {jnp.dtype("float32")}
    _, after = jax.eval_shape(injected.update, params, state, params)
    assert shapes_and_dtypes(after) == shapes_and_dtypes(state)


INJECTORS = {
    "Optax's": lambda row: optax.inject_hyperparams(row.optimizer, static_args=row.static),
    "ours": lambda row: inject_hyperparams(row.optimizer),
}


@pytest.mark.parametrize(("row", "name"), cells(PLAIN, INJECTORS, of=len(PLAIN)))
def test_injected_numbers_can_be_scheduled_and_set(row: Row, name: str) -> None:
    params = small_tree()
    rate = lambda step: 0.1 / (1 + step)  # noqa: E731
    injected = INJECTORS[name](row)(rate, **row.for_contract())
    step = jax.jit(injected.update)
    state = injected.init(params)
    gradients = gradients_like(params, 3)
    for i, expected in enumerate(small_updates(row, (0.1, 0.1 / 2))):
        updates, state = step(gradients[i], state, params)
        assert_close(float(state.hyperparams["learning_rate"]), rate(i), eps=1e-6)
        # Adam divides by 1 - b2, which in float32 has 1,000 times the relative error of b2.
        assert_close(updates, expected, row.growth, condition=1 / (1 - 0.999))
    before, _ = step(gradients[2], state, params)
    state.hyperparams["weight_decay"] = jnp.full_like(state.hyperparams["weight_decay"], 0.5)
    after, _ = step(gradients[2], state, params)
    difference = after["dense"]["kernel"] - before["dense"]["kernel"]
    bound = tolerance(before["dense"]["kernel"], before["dense"]["kernel"], 4)
    direction = -before["dense"]["kernel"]
    expected = -rate(2) * 0.5 * row.decayed(direction, params["dense"]["kernel"])
    assert float(jnp.abs(difference - expected).max()) <= bound + tolerance(expected, expected, 4)
    assert step._cache_size() == 1


def test_what_is_callable_but_no_schedule_stays() -> None:
    params = small_tree()
    axes: Any = {"dense": {"kernel": curvax.MatrixAxes(0, 1), "bias": None}, "head": None}
    injected = inject_hyperparams(curvax.shampoo, static_args="eps")(
        1,
        refresh=curvax.every(2),
        base=lambda rate: optax.sgd(rate, momentum=0.9),
        weight_decay=0,
        weight_decay_mask=lambda params: jax.tree.map(lambda p: p.ndim > 1, params),
        matrices=lambda path, leaf: leaf.ndim == 2,
        weight_dimension_numbers=lambda params: axes,
        storage=curvax.dense(),
        graft=curvax.grafts.adam(0.8),
    )
    state: Any = injected.init(params)
    assert {"learning_rate", "b2", "weight_decay", "graft_b1"} <= set(state.hyperparams)
    assert {x.dtype for x in state.hyperparams.values()} == {jnp.dtype("float32")}
    static = {"base", "graft", "refresh", "weight_decay_mask", "matrices", "eps", "root", "storage"}
    assert not (static | {"others"}) & set(state.hyperparams)
    with pytest.raises(ValueError, match="ranks"):
        inject_hyperparams(curvax.galore, "ranks")


@pytest.mark.parametrize(
    ("factory", "arguments", "settings", "expected"),
    [
        (
            optax.adamw,
            (SCHEDULE,),
            {"mask": lambda params: {"kernel": True}, "mu_dtype": jnp.float32},
            {"learning_rate", "b1", "b2", "eps", "eps_root", "weight_decay"},
        ),
        (optax.sgd, (jnp.float32(0.1),), {"momentum": 0.9}, {"learning_rate", "momentum"}),
        (optax.scale, (2.0,), {}, {"step_size"}),
        (curvax.scale_by_muon, (), {}, {"b1"}),
    ],
)
def test_any_factory_can_be_injected(
    factory: Any, arguments: Any, settings: Any, expected: set[str]
) -> None:
    params = {"kernel": np.ones((2, 3), np.float32)}
    optimizer = inject_hyperparams(factory)(*arguments, **settings)
    (updates,), (state,) = run(optimizer, [params], params)
    assert set(state.hyperparams) == expected
    assert np.any(updates["kernel"])
