"""`skip_spikes`: what it skips, what it follows, and that every method trains on with it."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import curvax
from tests.cells import cells
from tests.helpers import normal_like, run_scanned, scanned
from tests.registry import REGISTRY, Row
from tests.shared.reports import table

PARAMS = {
    "kernel": np.ones((4, 6), np.float32),
    "layers": np.ones((2, 4, 6), np.float32),
    "bias": np.ones(6, np.float32),
}
SPEC = {"layers": curvax.MatrixAxes(rows=1, columns=2)}


def of_length(*lengths: float) -> list[Any]:
    """Gradients with these norms."""
    direction = np.ones((2, 2)) / 2
    return [np.float32(length * direction) for length in lengths]


def moved(gradients: list[Any], **settings: Any) -> list[bool]:
    updates, _ = run_scanned(curvax.skip_spikes(optax.sgd(1.0), **settings), gradients)
    return [bool(np.any(update)) for update in updates]


def test_only_gradients_far_above_the_running_norm_are_skipped() -> None:
    usual = of_length(*[1.0] * 5)
    found = moved([*usual, *of_length(9.0, 100.0, 1.0, 1e17, 1.0)], warmup_steps=5)
    assert found == [True] * 6 + [False, True, False, True]


def test_the_first_steps_are_never_spikes() -> None:
    assert all(moved(of_length(1.0, 100.0, 1e4, 1e6), warmup_steps=4))
    assert moved(of_length(1.0, 100.0), warmup_steps=1) == [True, False]


def decaying(decay: Any) -> Any:
    return curvax.skip_spikes(optax.sgd(1.0), decay=decay)


@pytest.mark.parametrize("factor", [30.0, 100.0, 1e6, 1e17])
@pytest.mark.parametrize("decay", [0.5, 0.9, 0.95])
def test_a_lasting_change_is_followed_after_as_many_steps_as_stated(
    factor: float, decay: float
) -> None:
    growth = decay + (1 - decay) * 10
    skipped = math.ceil(math.log(factor / 10) / math.log(growth))
    gradients = np.stack(of_length(*[1.0] * 40, *[factor] * 110))
    updates, _ = scanned(decaying)(gradients, decay)
    found = np.any(updates, axis=(1, 2))[40:]
    assert found.tolist() == [False] * skipped + [True] * (110 - skipped)


def test_zero_gradients_leave_the_running_norm() -> None:
    gradients = of_length(*[1.0] * 12, *[0.0] * 200, 1.0, 100.0)
    assert moved(gradients)[-2:] == [True, False]


def test_what_the_state_takes_in_is_bounded() -> None:
    """By `ratio` times the running norm: a momentum never sees the spike."""
    optimizer = curvax.skip_spikes(curvax.momentum(0.9, accumulate="sum"), warmup_steps=2)
    _, states = run_scanned(optimizer, of_length(1.0, 1.0, 1e10))
    expected = 0.9 * (1 + 0.9)
    assert np.allclose(np.linalg.norm(states[-1].inner.mu), expected, rtol=1e-6)
    assert np.allclose(states[-1].running_norm, 1 + (10 - 1) / 3)  # the third gradient's weight


def test_non_finite_gradients_are_left_to_the_guard() -> None:
    optimizer = curvax.skip_spikes(curvax.muon(0.1, weight_dimension_numbers=SPEC), warmup_steps=1)
    good = normal_like(jax.random.key(0), PARAMS)
    bad = good | {"kernel": good["kernel"] * np.nan, "bias": good["bias"] * np.inf}
    _, states = run_scanned(optimizer, [good, bad, good], PARAMS)
    rows = table(curvax.report(optimizer, PARAMS, states[-1]))
    assert [rows[name]["skipped"] for name in ("kernel", "bias")] == ["1", "1"]
    assert {row["spikes"] for row in rows.values()} == {"0"}
    assert np.isfinite(states[-1].running_norm).all()


@pytest.mark.parametrize("unit", ["parameter", "matrix"])
@pytest.mark.parametrize("before", [0, 1, 20])
def test_a_gradient_whose_squares_overflow_is_a_spike(before: int, unit: str) -> None:
    """Also among the first ones: Adam would divide by an infinite second moment for good."""
    optimizer = curvax.skip_spikes(optax.adam(1.0), unit=unit)
    gradients = of_length(*[1.0] * before, 1e30, *[1.0] * 4)
    updates, states = run_scanned(optimizer, gradients)
    assert [bool(np.any(update)) for update in updates] == [True] * before + [False] + [True] * 4
    assert np.isfinite(states[-1].running_norm).all()
    assert int(np.sum(states[-1].counts.of("spikes"))) == 1


@pytest.mark.parametrize("row", cells(REGISTRY, of=17))
def test_each_method_skips_the_spike_of_one_parameter(row: Row) -> None:
    """Around the full optimizer: the struck one stands still, others move as without the spike."""
    optimizer = curvax.skip_spikes(row.make(weight_dimension_numbers=SPEC), warmup_steps=3)
    gradients = [normal_like(jax.random.key(t), PARAMS) for t in range(6)]
    spiked = [dict(g) for g in gradients]
    spiked[4]["kernel"] = 1e3 * gradients[4]["kernel"]
    zeroed = [dict(g) for g in gradients]
    zeroed[4]["kernel"] = 0 * gradients[4]["kernel"]
    (updates, states), (expected, _) = (run_scanned(optimizer, g, PARAMS) for g in (spiked, zeroed))
    assert not np.any(updates[4]["kernel"])
    for t in range(6):
        for name in PARAMS:
            if (t, name) != (4, "kernel"):
                assert np.array_equal(updates[t][name], expected[t][name]), (t, name)
    rows = table(curvax.report(optimizer, PARAMS, states[-1]))
    assert {name: row["spikes"] for name, row in rows.items()} == {
        "kernel": "1",
        "layers": "0",
        "bias": "0",
    }


def test_each_matrix_of_a_stack_is_judged_by_itself() -> None:
    direction = curvax.skip_spikes(curvax.scale_by_muon(), warmup_steps=3, unit="matrix")
    optimizer = curvax.assemble(direction, 0.1, weight_dimension_numbers=SPEC)
    gradients = [normal_like(jax.random.key(t), PARAMS) for t in range(6)]
    gradients[4]["layers"] = gradients[4]["layers"] * np.array([1, 1e3]).reshape(2, 1, 1)
    updates, states = run_scanned(optimizer, gradients, PARAMS)
    assert np.any(updates[4]["layers"][0]) and not np.any(updates[4]["layers"][1])
    rows = table(curvax.report(optimizer, PARAMS, states[-1]))
    assert rows["layers"]["spikes"] == "0 to 1" and rows["kernel"]["spikes"] == "0"
    assert rows["bias"]["spikes"] == ""


def test_its_state_is_divided_and_portable() -> None:
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))

    def made(**given: Any) -> Any:
        direction = curvax.skip_spikes(curvax.scale_by_muon(), unit="matrix")
        return curvax.assemble(direction, 0.1, weight_dimension_numbers=SPEC, **given)

    params = jax.tree.map(jnp.asarray, PARAMS)
    many, one = made(mesh=mesh), made()
    portable = curvax.portable_state(many, params, jax.jit(many.init)(params))
    same = curvax.portable_state(one, params, jax.jit(one.init)(params))
    assert jax.tree.map(jnp.shape, portable) == jax.tree.map(jnp.shape, same)
    curvax.check_state(one, params, curvax.describe_state(many, params), portable=True)
