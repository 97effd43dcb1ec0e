"""Bad parameters and axes: each is a `ValueError` that says what is wrong and what is allowed.

A message names the parameter's path, what it is, and (part of) what is allowed. What no method
treats in its own way, some of them each go through, in turns. `test_bad_arguments.py` has the
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


@every_optimizer
def test_what_contradicts_itself_is_rejected(row: Row) -> None:
    """A rate for AdamW where there is none, and axes in two places."""
    rate = functools.partial(row.make, others=optax.sgd(0.1), adam_learning_rate=0.25)
    assert_names(rejection(rate), "adam_learning_rate | 0.25 | others=optax.adamw(")
    axes = {"dense/kernel": MatrixAxes(0, 1)}
    rule = curvax.MatrixRule(weight_dimension_numbers={"head/kernel": None})
    twice = functools.partial(row.make, matrices=rule, weight_dimension_numbers=axes)
    assert_names(rejection(twice), "weight_dimension_numbers | dense/kernel | once")


DENSE = {"dense": {"kernel": jnp.ones((4, 6)), "bias": jnp.ones(6)}}


def of_kernel(leaf: Any) -> Any:
    return {"dense": {"kernel": leaf, "bias": jnp.ones(6)}}


@wrong_calls("""
of_kernel(jnp.ones((4, 6), jnp.int32)) -> 'dense/kernel' | int32 | real floating
of_kernel(jnp.ones((4, 6), jnp.complex64)) ->
    'dense/kernel' | complex64 | real | optax.contrib.split_real_and_imaginary
of_kernel(jnp.ones((4, 6), 'float8_e4m3fn')) -> 'dense/kernel' | float8_e4m3fn | bfloat16 or float32
of_kernel(jnp.ones((4, 6), 'float4_e2m1fn')) -> 'dense/kernel' | float4_e2m1fn | bfloat16
of_kernel(jax.random.key(0)) -> 'dense/kernel' | key | real floating
of_kernel(jnp.ones((4, 0))) -> 'dense/kernel' | (4, 0) | at least 1
{'bias': jnp.ones(0), **DENSE} -> 'bias' | (0,) | at least 1
{'step': jnp.int32(0), **DENSE} -> 'step' | int32 | real floating
# Without a bias, which would say that all axes but its own are inputs.
{'dense': {'kernel': jnp.ones((2, 4, 6))}} ->
    'dense/kernel' | (2, 4, 6) | weight_dimension_numbers | MatrixAxes | batch
[{'kernel': jnp.ones((2, 4, 6))}] -> '0/kernel' | (2, 4, 6) | MatrixAxes
""")
@pytest.mark.parametrize("row", cells(REGISTRY, of=17))
def test_init_rejects_bad_parameters(row: Row, call: str, fragments: str) -> None:
    names = {**globals(), "init": row.make().init}
    assert_refused(f"init({call})", fragments, names)
    assert_refused(f"jax.eval_shape(init, {call})", fragments, names)


@wrong_calls("""
jnp.ones(3) -> 'w' | (3,) | rows, columns
jnp.ones((3, 3), jnp.int32) -> 'w' | int32 | real floating
jnp.ones((0, 3)) -> 'w' | (0, 3) | at least 1
""")
@every_optimizer
def test_directions_reject_what_is_not_a_matrix(row: Row, call: str, fragments: str) -> None:
    names = {**globals(), "init": row.make_direction().init}
    assert_refused(f"init({{'w': {call}}})", fragments, names)


@wrong_calls("""
MatrixAxes((0, 1), (1, 2)) -> (2, 4, 6) | rows=(0, 1) | columns=(1, 2) | twice
MatrixAxes(1, -2) -> rows=1 | columns=-2 | twice
MatrixAxes((0, 0), 1) -> rows=(0, 0) | twice
MatrixAxes(0, 3) -> no axis 3 | columns | -3 to 2
MatrixAxes(-4, 1) -> no axis -4 | rows | -3 to 2
MatrixAxes(1, 2, row_heads=3) -> 3 row_heads | 4 rows
MatrixAxes(1, 2, column_heads=4) -> 4 column_heads | 6 columns
MatrixAxes(1, 2, column_parts=(3, 2)) -> 6 columns | (3, 2) | are 5
optax.contrib.MuonDimensionNumbers(reduction_axis=5, output_axis=0) -> no axis 5 | -3 to 2
""")
@pytest.mark.parametrize("row", cells(REGISTRY, of=17))
def test_init_rejects_bad_axes(row: Row, call: str, fragments: str) -> None:
    names = {**globals(), "make": row.make, "params": of_kernel(jnp.ones((2, 4, 6)))}
    made = f"make(weight_dimension_numbers={{'dense/kernel': {call}}}).init(params)"
    assert_refused(made, f"'dense/kernel' | {fragments}", names)


@wrong_calls("""
{'dense/*': MatrixAxes(0, 1), 'head/*': None} -> 'head/*' | dense/kernel
{'dense': {'kernel': MatrixAxes(0, 1)}} -> structure | 'dense/bias'
{'dense': {'kernel': MatrixAxes(0, 1), 'bias': None, 'scale': None}} -> structure | 'dense/scale'
[MatrixAxes(0, 1), None] -> structure | dense/kernel
{'dense': {'kernel': (0, 1), 'bias': None}} -> (0, 1) at 'dense/kernel' | MatrixAxes(0, 1)
{'dense/kernel': [0, 1, 2]} -> [0, 1, 2] at 'dense/kernel' | or None.
{'dense/kernel': 'rows'} -> 'rows' | MatrixAxes
3 -> 3 | MatrixAxes
lambda params: 3 -> 3 | MatrixAxes
""")
@pytest.mark.parametrize("row", cells(REGISTRY, of=17))
def test_init_rejects_specifications_that_do_not_fit(row: Row, call: str, fragments: str) -> None:
    made = f"make(weight_dimension_numbers={call}).init(DENSE)"
    named = f"weight_dimension_numbers | {fragments}"
    assert_refused(made, named, {**globals(), "make": row.make})


HALVES = {"dense/kernel": MatrixAxes(0, 1, column_heads=2)}


@wrong_calls("""
racs(0.1, matrices=MatrixRule(["dense/*", "decoder/*"])).init(DENSE) ->
    matrices | 'decoder/*' | dense/kernel
racs(0.1, matrices=MatrixRule(output_layer=["dense/*", "decoder/*"])).init(DENSE) ->
    output_layer | 'decoder/*' | dense/kernel
on_matrices(orthogonalize()).init(DENSE) ->
    'dense/bias' | vector | matrices= | weight_dimension_numbers
asgo(0.1, matrices=MatrixRule(block_size=2, weight_dimension_numbers=HALVES)).init(DENSE) ->
    'dense/kernel' | block_size=2 | 3 columns | divides
muon(0.1).init({'a': {'b': jnp.ones((2, 2))}, 'a/b': jnp.ones((2, 2))}) -> 'a/b' | same path
""")
def test_init_rejects_what_does_not_fit_a_rule(call: str, fragments: str) -> None:
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
