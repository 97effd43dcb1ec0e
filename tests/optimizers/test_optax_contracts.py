"""More of Optax's contracts, on matrices, for every optimizer: what `test_contract.py` leaves out.

Freezing, branches, debugging modes, 64 bits, hyper-parameters in the state, convergence.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import curvax
from curvax import inject_hyperparams
from curvax.transforms._validate import Value
from curvax.transforms.subspace import _bases
from tests.cases import in_turns
from tests.contract import (
    MINIMA_RATES,
    Model,
    compiled,
    shapes_and_dtypes,
    small_run,
    small_training,
    small_tree,
    two_stacks,
)
from tests.helpers import (
    ALL_CELLS,
    OPTIMIZED,
    assert_close,
    gradients_like,
    run,
    states_by_parameter,
)
from tests.registry import NAMED, REGISTRY, Row


@in_turns(2)
def test_directions_accept_extra_arguments(row: Row) -> None:
    """Their updates and states have the same types, with and without."""
    matrices = jax.ShapeDtypeStruct((2, 4, 6), jnp.float32)
    direction = optax.with_extra_args_support(row.make_direction())
    state = jax.eval_shape(direction.init, matrices)
    with_more = functools.partial(direction.update, value=1.0, other="x")
    given = matrices, state, row.needed(matrices)
    updates, after = jax.eval_shape(direction.update, *given)
    assert jax.eval_shape(with_more, *given) == (updates, after)
    assert (updates.shape, updates.dtype) == (matrices.shape, matrices.dtype)
    assert shapes_and_dtypes(after) == shapes_and_dtypes(state)


@in_turns(1, of=6)
def test_frozen_matrices_stand_still(row: Row) -> None:
    params = small_tree()
    mask = {"dense": {"kernel": False, "bias": False}, "head": {"kernel": True}}
    gradient = gradients_like(params, 1)
    plain = small_run(row)[0][0]
    frozen = optax.chain(compiled(row), optax.freeze(mask))
    (updates,), _ = run(frozen, gradient, params, jit=False)
    assert not np.any(updates["head"]["kernel"])
    assert_close(updates["dense"], plain["dense"], row.growth)
    selective = optax.selective_transform(row.make(), freeze_mask=mask)
    state = jax.eval_shape(selective.init, params)
    _, after = jax.eval_shape(selective.update, params, state, params)
    assert shapes_and_dtypes(after) == shapes_and_dtypes(state)
    entries = curvax.state_of(selective, params, state, "head/kernel")
    assert not entries, "a frozen matrix has state"


@in_turns(7, of=17)
def test_nnx_model_and_optimizer(row: Row) -> None:
    both = nnx.ModelAndOptimizer(Model(), compiled(row), wrt=nnx.Param)
    structure = jax.tree.structure(nnx.state(both.model, nnx.Param))
    for gradient in gradients_like(small_tree(), 3):
        both.update(structure.unflatten(jax.tree.leaves(gradient)))
    trained = nnx.to_pure_dict(nnx.state(both.model, nnx.Param))
    assert_close(trained, small_training(row), row.growth)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@in_turns(2)
def test_a_step_can_be_a_branch(row: Row, dtype: str) -> None:
    """Dtypes and weak types of updates and state stay as they are, or `cond` would refuse."""
    params = small_tree(dtype)
    optimizer = row.make()
    state = jax.eval_shape(optimizer.init, params)

    def step(apply: Any, gradient: Any, state: Any, params: Any) -> Any:
        update = lambda: optimizer.update(gradient, state, params)  # noqa: E731
        return jax.lax.cond(apply, update, lambda: (optax.tree.zeros_like(gradient), state))

    _, after = jax.eval_shape(step, jnp.bool_(True), params, state, params)
    assert shapes_and_dtypes(after) == shapes_and_dtypes(state)


@in_turns(11, of=17)
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


@in_turns(0)
def test_wide_types_are_used_only_by_wide_parameters(row: Row) -> None:
    """With 64 bits switched on, float32 stays float32, and counters have 32 bits.

    The parameters of one layer are wide: of the one and the other in turns.
    """
    layers = ("dense", "head")
    for wide in layers if ALL_CELLS else layers[REGISTRY.index(row) % 2 :][:1]:
        dtypes = {layer: "float64" if layer == wide else "float32" for layer in layers}
        params = {
            layer: jax.tree.map(lambda x: np.asarray(x, dtypes[layer]), leaves)  # noqa: B023
            for layer, leaves in two_stacks().items()
        }
        optimizer = row.make()
        with jax.enable_x64(True):
            state = jax.eval_shape(optimizer.init, params)
            updates, after = jax.eval_shape(optimizer.update, params, state, params)
            zeros = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), state)
            entries_of = states_by_parameter(optimizer, params, zeros)
        assert shapes_and_dtypes(after) == shapes_and_dtypes(state)
        assert [x.dtype for x in jax.tree.leaves(updates)] == [
            x.dtype for x in jax.tree.leaves(params)
        ]
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


@in_turns(14, of=17)
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


@in_turns(13, of=17)
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


@in_turns(1)
def test_the_state_does_not_depend_on_weight_decay(row: Row) -> None:
    """Off, on or injected, for a rate or a schedule: a checkpoint survives every change."""
    params = small_tree()

    def state_of(rate: Any, decay: Any, make: Any = row.make) -> Any:
        return shapes_and_dtypes(jax.eval_shape(make(rate, weight_decay=decay).init, params))

    mask = jax.tree.map(lambda p: p.ndim > 1, params)
    for rate in (0.1, optax.constant_schedule(0.1)):
        for make in (row.make, functools.partial(row.make, weight_decay_mask=mask)):
            expected = state_of(rate, jnp.float32(0.0), make)
            assert state_of(rate, 0.1, make) == expected
        assert state_of(rate, 0.0) == state_of(rate, 0.1)


@in_turns(6, of=17)
def test_weight_decay_can_be_switched_on(row: Row) -> None:
    """A state from steps without decay goes on with decay, at the step of its schedule."""
    params, rate = small_tree(), lambda step: 0.1 / (1 + step)
    first, second = gradients_like(params, 2)
    plain, decayed = row.make(rate), row.make(rate, weight_decay=0.5)
    _, (state,) = run(plain, [first], params)
    (without,), (with_decay,) = (
        (jax.jit(optimizer.update)(second, state, params)[0],) for optimizer in (plain, decayed)
    )
    decayed_part = lambda u, p: row.decayed(-u, p) if p.ndim > 1 else p  # noqa: E731
    assert_close(
        jax.tree.map(lambda a, b: b - a, without, with_decay),
        jax.tree.map(lambda u, p: -0.5 * rate(1) * decayed_part(u, p), without, params),
        row.growth,
    )


# Hyper-parameters in the state.


@in_turns(0)
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


def test_injected_numbers_can_be_scheduled_and_set() -> None:
    row = NAMED["galore"]
    params = small_tree("bfloat16")
    rate = lambda step: 0.1 / (1 + step)  # noqa: E731
    injected = inject_hyperparams(curvax.galore)(rate, **row.settings, b2=lambda step: 0.999)
    plain = row.make(rate, b2=jnp.float32(0.999))
    step, plain_step = jax.jit(injected.update), jax.jit(plain.update)
    state: Any = injected.init(params)
    expected = plain.init(params)
    for gradient in gradients_like(params, 3):
        updates, state = step(gradient, state, params)
        without, expected = plain_step(gradient, expected, params)
        assert_close(updates, without, row.growth)
    assert 0.99 < float(state.hyperparams["b2"]) < 1
    state.hyperparams["weight_decay"] = jnp.float32(1e3)
    updates, _ = step(optax.tree.zeros_like(params), state, params)
    decayed = jax.tree.map(lambda p: (-1e3 * rate(3) * p).astype(p.dtype), params)
    assert_close(updates, decayed, row.growth)
    assert step._cache_size() == 1


def test_what_is_callable_but_no_schedule_stays() -> None:
    def axes_of(params: Any) -> Any:
        axes = lambda p: curvax.MatrixAxes(0, 1) if p.ndim > 1 else None  # noqa: E731
        return jax.tree.map(axes, params)

    params = small_tree()
    injected = inject_hyperparams(curvax.shampoo, static_args="eps")(
        1,
        refresh=curvax.every(2),
        base=lambda rate: optax.sgd(rate, momentum=0.9),
        weight_decay=0,
        weight_decay_mask=lambda params: jax.tree.map(lambda p: p.ndim > 1, params),
        matrices=lambda path, leaf: leaf.ndim == 2,
        weight_dimension_numbers=axes_of,
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
    ("make", "expected"),
    [
        (
            lambda inject: inject(optax.adamw)(
                optax.linear_schedule(0.1, 0.0, 10),
                mask=lambda params: jax.tree.map(lambda p: p.ndim > 1, params),
                mu_dtype=jnp.float32,
            ),
            {"learning_rate", "b1", "b2", "eps", "eps_root", "weight_decay"},
        ),
        (
            lambda inject: inject(optax.sgd)(jnp.float32(0.1), momentum=0.9),
            {"learning_rate", "momentum"},
        ),
        (lambda inject: inject(optax.scale)(2.0), {"step_size"}),
        (
            lambda inject: inject(optax.adafactor)(0.1, min_dim_size_to_factor=2),
            {"learning_rate", "clipping_threshold", "decay_rate", "eps"},
        ),
        (lambda inject: inject(curvax.scale_by_muon)(), {"b1"}),
    ],
    ids=["adamw", "sgd", "scale", "adafactor", "scale_by_muon"],
)
def test_any_factory_can_be_injected(make: Any, expected: set[str]) -> None:
    params = {"kernel": np.ones((2, 3), np.float32)}
    optimizer = make(inject_hyperparams)
    (updates,), (state,) = run(optimizer, [params], params)
    assert set(state.hyperparams) == expected
    assert np.any(updates["kernel"])


# Convergence.

CONVERGED = 3e-3  # a tenth of what Optax allows in its tests of the same functions
LENGTH = 20_000
GOAL = {
    "parabola": {"kernel": np.array([[1.0, -1.0, 1.0]])},
    "rosenbrock": {"kernel": np.array([[1.0, 1.0]])},
    "matrix": {"kernel": np.array([[3.0, -2.0], [1.0, 4.0]])},
    "layers": {"kernel": np.arange(12.0).reshape(2, 2, 3) / 6 - 1, "bias": np.ones((2, 3))},
    "temperature": np.array(2.0),
}
START = {**optax.tree.zeros_like(GOAL), "parabola": {"kernel": np.array([[-1.0, 10.0, 1.0]])}}


def distance(x: Any) -> jax.Array:
    """Rosenbrock's function and the squared distance of everything else from its goal."""
    a, b = x["rosenbrock"]["kernel"][0]
    rest, goal = ({k: v for k, v in t.items() if k != "rosenbrock"} for t in (x, GOAL))
    squares = jax.tree.map(lambda u, v: jnp.sum((u - v) ** 2), rest, goal)
    return (1 - a) ** 2 + 100 * (b - a**2) ** 2 + sum(jax.tree.leaves(squares))


def on_kernels(f: Any, tree: Any) -> Any:
    return {
        k: {**v, "kernel": f(v["kernel"])} if isinstance(v, dict) else v for k, v in tree.items()
    }


def with_column(kernel: jax.Array, entry: float) -> jax.Array:
    return jnp.concatenate([kernel, jnp.full_like(kernel[..., :1], entry)], -1)


# What a kernel stands for, and a kernel that stands for it: a last column more, so that neither
# the mean of a row nor the norm matters.
REACHED: dict[str | None, Any] = {
    None: (lambda kernel: kernel, lambda values: values),
    "means": (lambda k: k[..., :-1] - k[..., -1:], lambda v: with_column(v, 0.0)),
    "norms": (lambda k: k[..., :-1] / k[..., -1:], lambda v: with_column(v, 1.0)),
}


@in_turns(2, of=17)
def test_known_minima_are_found(row: Row, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a parabola, of Rosenbrock's function, and of parabolas of matrices and tensors.

    The steps are so many that optimized code saves more time than it takes to compile.
    """
    monkeypatch.setattr(_bases, "DRAWN", 64)  # the same numbers, and none that are thrown away
    decay = optax.cosine_decay_schedule(1.0, LENGTH)
    optimizer = row.make(
        lambda count: MINIMA_RATES.get(row.name, 0.1) * decay(count),
        adam_learning_rate=lambda count: 0.1 * decay(count),
        weight_dimension_numbers={"layers/kernel": curvax.MatrixAxes(rows=1, columns=2)},
    )

    values, padded = REACHED[row.blind_to]

    def step(carry: Any, _: None) -> Any:
        params, state = carry
        gradient = jax.grad(lambda params: distance(on_kernels(values, params)))(params)
        updates, state = optimizer.update(gradient, state, params)
        return (optax.apply_updates(params, updates), state), None

    start = on_kernels(padded, jax.tree.map(jnp.float32, START))
    train = jax.jit(
        lambda carry: jax.lax.scan(step, carry, length=LENGTH)[0], compiler_options=OPTIMIZED
    )
    params, _ = train((start, optimizer.init(start)))
    found = on_kernels(values, params)
    for (path, x), goal in zip(
        jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(GOAL), strict=True
    ):
        error = float(np.abs(x - goal).max())
        assert error <= CONVERGED, f"{jax.tree_util.keystr(path)}: {error:.2g}"
    assert float(distance(START)) > 100
