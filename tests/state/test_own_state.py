"""`update` and the tools name what is wrong with a state, and leave other errors alone."""

import re
from typing import Any

import flax.linen as nn
import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import curvax
from tests.cells import cells
from tests.helpers import rejection, zeros_like
from tests.registry import REGISTRY, Row
from tests.shared.wrong_calls import assert_refused, wrong_calls

KERNEL = {"kernel": np.ones((4, 6), np.float32)}
PARAMS = {"a": KERNEL | {"bias": np.ones(6, np.float32)}, "b": KERNEL}
ADVICE = ("curvax.check_state", "curvax.portable_state", "curvax.place_state")
SCHEDULE = optax.linear_schedule(0.1, 0.0, 10)
ADAM, ADAMW, MUON, SOAP = optax.adam(0.1), optax.adamw(0.1), curvax.muon(0.1), curvax.soap(0.1)
ADAMS, MUONS, SOAPS = (zeros_like(jax.eval_shape(x.init, PARAMS)) for x in (ADAM, MUON, SOAP))
ASGO = curvax.flat_state(curvax.asgo(0.1))
VIEW, OTHER_VIEW = (curvax.on_matrices(x) for x in (curvax.momentum(), curvax.scale_by_soap()))


def step(optimizer: Any, state: Any, gradients: Any = PARAMS, params: Any = PARAMS) -> Any:
    return jax.eval_shape(lambda state: optimizer.update(gradients, state, params), state)


def refused(*given: Any) -> str:
    return rejection(lambda: step(*given))


@pytest.mark.parametrize("row", cells(REGISTRY, of=3))
def test_the_state_of_another_optimizer_is_named(row: Row) -> None:
    # Eigen-Adam's update takes SOAP's state, and leaves one side of it alone.
    other = curvax.muon(0.1) if row.name in ("soap", "eigen_adam") else curvax.soap(0.1)
    message = refused(row.make(), zeros_like(jax.eval_shape(other.init, PARAMS)))
    assert "made by another optimizer" in message and "inner_states/matrices/" in message


def moved(before: Any, after: Any, by_flax: bool = False) -> None:
    """A step with the state of an optimizer that has changed.

    Flax puts arrays of a file into the optimizer's containers, and often does not compare.
    """
    state, own = (zeros_like(jax.eval_shape(x.init, PARAMS)) for x in (before, after))
    if by_flax:
        state = flax.serialization.from_state_dict(own, flax.serialization.to_state_dict(state))
    step(after, state)


TURNED = jax.tree.map(lambda x: x.T, PARAMS)
FEWER = {"a": PARAMS["a"]}
LONGER = {**PARAMS, "a": {**PARAMS["a"], "bias": np.ones(7, np.float32)}}
WITH_FOAM: dict[str, Any] = {"damping_mode": "absolute", "eps": 1e-9}


@wrong_calls("""
step(MUON, ADAMS) -> nothing at 4x6/counts, not int32[2, 3]
step(MUON, PARAMS) -> nothing at 4x6/counts, not int32[2, 3]
step(MUON, ()) -> nothing at 4x6/counts, not int32[2, 3]
step(VIEW, OTHER_VIEW.init(KERNEL), KERNEL, KERNEL) ->
    nothing at 4x6/inner/mu, not float32[1, 4, 6]
# Since the checkpoint.
moved(galore(0.1, rank=2), galore(0.1, rank=3), by_flax=True) ->
    float32[2, 4, 2] at 4x6/0/subspace/basis, not float32[2, 4, 3]
moved(soap(0.1, storage=quantized(min_elements=1)), SOAP, by_flax=True) ->
    nothing at 4x6/inner/left/statistic, not float32[2, 4, 4]
moved(shampoo(0.1), shampoo(0.1, refresh=policies.foam(), **WITH_FOAM), by_flax=True) ->
    nothing at 4x6/inner/direction/left/damping, not float32[2]
moved(foam(0.1), shampoo(0.1)) ->
    nothing at matrices/inner_state/1/0/trace/a/kernel, not float32[4, 6]
moved(shampoo(0.1), shampoo(0.1, method=eigenbases.stored_roots())) ->
    nothing at 4x6/inner/direction/left/inverse_root, not float32[2, 4, 4]
moved(MUON, muon(SCHEDULE)) -> nothing at matrices/inner_state/1/1/count, not int32[]
# Of gradients that have other shapes.
step(MUON, MUONS, TURNED, None) -> int32[2, 3] at 4x6/counts, not int32[1, 3]
step(MUON, MUONS, FEWER, None) -> int32[2, 3] at 4x6/counts, not int32[1, 3]
step(MUON, MUONS, FEWER, FEWER) -> int32[2, 3] at 4x6/counts, not int32[1, 3]
step(MUON, MUONS, LONGER, None) -> float32[6] at mu/a/bias, not float32[7]
""")
def test_the_place_of_a_difference_is_named(call: str, fragments: str) -> None:
    has, place, wants = re.split(" at |, not ", fragments)
    told = (f"state has {has} at '", f"{place}', where this optimizer has {wants} for these")
    assert_refused(call, " | ".join((*told, *ADVICE)), {**vars(curvax), **globals()})


@pytest.mark.parametrize("matrices", cells([2, 11], of=2))
@pytest.mark.parametrize("now", [4, None])
@pytest.mark.parametrize("method", [curvax.muon, curvax.soap])
def test_a_state_for_more_devices_is_named(method: Any, now: int | None, matrices: int) -> None:
    """Also where its arrays would fit into a step, which would then lose a part of them."""
    params = {f"{i}/kernel": np.ones((4, 6), np.float32) for i in range(matrices)}
    eight = jax.make_mesh((8,), ("x",))
    mesh = now and jax.make_mesh((now,), ("x",), devices=jax.devices()[:now])
    saved = zeros_like(jax.eval_shape(method(0.1, mesh=eight).init, params))
    message = refused(method(0.1, mesh=mesh), saved, params, params)
    assert "mesh" in message and all(name in message for name in ADVICE)


@pytest.mark.parametrize("row", cells(REGISTRY, of=3))
def test_arguments_in_another_order_or_of_another_tree_are_named(row: Row) -> None:
    """Those of `update`, and of the tools that take parameters and a state."""
    optimizer = row.make()
    state = zeros_like(jax.eval_shape(optimizer.init, PARAMS))
    message = refused(optimizer, PARAMS, PARAMS, state)
    assert message.startswith("params must") and "(gradients, state, params)" in message
    message = refused(optimizer, PARAMS, state, PARAMS)
    assert message.startswith("gradients must") and "(gradients, state, params)" in message
    for tool in (curvax.report, curvax.portable_state, curvax.place_state):
        with pytest.raises(ValueError, match=r"got an optimizer's state.*optimizer, params, state"):
            tool(optimizer, state, PARAMS)
    with pytest.raises(ValueError, match="params, .* got an optimizer's state"):
        curvax.summarize(optimizer, state)
    fewer = {"a": {"kernel": PARAMS["a"]["kernel"], "bias": None}}
    expected = "lack 'a/bias' and 1 more: gradients must have the tree of params."
    assert refused(optimizer, state, fewer, PARAMS) == f"gradients {expected}"
    assert refused(optimizer, state, PARAMS, fewer) == f"params {expected}"


def test_other_errors_stay_as_they_are() -> None:
    def failing(updates: Any, state: Any, params: Any = None) -> Any:
        raise FloatingPointError("not the state's fault")

    broken = optax.GradientTransformation(curvax.momentum().init, failing)
    for optimizer in (
        curvax.assemble(broken, 0.1),
        curvax.assemble(curvax.momentum(), 0.1, others=broken),
    ):
        state = optimizer.init(PARAMS)
        with pytest.raises(FloatingPointError, match="not the state's fault"):
            step(optimizer, state)
        # Without params the dtypes of a state cannot be told.
        narrow = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), PARAMS)
        with pytest.raises(FloatingPointError):
            step(optimizer, state, narrow, None)
        assert "float32" in refused(optimizer, state, narrow, narrow)


def test_a_step_that_works_never_compares(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = curvax.soap(0.1)
    state = zeros_like(jax.eval_shape(optimizer.init, PARAMS))
    traced: list[Any] = []
    plain = jax.eval_shape

    def counted(*args: Any) -> Any:
        traced.append(args)
        return plain(*args)

    monkeypatch.setattr(jax, "eval_shape", counted)
    jax.jit(optimizer.update).trace(PARAMS, state, PARAMS)
    assert not traced


NONE = {"a/kernel": None}
RENAMED = {"first": PARAMS["a"], "b": PARAMS["b"]}
HEAD = {"kernel": jax.ShapeDtypeStruct((32000, 768), jnp.float32)}
WIDE = {**PARAMS, "b": {"kernel": np.ones((4, 5), np.float32)}}
LOGICAL = {"kernel": nn.LogicallyPartitioned(KERNEL["kernel"], ("embed", None))}


@wrong_calls("""
step(SOAP, flax.serialization.to_state_dict(SOAPS)) ->
    restored without a target | curvax.place_state
step(MUON, MUONS, TURNED, None) -> update needs params
step(MUON, MUONS, TURNED) -> the gradient of 'a/kernel' must have the shape
check_state(muon(SCHEDULE), PARAMS, describe_state(MUON, PARAMS)) ->
    count', | a number into a schedule (or the reverse
check_state(MUON, PARAMS, describe_state(muon(SCHEDULE), PARAMS)) ->
    count', | a number into a schedule (or the reverse
report(MUON, PARAMS, racs(0.1).init(PARAMS)) -> another optimizer
state_of(MUON, PARAMS, MUONS, 'a/kernels') -> 'a/kernels' | a/bias, a/kernel, b/kernel
state_sharding(MUON, PARAMS, jax.make_mesh((1,), ('x',)), memory_kind='disk') ->
    memory_kind must be one of ['device' | got 'disk'
state_sharding(MUON, jax.make_mesh((1,), ('x',)), PARAMS) ->
    mesh must be a jax.sharding.Mesh, got <class 'dict'>
state_sharding(ADAM, LOGICAL, jax.make_mesh((2,), ('x',))) ->
    the axes | 'embed' | logical_to_mesh_sharding
quantize_state(ADAM, unsigned='nu') -> unsigned must be a collection of field names, got 'nu'
quantize_state(ADAM, where=3) ->
    where must be a predicate that is called with path and leaf | ; got 3
ASGO.update(PARAMS, MUONS, PARAMS) -> state has nothing at 'inner_states
ASGO.update(PARAMS, ASGO.init(PARAMS)) -> update needs params
place_state(SOAP, RENAMED, portable_state(SOAP, PARAMS, SOAPS)) ->
    portable has | /kernel
check_state(SOAP, RENAMED, describe_state(SOAP, PARAMS), portable=True) -> arrays differ
place_state(MUON, PARAMS, MUONS, description={'arrays': {}}) ->
    expected the result of curvax.describe_state
take_over(muon(0.1, accumulate='sum'), PARAMS, ADAMS) -> must be an average
take_over(MUON, PARAMS, optax.sgd(0.1).init(PARAMS)) ->
    expected that of an Optax optimizer with mu and count
take_over(ADAMW, PARAMS, flax.serialization.to_state_dict(ADAMW.init(PARAMS))) ->
    expected that of an Optax optimizer with mu and count
take_over(muon(0.1, weight_dimension_numbers=NONE), PARAMS, optax.contrib.muon(0.1).init(PARAMS)) ->
    no nu of 'a/kernel' | Treat parameters
# A wrapper keeps moments of another tree, or none that are arrays of the parameters' shapes.
take_over(MUON, PARAMS, optax.flatten(ADAM).init(PARAMS)) -> state has no | the inner optimizer
take_over(MUON, PARAMS, quantize_state(ADAM, where=lambda *_: True).init(PARAMS)) ->
    state has no | give the inner optimizer
take_over(MUON, WIDE, ADAMS) -> state has no mu of 'b/kernel' | give the inner optimizer
take_over(optax.flatten(ADAM), PARAMS, ADAMS) -> state has no | give the inner optimizer
# Of a state that would be too large.
jax.eval_shape(kl_shampoo(0.1, side='left', max_order=10_000).init, HEAD) ->
    max_order | (1, 32000, 768)
jax.eval_shape(kl_shampoo(0.1, max_order=700).init, HEAD) -> max_order | (1, 32000, 768)
""")
def test_what_a_step_or_a_tool_cannot_do_is_named(call: str, fragments: str) -> None:
    assert_refused(call, fragments, {**vars(curvax), **globals()})
