"""Schedules in the place of decay rates and of weight decay, against numbers that are injected."""

import inspect
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import curvax
from tests.cells import cells
from tests.helpers import assert_close, run_scanned
from tests.registry import NAMED, REGISTRY, Row
from tests.shared.meshes import ONE_SHAPE, as_on_one_device, given, mesh_of

RATES = {f"b{i}": optax.linear_schedule(0.3 + 0.1 * i, 0.9, 3) for i in (1, 2, 3)}
FALLING = optax.linear_schedule(0.4, 0.0, 3)


def scheduled(row: Row) -> dict[str, Any]:
    """A method's settings with all decay rates, and the weight decay, as schedules."""
    names = inspect.signature(row.optimizer).parameters
    rates = {name: rate for name, rate in RATES.items() if name in names}
    own = row.for_contract() | rates
    if "base" not in names:
        own["weight_decay"] = FALLING
    return own


SCHEDULED = cells(REGISTRY, of=17)


@pytest.mark.parametrize("row", SCHEDULED)
def test_schedules_are_the_numbers_of_their_steps(row: Row) -> None:
    params, gradients = given(ONE_SHAPE | {"a/bias": (6,)}, 4)
    own = scheduled(row)
    updates, _ = run_scanned(row.optimizer(0.1, **own), gradients, params)
    injected = curvax.inject_hyperparams(row.optimizer)(0.1, **own)
    assert_close(updates, run_scanned(injected, gradients, params)[0], row.growth)
    if row is SCHEDULED[0]:  # the negative control
        constant = row.optimizer(0.1, **row.for_contract())
        with pytest.raises(AssertionError):
            assert_close(updates, run_scanned(constant, gradients, params)[0], row.growth)


@pytest.mark.parametrize("name", cells(["muon", "soap", "osgdm"], of=3))
def test_meshes_with_explicit_axes_take_schedules(name: str) -> None:
    row = NAMED[name]
    as_on_one_device(
        lambda **mesh: row.optimizer(0.1, **scheduled(row), **mesh),
        *given(ONE_SHAPE),
        mesh_of("explicit"),
        row.growth,
    )


def test_a_schedule_under_a_schedule_of_the_learning_rate() -> None:
    """Of `osgdm`, whose weight decay is of its own momentum."""
    params, gradients = {"kernel": jnp.ones((2, 3))}, [{"kernel": jnp.zeros((2, 3))}] * 3
    rate = lambda step: 0.1 * (step + 1)  # noqa: E731
    decay = lambda step: 0.5 - 0.1 * step  # noqa: E731
    optimizer = curvax.osgdm(rate, weight_decay=decay)
    updates, _ = run_scanned(optimizer, gradients, params)
    for step, update in enumerate(updates):
        assert_close(update["kernel"], -rate(step) * decay(step) * params["kernel"], 4)


def test_a_number_leaves_the_state_as_it_is() -> None:
    params = {"kernel": jnp.ones((2, 3))}
    plain = jax.eval_shape(curvax.muon(0.1).init, params)
    assert jax.eval_shape(curvax.muon(0.1, b1=0.5, weight_decay=0.1).init, params) == plain
    with_count = jax.eval_shape(curvax.muon(0.1, b1=FALLING).init, params)
    assert jax.tree.structure(with_count) != jax.tree.structure(plain)
