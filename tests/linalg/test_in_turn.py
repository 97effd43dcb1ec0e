"""Products of stacks in programs for TPUs: loops over matrices, where these lie on one device."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close, normal_like
from jax.sharding import PartitionSpec

from curvax.transforms._side import Side
from curvax.transforms.linalg import _platforms, _polar, _products, _tiles

NUMBER, ROWS, COLUMNS = 24, 6, 16
STACK = jax.ShapeDtypeStruct((NUMBER, ROWS, COLUMNS), jnp.float32)
HIGHEST = jax.lax.Precision.HIGHEST
FUNCTIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "x xᵀ": lambda x: _products.gram_of(x, Side.LEFT, HIGHEST),
    "xᵀ x": lambda x: _products.gram_of(x, Side.RIGHT),
    "times": lambda x: _products.times(x, x.mT),
    "thin": lambda x: _products.thin_transposed_times(x[..., :2], x),
    "in full precision": lambda x: _tiles.product(x, x, transpose=True),
    "newton_schulz": lambda x: _polar.newton_schulz(x, "polar_express", 6),
}


def program(f: Callable[[jax.Array], jax.Array], platform: str) -> str:
    """What XLA takes, for a stack."""
    anew = jax.jit(lambda x: f(x))  # the number of devices is not part of a trace's key
    return anew.trace(STACK).lower(lowering_platforms=(platform,)).as_text()


def has_products_of_stacks(text: str) -> bool:
    """Whether a product has the axis of the stack."""
    return any(f"tensor<{NUMBER}x" in line for line in text.splitlines() if "dot_general" in line)


@pytest.fixture
def one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "device_count", lambda: 1)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_products_are_those_of_stacks(
    name: str, one_device: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    (x,) = normal_like(jax.random.key(0), [STACK])
    expected = jax.jit(FUNCTIONS[name])(x)
    monkeypatch.setattr(_platforms, "by_platform", lambda tpu, _, *args: tpu(*args))
    f = jax.jit(lambda x: FUNCTIONS[name](x))
    assert "while" in f.lower(x).as_text()
    assert_close(f(x), expected, eps=2e-6)
    shape = (2, NUMBER // 2)
    nested = f(x.reshape(*shape, ROWS, COLUMNS))
    assert_close(nested, np.asarray(expected).reshape(*shape, *expected.shape[1:]), eps=2e-6)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_programs_for_tpus_have_no_products_of_stacks(name: str, one_device: None) -> None:
    assert not has_products_of_stacks(program(FUNCTIONS[name], "tpu"))
    for platform in ("cpu", "cuda"):
        assert has_products_of_stacks(program(FUNCTIONS[name], platform))


def test_what_may_be_divided_among_devices_has_no_loop() -> None:
    """As a turn of a loop would send a matrix to all devices, though one has it."""
    f = FUNCTIONS["newton_schulz"]
    assert jax.device_count() > 1 and has_products_of_stacks(program(f, "tpu"))
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = PartitionSpec("data")
    within = functools.partial(jax.shard_map, mesh=mesh, in_specs=rows, out_specs=rows)
    text = program(within(f, check_vma=False), "tpu")
    assert "stablehlo.while" in text and not any(
        f"tensor<{NUMBER // 2}x" in line for line in text.splitlines() if "dot_general" in line
    )
