"""One matrix on eight devices: the polar factor of one device, and an eighth of the FLOPs each."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Jaxpr, jaxprs_in_params
from jax.sharding import PartitionSpec as P

from curvax.transforms.linalg import _by_products, _polar
from tests.cells import cells
from tests.helpers import assert_close
from tests.shared.meshes import mesh_of

DEVICES = 8
FUNCTIONS: dict[str, Callable[..., jax.Array]] = {
    "quintic": _polar.newton_schulz,
    "aol": functools.partial(_polar.newton_schulz, norm="aol", coefficients="turbo_muon", steps=4),
    "polar_express": functools.partial(
        _polar.newton_schulz, norm="gram", coefficients="polar_express", steps=7
    ),
    "of range": lambda x, axis_name=None: _by_products.polar_by_products(x, axis_name, 64),
    "by products": _by_products.polar_by_products,
}


def shared(f: Callable[..., Any], *axes: str, mesh: Any = None) -> Callable[[jax.Array], jax.Array]:
    """`f` on the same matrix on all devices; their results, one beside the other."""
    mesh = mesh or mesh_of("auto", DEVICES)
    axis_name = axes[0] if len(axes) == 1 else axes
    own = lambda x: f(x, axis_name=axis_name)[None]  # noqa: E731
    return jax.shard_map(own, mesh=mesh, in_specs=P(), out_specs=P(axes), check_vma=False)


def flops(f: Callable[..., Any], *shape: int) -> int:
    """Of the products in a device's program; the body of a loop counts once."""

    def of(jaxpr: Jaxpr) -> int:
        found = 0
        for equation in jaxpr.eqns:
            if equation.primitive.name == "dot_general":
                ((summed, _), _) = equation.params["dimension_numbers"]
                depth = math.prod(equation.invars[0].aval.shape[i] for i in summed)
                found += 2 * depth * math.prod(equation.outvars[0].aval.shape)
            found += sum(of(part) for part in jaxprs_in_params(equation.params))
        return found

    return of(jax.make_jaxpr(f)(jax.ShapeDtypeStruct(shape, jnp.float32)).jaxpr)


def spread_spectrum(*shape: int) -> np.ndarray:
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    return x + 3 * np.ones(shape, np.float32)


@pytest.mark.parametrize("name", cells(FUNCTIONS, of=3))
@pytest.mark.parametrize("shape", cells([(40, 16), (16, 64), (2, 12, 24), (9, 21)], of=3), ids=str)
def test_the_result_is_that_of_one_device_and_on_all(name: str, shape: tuple[int, ...]) -> None:
    """Also where the devices divide one side only, 12 × 24, or neither, 9 × 21."""
    x, f = spread_spectrum(*shape), FUNCTIONS[name]
    found = np.asarray(jax.jit(shared(f, "x"))(x))
    assert len(found) == DEVICES and all(np.array_equal(found[0], y) for y in found)
    assert_close(found[0], jax.jit(f)(x), 256)


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("shape", cells([(16, 64), (32, 40), (64, 16)], of=2), ids=str)
def test_each_device_has_its_part_of_all_products(name: str, shape: tuple[int, ...]) -> None:
    assert DEVICES * flops(shared(FUNCTIONS[name], "x"), *shape) == flops(FUNCTIONS[name], *shape)
    if name == "quintic":  # sides that devices do not divide are not split
        whole, split = (flops(f, 12, 24) for f in (FUNCTIONS[name], shared(FUNCTIONS[name], "x")))
        assert whole / DEVICES < split < whole  # products of squares in full


def test_the_devices_of_several_axes_share_a_matrix() -> None:
    mesh = mesh_of("auto", 2, 4)
    x, f = spread_spectrum(16, 64), FUNCTIONS["quintic"]
    every = shared(f, "x", "y", mesh=mesh)
    assert DEVICES * flops(every, 16, 64) == flops(f, 16, 64)
    assert_close(np.asarray(jax.jit(every)(x))[0], jax.jit(f)(x), 256)
    assert 4 * flops(shared(f, "y", mesh=mesh), 16, 64) == flops(f, 16, 64)
