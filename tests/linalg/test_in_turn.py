"""Products of stacks in programs for TPUs: loops over matrices, where these lie on one device."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import curvax
from curvax.transforms._side import Side
from curvax.transforms.linalg import _by_products, _loops, _polar, _products
from curvax.transforms.refresh import _due
from tests.cells import cells
from tests.helpers import assert_close, normal_like
from tests.shared.programs import text_for
from tests.tpu_forms import loops_of

NUMBER, ROWS, COLUMNS = 24, 6, 16
STACK = jax.ShapeDtypeStruct((NUMBER, ROWS, COLUMNS), jnp.float32)
SOAP = curvax.scale_by_soap(refresh=curvax.every(7, first=False))
FUNCTIONS: dict[str, Callable[[jax.Array], Any]] = {
    "x xᵀ": lambda x: _loops.in_turn(functools.partial(_products.gram, side=Side.LEFT), x),
    "xᵀ x": lambda x: _loops.in_turn(functools.partial(_products.gram, side=Side.RIGHT), x),
    "statistics and bases": lambda x: SOAP.update(x, SOAP.init(x))[0],
    "in full precision": lambda x: _products.exact_product(x, x, transpose_a=True),
    "newton_schulz": lambda x: _polar.newton_schulz(x, "polar_express", 6),
    "of range": lambda x: _by_products.polar_by_products(x, size=COLUMNS),
}


def programs(f: Callable[[jax.Array], jax.Array]) -> dict[str, str]:
    """What XLA takes, for a stack, on each platform."""
    return {x: text_for(x, f, STACK) for x in ("cpu", "cuda", "tpu")}


def has_products_of_stacks(text: str) -> bool:
    return any(f"tensor<{NUMBER}x" in line for line in text.splitlines() if "dot_general" in line)


@pytest.fixture
def one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "device_count", lambda: 1)


@pytest.mark.parametrize("name", cells(FUNCTIONS, of=2))
def test_tpus_have_loops_that_are_products_of_stacks(
    name: str, one_device: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for platform, text in programs(FUNCTIONS[name]).items():
        assert has_products_of_stacks(text) == (platform != "tpu")
    (x,) = normal_like(jax.random.key(0), [STACK])
    expected = jax.jit(FUNCTIONS[name])(x)
    loops_of("tpu", monkeypatch)
    f = jax.jit(lambda x: FUNCTIONS[name](x))
    assert "while" in f.lower(x).as_text()
    assert_close(f(x), expected, eps=2e-6)
    shape = (2, NUMBER // 2)
    nested = f(x.reshape(*shape, ROWS, COLUMNS))
    assert_close(nested, np.asarray(expected).reshape(*shape, *expected.shape[1:]), eps=2e-6)


@pytest.mark.parametrize("side", ["left", "right"])
def test_projections_are_products_of_stacks(
    side: str, one_device: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between refreshes, which have products of stacks on GPUs too."""
    monkeypatch.setattr(_due, "visit_due", lambda visit, batch, *rest: batch)
    galore = curvax.scale_by_galore(rank=2, refresh=10, side=side)

    def directions(x: jax.Array) -> Any:
        return galore.update({"x": x}, galore.init({"x": x}))[0]["x"]

    for platform, text in programs(directions).items():
        products = [x for x in text.splitlines() if "dot_general" in x and f"tensor<{NUMBER}x" in x]
        assert len(products) == 2, platform  # to the subspaces, and back


def test_what_may_be_divided_among_devices_has_no_loop() -> None:
    """As a turn of a loop would send a matrix to all devices, though one has it."""
    f = FUNCTIONS["newton_schulz"]
    assert jax.device_count() > 1 and has_products_of_stacks(programs(f)["tpu"])
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = PartitionSpec("data")
    within = functools.partial(jax.shard_map, mesh=mesh, in_specs=rows, out_specs=rows)
    text = programs(within(f, check_vma=False))["tpu"]
    assert "stablehlo.while" in text and not any(
        f"tensor<{NUMBER // 2}x" in line for line in text.splitlines() if "dot_general" in line
    )
