"""The arguments that all optimizers share: which are matrices, and what the others get."""

import functools
import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import curvax
from curvax import MatrixRule, inject_hyperparams
from tests.cases import every_optimizer
from tests.cells import cells
from tests.helpers import assert_close, gradients_like, run
from tests.registry import REGISTRY, Row

SHARED = {
    "matrices": None,
    "weight_dimension_numbers": None,
    "mesh": None,
    "mesh_axis": None,
    "weight_decay": 0.0,
    "weight_decay_mask": None,
    "weights": None,
    "adam_learning_rate": None,
    "others": None,
}


OF_DIRECTIONS = {"accumulate", "bias_correction", "initial", "lagged", "skip_first"}
OF_DIRECTIONS |= {"update_eigenvalues", "warmup_steps"}
"""What only an ablation or a quirk of a script needs: arguments of `scale_by_<method>` alone."""


def defaults(factory: Any) -> dict[str, Any]:
    return {name: p.default for name, p in inspect.signature(factory).parameters.items()}


@every_optimizer
def test_every_optimizer_has_the_shared_arguments_in_one_order(row: Row) -> None:
    """They come last, after those that the direction has too, with the same defaults."""
    found = defaults(row.optimizer)
    matrices = "all" if row.everything else None
    assert list(found.items())[-len(SHARED) :] == list({**SHARED, "matrices": matrices}.items())
    own = list(found)[1 : -len(SHARED)]
    of_direction = defaults(row.direction)
    assert {*of_direction} <= {*own, "base", *OF_DIRECTIONS}
    assert of_direction == {**of_direction, **{x: found[x] for x in own if x in of_direction}}
    assert not {"head_wise", "output_layer", "block_size", "stack"} & {*own}


def test_assemble_has_them_too() -> None:
    assert list(defaults(curvax.assemble).items())[-len(SHARED) :] == list(SHARED.items())


# Defaults of the methods' own.


FOUND: dict[str, Any] = {
    "head/kernel": jax.ShapeDtypeStruct((4, 3), jnp.float32),
    "large/kernel": jax.ShapeDtypeStruct((1300, 4), jnp.float32),
    "bias": jax.ShapeDtypeStruct((3,), jnp.float32),
}
WHOLE, BLOCKS, NONE = "1 matrix", "2 matrices 650×4 (2×1 tiles)", "not a matrix"


@pytest.mark.parametrize(
    ("make", "matrices", "expected"),
    [
        (curvax.asgo, "left out", (WHOLE, WHOLE, WHOLE)),
        (curvax.asgo, None, (WHOLE, WHOLE, NONE)),
        (curvax.asgo, "large/*", (NONE, WHOLE, NONE)),
        (curvax.asgo, MatrixRule(None, block_size=700), (WHOLE, BLOCKS, NONE)),
        (curvax.racs, None, (NONE, WHOLE, NONE)),
        (curvax.racs, "all", (NONE, WHOLE, WHOLE)),
        (curvax.racs, MatrixRule(output_layer=None), (WHOLE, WHOLE, NONE)),
        (curvax.racs, MatrixRule(output_layer="large", block_size=700), (WHOLE, NONE, NONE)),
        (curvax.apollo, MatrixRule(block_size=700), (NONE, BLOCKS, NONE)),
        (curvax.shampoo, None, (WHOLE, BLOCKS, NONE)),
        (curvax.shampoo, MatrixRule(block_size=None), (WHOLE, WHOLE, NONE)),
        (curvax.shampoo, MatrixRule(output_layer="auto"), (NONE, BLOCKS, NONE)),
        (curvax.muon, MatrixRule("all", output_layer="auto"), (NONE, WHOLE, WHOLE)),
    ],
    ids=lambda x: getattr(x, "__name__", str(x).partition("(")[0]),
)
def test_what_a_rule_leaves_out_is_the_methods_own(
    make: Any, matrices: Any, expected: tuple[str, ...]
) -> None:
    """What it sets, it sets, to `None` as well."""
    optimizer = make(0.1) if matrices == "left out" else make(0.1, matrices=matrices)
    rows = curvax.summarize(optimizer, FOUND).splitlines()
    for name, begin in zip(FOUND, expected, strict=True):
        (cells,) = (row.split(" | ") for row in rows if row.startswith(f"| {name} |"))
        assert cells[2].startswith(begin), cells


def test_outside_of_a_method_what_a_rule_leaves_out_is_none() -> None:
    rule, plain = MatrixRule(), MatrixRule(None, output_layer=None, block_size=None)
    assert rule != plain
    assert rule(FOUND) == plain(FOUND)
    views = [curvax.on_matrices(curvax.momentum(), r) for r in (rule, plain)]
    wide = {"kernel": jax.ShapeDtypeStruct((4, 1300), jnp.float32)}
    left_out, given = (jax.eval_shape(view.init, wide) for view in views)
    assert left_out == given


@pytest.mark.parametrize("row", cells(REGISTRY, of=3))
def test_axes_beside_a_rule_are_axes_in_it(row: Row) -> None:
    axes = {"dense/kernel": curvax.MatrixAxes(1, 2)}
    params = {"dense/kernel": jax.ShapeDtypeStruct((2, 4, 6), jnp.float32)}
    beside = row.make(matrices=MatrixRule(stack=True), weight_dimension_numbers=axes)
    inside = row.make(matrices=MatrixRule(stack=True, weight_dimension_numbers=axes))
    assert curvax.summarize(beside, params) == curvax.summarize(inside, params)


# What is not a matrix.


VECTOR: dict[str, Any] = {"bias": jnp.array([1.0, -2.0, 0.5])}
TREE = {**VECTOR, "kernel": jnp.ones((4, 3))}


def without_matrices(optimizer: Any, steps: int = 3) -> Any:
    with pytest.warns(UserWarning, match="no parameter is a matrix.*bias: vector"):
        optimizer.init(VECTOR)
    return run(optimizer, gradients_like(VECTOR, steps), VECTOR)[0]


def _decayed(params: Any) -> Any:
    return jax.tree.map(lambda p: p.ndim == 1, params)


RATE, MOMENTUM = optax.linear_schedule(0.1, 0.0, 5), optax.sgd(0.5, momentum=0.9)
OF_OTHERS: dict[str, tuple[dict[str, Any], Any]] = {
    "defaults": ({}, optax.adam(0.1)),
    "rate": ({"adam_learning_rate": 0.01}, optax.adam(0.01)),
    "decay": (
        {"weight_decay": 0.2, "weight_decay_mask": _decayed},
        optax.adamw(0.1, weight_decay=0.2, mask=_decayed),
    ),
    "schedule": (
        {"adam_learning_rate": RATE, "weight_decay": 0.2},
        optax.adamw(RATE, weight_decay=0.2),
    ),
    "others": ({"others": MOMENTUM, "weight_decay": 0.2}, MOMENTUM),
}


@functools.cache
def theirs(given: str) -> Any:
    return run(OF_OTHERS[given][1], gradients_like(VECTOR, 3), VECTOR)[0]


@pytest.mark.filterwarnings("ignore:no parameter is a matrix")
@pytest.mark.parametrize(("row", "given"), cells(REGISTRY, OF_OTHERS, of=17))
def test_others_are_adamw_or_what_is_given(row: Row, given: str) -> None:
    """Bit for bit; with the matrices' learning rate and weight decay, if nothing else is said."""
    settings = {"matrices": None, **row.for_contract(), **OF_OTHERS[given][0]}
    ours = without_matrices(row.optimizer(0.1, **settings))
    jax.tree.map(np.testing.assert_array_equal, ours, theirs(given))


# Their learning rates in the state.


def rates(state: Any) -> dict[str, float]:
    """The learning rates in a state, by the place of each."""
    found = optax.tree.get_all_with_path(state, "learning_rate")
    return {jax.tree_util.keystr(path): float(x) for path, x in found if jnp.ndim(x) == 0}


def moved(optimizer: Any, state: Any) -> dict[str, float]:
    """How far an update moves each parameter."""
    updates, _ = jax.jit(optimizer.update)(TREE, state, TREE)
    return {name: float(jnp.linalg.norm(x)) for name, x in updates.items()}


def test_inject_hyperparams_has_the_rates_of_matrices_and_others() -> None:
    optimizer = inject_hyperparams(curvax.muon)(0.1, adam_learning_rate=1e-3)
    state: Any = optimizer.init(TREE)
    read = {n: float(state.hyperparams[n]) for n in ("learning_rate", "adam_learning_rate")}
    assert read == pytest.approx({"learning_rate": 0.1, "adam_learning_rate": 1e-3})
    before = moved(optimizer, state)
    state.hyperparams["adam_learning_rate"] = jnp.float32(2e-3)
    others = moved(optimizer, state)
    assert others == pytest.approx({**before, "bias": 2 * before["bias"]})
    state.hyperparams["learning_rate"] = jnp.float32(0.3)
    assert moved(optimizer, state) == pytest.approx({**others, "kernel": 3 * before["kernel"]})


def test_inject_hyperparams_in_others_has_their_rate() -> None:
    others = inject_hyperparams(optax.adamw)(1e-3, weight_decay=0.0)
    optimizer = inject_hyperparams(curvax.muon)(0.1, others=others)
    state = optimizer.init(TREE)
    (of_others,) = (place for place in rates(state) if "others" in place)
    (of_matrices,) = (place for place in rates(state) if "others" not in place)
    assert rates(state) == pytest.approx({of_matrices: 0.1, of_others: 1e-3})
    before = moved(optimizer, state)

    def with_rate(state: Any, place: str, rate: Any) -> Any:
        where = lambda path, _: jax.tree_util.keystr(path) == place  # noqa: E731
        return optax.tree.set(state, where, learning_rate=rate)

    state = with_rate(state, of_others, jnp.float32(2e-3))
    assert moved(optimizer, state) == pytest.approx({**before, "bias": 2 * before["bias"]})
    _, state = jax.jit(optimizer.update)(TREE, state, TREE)
    assert rates(state) == pytest.approx({of_matrices: 0.1, of_others: 2e-3})
    state = with_rate(state, of_matrices, jnp.float32(0.3))
    assert rates(state) == pytest.approx({of_matrices: 0.3, of_others: 2e-3})


@pytest.mark.parametrize("row", cells(REGISTRY, of=3))
def test_optaxs_inject_hyperparams_names_the_one_of_this_library(row: Row) -> None:
    """Where an integer, which Optax makes an array, has to be static."""
    whole = {"refresh", *row.static} - {"base"}
    injected = optax.inject_hyperparams(row.optimizer, static_args="base" if row.base else ())
    settings = {k: v for k, v in row.settings.items() if isinstance(v, (int, float, str))}
    optimizer = injected(0.1, **settings)
    if not row.static:
        assert jax.eval_shape(optimizer.init, TREE)
        return
    with pytest.raises(ValueError, match=r"curvax\.inject_hyperparams") as error:
        optimizer.init(TREE)
    named = str(error.value).partition(" ")[0]
    assert named in whole and f"add {named!r} to" in str(error.value)


def test_a_traced_weight_decay_beside_a_base_decays_matrices_and_others_alike() -> None:
    """As `jit`, `vmap` and schedules give it; a base may have a state and extra arguments."""
    zeros = jax.tree.map(np.zeros_like, TREE)
    of_parts = functools.partial(curvax.assemble, curvax.momentum())
    for make in (curvax.shampoo, functools.partial(of_parts, base=optax.adam)):

        def updates(decay: Any, rate: Any = 0.5, make: Any = make, **given: Any) -> Any:
            optimizer = make(rate, weight_decay=decay, **given)
            return optimizer.update(zeros, optimizer.init(TREE), TREE)[0]

        decays, rates = jnp.array([0.25, 0.25, 0.0]), jnp.array([0.5, 1.0, 0.5])
        found = jax.jit(jax.vmap(updates))(decays, rates)
        moved = jax.tree.map(lambda p: np.stack([-0.125 * p, -0.25 * p, 0 * p]), TREE)
        assert_close(found, moved)
        masked = jax.jit(
            functools.partial(updates, weight_decay_mask={"kernel": False, "bias": True})
        )
        assert_close(masked(0.25), {**zeros, "bias": -0.125 * TREE["bias"]})
        with pytest.raises(ValueError, match="weight_decay must be 0 with a base and a schedule"):
            jax.jit(functools.partial(updates, rate=lambda step: 0.5))(0.25)


@pytest.mark.parametrize("inject", [optax.inject_hyperparams, curvax.inject_hyperparams])
def test_a_scheduled_weight_decay_beside_a_base_decays_matrices_and_others_alike(inject) -> None:
    static = ("refresh", "root") if inject is optax.inject_hyperparams else ()
    later = lambda step: jnp.where(step < 1, 0.0, 0.25)  # noqa: E731
    optimizer = inject(curvax.shampoo, static_args=(*static, *(["base"] if static else ())))(
        0.5, weight_decay=later
    )
    zeros, state = jax.tree.map(np.zeros_like, TREE), optimizer.init(TREE)
    for step in range(2):
        updates, state = jax.jit(optimizer.update)(zeros, state, TREE)
        assert_close(updates, jax.tree.map(lambda p, step=step: -0.125 * step * p, TREE))


@pytest.mark.parametrize("row", cells(REGISTRY, of=9))
def test_a_python_float_is_an_array_without_axes(row: Row) -> None:
    params = {"kernel": np.ones((4, 6), np.float32), "temperature": 0.5}
    arrays = {**params, "temperature": np.float32(0.5)}
    optimizer = row.make()
    state = optimizer.init(params)
    expected = optimizer.init(arrays)
    assert jax.tree.map(jnp.result_type, state) == jax.tree.map(jnp.result_type, expected)
    assert curvax.summarize(optimizer, params) == curvax.summarize(optimizer, arrays)
    updates, after = jax.eval_shape(optimizer.update, params, state, params)
    assert (updates["temperature"].shape, updates["temperature"].dtype) == ((), jnp.float32)
    assert [(x.shape, x.dtype) for x in jax.tree.leaves(after)] == [
        (x.shape, x.dtype) for x in jax.tree.leaves(expected)
    ]
