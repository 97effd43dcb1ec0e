"""Bad parameters and axes: each is a `ValueError` that says what is wrong and what is allowed.

A message names the parameter's path, what it is, and (part of) what is allowed. No method treats
them in its own way: every one refuses some, and one refuses all. `test_bad_arguments.py` has the
arguments of factories.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import curvax
from curvax import MatrixAxes
from tests.cases import every_optimizer
from tests.cells import cells
from tests.helpers import assert_names, rejection
from tests.registry import REGISTRY, Row
from tests.shared.wrong_calls import assert_refused, wrong_calls

DENSE = {"dense": {"kernel": jnp.ones((4, 6)), "bias": jnp.ones(6)}}
HALVES = {"dense/kernel": MatrixAxes(0, 1, column_heads=2)}


def init(kernel: Any, **settings: Any) -> Any:
    params = {"dense": {"kernel": kernel, "bias": jnp.ones(6)}}
    return jax.eval_shape(curvax.muon(0.1, **settings).init, params)


def init_all(params: Any) -> Any:
    return curvax.muon(0.1).init(params)


def axes(axes: Any) -> Any:
    return init(jnp.ones((2, 4, 6)), weight_dimension_numbers={"dense/kernel": axes})


def numbers(axes: Any) -> Any:
    return curvax.muon(0.1, weight_dimension_numbers=axes).init(DENSE)


@every_optimizer
def test_every_method_refuses_what_is_wrong_or_contradicts_itself(row: Row) -> None:
    """A rate for AdamW where there is none; axes in two places, twice, or of no parameter."""
    rate = functools.partial(row.make, others=optax.sgd(0.1), adam_learning_rate=0.25)
    assert_names(rejection(rate), "adam_learning_rate | 0.25 | others=optax.adamw(")
    given: dict[str, Any] = {"dense/kernel": MatrixAxes(0, 1)}
    rule = curvax.MatrixRule(weight_dimension_numbers={"head/kernel": None})
    twice = functools.partial(row.make, matrices=rule, weight_dimension_numbers=given)
    assert_names(rejection(twice), "weight_dimension_numbers | dense/kernel | once")
    names = {**globals(), "make": row.make, "init": row.make_direction().init}
    for call, fragments in (
        ("make().init({'k': jnp.ones((4, 6), 'int32')})", "'k' | int32 | real floating"),
        ("make().init({'k': jnp.ones((2, 4, 6))})", "'k' | (2, 4, 6) | MatrixAxes | batch"),
        ("make(weight_dimension_numbers={'*': MatrixAxes(1, -1)}).init(DENSE)", "-1 | twice"),
        ("make(weight_dimension_numbers={'head/*': None}).init(DENSE)", "'head/*' | dense/kernel"),
        ("init({'w': jnp.ones(3)})", "'w' | (3,) | rows, columns"),
        ("init({'w': jnp.ones((3, 3), jnp.int32)})", "'w' | int32 | real floating"),
        ("init({'w': jnp.ones((0, 3))})", "'w' | (0, 3) | at least 1"),
    ):
        if not (row.everything and "batch" in fragments):
            assert_refused(call, fragments, names)


@wrong_calls("""
# Parameters.
init(jnp.ones((4, 6), jnp.int32)) -> 'dense/kernel' | int32 | real floating
init(jnp.ones((4, 6), jnp.complex64)) ->
    'dense/kernel' | complex64 | real | optax.contrib.split_real_and_imaginary
init(jnp.ones((4, 6), 'float8_e4m3fn')) -> 'dense/kernel' | float8_e4m3fn | bfloat16 or float32
init(jnp.ones((4, 6), 'float4_e2m1fn')) -> 'dense/kernel' | float4_e2m1fn | bfloat16
init(jax.random.key(0)) -> 'dense/kernel' | key | real floating
init(jnp.ones((4, 0))) -> 'dense/kernel' | (4, 0) | at least 1
init_all({'bias': jnp.ones(0), **DENSE}) -> 'bias' | (0,) | at least 1
init_all({'step': jnp.int32(0), **DENSE}) -> 'step' | int32 | real floating
init_all({'a': {'b': jnp.ones((2, 2))}, 'a/b': jnp.ones((2, 2))}) -> 'a/b' | same path
# Without a bias, which would say that all axes but its own are inputs.
init_all({'dense': {'kernel': jnp.ones((2, 4, 6))}}) ->
    'dense/kernel' | (2, 4, 6) | weight_dimension_numbers | MatrixAxes | batch
init_all([{'kernel': jnp.ones((2, 4, 6))}]) -> '0/kernel' | (2, 4, 6) | MatrixAxes
# Axes.
axes(MatrixAxes((0, 1), (1, 2))) ->
    'dense/kernel' | (2, 4, 6) | rows=(0, 1) | columns=(1, 2) | twice
axes(MatrixAxes(1, -2)) -> 'dense/kernel' | rows=1 | columns=-2 | twice
axes(MatrixAxes((0, 0), 1)) -> 'dense/kernel' | rows=(0, 0) | twice
axes(MatrixAxes(0, 3)) -> 'dense/kernel' | no axis 3 | columns | -3 to 2
axes(MatrixAxes(-4, 1)) -> 'dense/kernel' | no axis -4 | rows | -3 to 2
axes(MatrixAxes(1, 2, row_heads=3)) -> 'dense/kernel' | 3 row_heads | 4 rows
axes(MatrixAxes(1, 2, column_heads=4)) -> 'dense/kernel' | 4 column_heads | 6 columns
axes(MatrixAxes(1, 2, column_parts=(3, 2))) -> 'dense/kernel' | 6 columns | (3, 2) | are 5
axes(optax.contrib.MuonDimensionNumbers(reduction_axis=5, output_axis=0)) ->
    'dense/kernel' | no axis 5 | -3 to 2
# Specifications that do not fit.
numbers({'dense/*': MatrixAxes(0, 1), 'head/*': None}) ->
    weight_dimension_numbers | 'head/*' | dense/kernel
numbers({'dense': {'kernel': MatrixAxes(0, 1)}}) ->
    weight_dimension_numbers | structure | 'dense/bias'
numbers({'dense': {'kernel': MatrixAxes(0, 1), 'bias': None, 'scale': None}}) ->
    weight_dimension_numbers | structure | 'dense/scale'
numbers([MatrixAxes(0, 1), None]) -> weight_dimension_numbers | structure | dense/kernel
numbers({'dense': {'kernel': (0, 1), 'bias': None}}) ->
    weight_dimension_numbers | (0, 1) at 'dense/kernel' | MatrixAxes(0, 1)
numbers({'dense/kernel': [0, 1, 2]}) ->
    weight_dimension_numbers | [0, 1, 2] at 'dense/kernel' | or None.
numbers({'dense/kernel': 'rows'}) -> weight_dimension_numbers | 'rows' | MatrixAxes
numbers(3) -> weight_dimension_numbers | 3 | MatrixAxes
numbers(lambda params: 3) -> weight_dimension_numbers | 3 | MatrixAxes
# Rules that do not fit.
racs(0.1, matrices=MatrixRule(["dense/*", "decoder/*"])).init(DENSE) ->
    matrices | 'decoder/*' | dense/kernel
racs(0.1, matrices=MatrixRule(output_layer=["dense/*", "decoder/*"])).init(DENSE) ->
    output_layer | 'decoder/*' | dense/kernel
on_matrices(orthogonalize()).init(DENSE) ->
    'dense/bias' | vector | matrices= | weight_dimension_numbers
asgo(0.1, matrices=MatrixRule(block_size=2, weight_dimension_numbers=HALVES)).init(DENSE) ->
    'dense/kernel' | block_size=2 | 3 columns | divides
""")
def test_init_names_what_is_wrong(call: str, fragments: str) -> None:
    assert_refused(call, fragments, {**vars(curvax), **globals()})


@pytest.mark.parametrize("row", cells(REGISTRY, of=3))
def test_update_says_that_weight_decay_needs_params(row: Row) -> None:
    optimizer = row.make(weight_decay=0.1)
    state = jax.eval_shape(optimizer.init, DENSE)
    message = rejection(lambda: jax.eval_shape(optimizer.update, DENSE, state))
    assert message == "update needs params: optimizer.update(gradients, state, params)."


@pytest.mark.parametrize("row", cells(REGISTRY, of=3))
def test_injected_hyperparameters_are_validated_where_they_are_numbers(row: Row) -> None:
    """And no tracers, with which a factory is called in a step."""
    inject = optax.inject_hyperparams(row.optimizer, static_args=row.static)
    optimizer = inject(0.1, weight_decay=-1.0, **row.settings)
    assert_names(rejection(lambda: optimizer.init(DENSE)), "weight_decay | -1")
    valid = inject(0.1, weight_decay=0.1, adam_learning_rate=0.5, **row.settings)
    updates, _ = jax.eval_shape(valid.update, DENSE, jax.eval_shape(valid.init, DENSE), DENSE)
    assert jax.tree.map(jnp.shape, updates) == jax.tree.map(jnp.shape, DENSE)
