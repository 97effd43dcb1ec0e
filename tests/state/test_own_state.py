"""`update` names what is wrong with a state that is not its own, and leaves other errors alone."""

import re
from typing import Any

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import curvax
from tests.cells import cells
from tests.helpers import zeros_like
from tests.registry import REGISTRY, Row

PARAMS = {
    "a": {"kernel": np.ones((4, 6), np.float32), "bias": np.ones(6, np.float32)},
    "b": {"kernel": np.ones((4, 6), np.float32)},
}
ADVICE = ("curvax.check_state", "curvax.portable_state", "curvax.place_state")


def step(optimizer: Any, state: Any, gradients: Any = PARAMS, params: Any = PARAMS) -> Any:
    return jax.eval_shape(lambda state: optimizer.update(gradients, state, params), state)


def refused(optimizer: Any, state: Any, gradients: Any = PARAMS, params: Any = PARAMS) -> str:
    """The message of a step, as a user sees it."""
    with pytest.raises(ValueError) as error:
        step(optimizer, state, gradients, params)
    return str(error.value)


def names_the_place(message: str, has: str, place: str, wants: str) -> bool:
    found = re.match(r"state has (.*) at '(.*)', where this optimizer has (.*) for these", message)
    assert found, message
    assert all(name in message for name in ADVICE), message
    return (has, wants) == (found[1], found[3]) and found[2].endswith(place)


@pytest.mark.parametrize("row", cells(REGISTRY, of=3))
def test_the_state_of_another_optimizer_is_named(row: Row) -> None:
    # Eigen-Adam's update takes SOAP's state, and leaves one side of it alone.
    other = curvax.muon(0.1) if row.name in ("soap", "eigen_adam") else curvax.soap(0.1)
    message = refused(row.make(), zeros_like(jax.eval_shape(other.init, PARAMS)))
    assert "made by another optimizer" in message and "inner_states/matrices/" in message


@pytest.mark.parametrize("state", [optax.adam(0.1).init(PARAMS), PARAMS, ()], ids=type)
def test_what_is_no_state_of_ours_is_named(state: Any) -> None:
    message = refused(curvax.muon(0.1), state)
    assert names_the_place(message, "nothing", "4x6/counts", "int32[2, 3]")


SCHEDULE = optax.linear_schedule(0.1, 0.0, 10)
CHANGED: dict[str, tuple[Any, Any, tuple[str, str, str]]] = {
    "rank": (
        curvax.galore(0.1, rank=2),
        curvax.galore(0.1, rank=3),
        ("float32[2, 4, 2]", "4x6/0/subspace/basis", "float32[2, 4, 3]"),
    ),
    "storage": (
        curvax.soap(0.1, storage=curvax.quantized(min_elements=1)),
        curvax.soap(0.1),
        ("nothing", "4x6/inner/left/statistic", "float32[2, 4, 4]"),
    ),
    "policy": (
        curvax.shampoo(0.1),
        curvax.shampoo(0.1, refresh=curvax.policies.foam(), damping_mode="absolute", eps=1e-9),
        ("nothing", "4x6/inner/direction/left/damping", "float32[2]"),
    ),
    "method": (
        curvax.foam(0.1),
        curvax.shampoo(0.1),
        ("nothing", "matrices/inner_state/1/0/trace/a/kernel", "float32[4, 6]"),
    ),
    "stored roots": (
        curvax.shampoo(0.1),
        curvax.shampoo(0.1, method=curvax.eigenbases.stored_roots()),
        ("nothing", "4x6/inner/direction/left/inverse_root", "float32[2, 4, 4]"),
    ),
    "schedule": (
        curvax.muon(0.1),
        curvax.muon(SCHEDULE),
        ("nothing", "matrices/inner_state/1/1/count", "int32[]"),
    ),
}


@pytest.mark.parametrize("case", CHANGED)
def test_what_has_changed_since_the_checkpoint_is_named(case: str) -> None:
    before, after, (has, place, wants) = CHANGED[case]
    state = zeros_like(jax.eval_shape(before.init, PARAMS))
    if case in ("rank", "storage", "policy"):
        # Flax puts arrays of the file into the optimizer's containers, and often does not compare.
        saved = flax.serialization.to_state_dict(state)
        state = flax.serialization.from_state_dict(
            zeros_like(jax.eval_shape(after.init, PARAMS)), saved
        )
    assert names_the_place(refused(after, state), has, place, wants)


def test_a_schedule_is_among_the_causes_before_restoring() -> None:
    plain, scheduled = curvax.muon(0.1), curvax.muon(SCHEDULE)
    for before, after in ((plain, scheduled), (scheduled, plain)):
        with pytest.raises(
            ValueError, match=r"count', .*a number into a schedule \(or the reverse"
        ):
            curvax.check_state(after, PARAMS, curvax.describe_state(before, PARAMS))


def test_a_checkpoint_restored_without_a_target_is_named() -> None:
    optimizer = curvax.soap(0.1)
    state = zeros_like(jax.eval_shape(optimizer.init, PARAMS))
    state = flax.serialization.to_state_dict(state)
    message = refused(optimizer, state)
    assert "restored without a target" in message and "curvax.place_state" in message


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


def test_gradients_of_other_shapes_are_named_without_params() -> None:
    optimizer = curvax.muon(0.1)
    state = optimizer.init(PARAMS)
    transposed = jax.tree.map(lambda x: x.T, PARAMS)
    message = refused(optimizer, state, transposed, None)
    assert names_the_place(message, "int32[2, 3]", "4x6/counts", "int32[1, 3]")
    assert "update needs params" in message
    fewer = {"a": PARAMS["a"]}
    for params in (None, fewer):
        message = refused(optimizer, state, fewer, params)
        assert names_the_place(message, "int32[2, 3]", "4x6/counts", "int32[1, 3]")
    longer = {**PARAMS, "a": {**PARAMS["a"], "bias": np.ones(7, np.float32)}}
    message = refused(optimizer, state, longer, None)
    assert names_the_place(message, "float32[6]", "mu/a/bias", "float32[7]")


@pytest.mark.parametrize("row", cells(REGISTRY, of=3))
def test_arguments_in_another_order_or_of_another_tree_are_named(row: Row) -> None:
    """Those of `update`, and of the tools that take parameters and a state."""
    optimizer = row.make()
    state = zeros_like(jax.eval_shape(optimizer.init, PARAMS))
    message = refused(optimizer, PARAMS, gradients=PARAMS, params=state)
    assert message.startswith("params must") and "(gradients, state, params)" in message
    message = refused(optimizer, PARAMS, gradients=state, params=PARAMS)
    assert message.startswith("gradients must") and "(gradients, state, params)" in message
    for tool in (curvax.report, curvax.portable_state, curvax.place_state):
        with pytest.raises(ValueError, match=r"got an optimizer's state.*optimizer, params, state"):
            tool(optimizer, state, PARAMS)
    with pytest.raises(ValueError, match="params, .* got an optimizer's state"):
        curvax.summarize(optimizer, state)
    with pytest.raises(ValueError, match=r"^mesh must be a jax.sharding.Mesh, got <class 'dict'>"):
        curvax.state_sharding(optimizer, jax.make_mesh((1,), ("x",)), PARAMS)  # pyright: ignore
    fewer = {"a": {"kernel": PARAMS["a"]["kernel"], "bias": None}}
    expected = "lack 'a/bias' and 1 more: gradients must have the tree of params."
    assert refused(optimizer, state, fewer, PARAMS) == f"gradients {expected}"
    assert refused(optimizer, state, PARAMS, fewer) == f"params {expected}"


def test_a_view_alone_names_it_too() -> None:
    params = {"kernel": np.ones((4, 6), np.float32)}
    view, other = (curvax.on_matrices(x) for x in (curvax.momentum(), curvax.scale_by_soap()))
    message = refused(view, other.init(params), params, params)
    assert names_the_place(message, "nothing", "4x6/inner/mu", "float32[1, 4, 6]")


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
    optimizer = curvax.muon(0.1)
    with pytest.raises(ValueError, match=r"the gradient of 'a/kernel' must have the shape"):
        step(optimizer, optimizer.init(PARAMS), jax.tree.map(lambda x: x.T, PARAMS))


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
