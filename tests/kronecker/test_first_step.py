"""SOAP's first direction is the polar factor, times √(1 - b2), however it is computed."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import curvax
from tests.cells import cells
from tests.shared.meshes import explicit_by_default, mesh_of

ORDER, NUMBER, CLOSE = 32, 12, 0.01
AXES: dict[str, Any] = {"weight_dimension_numbers": {"w": curvax.MatrixAxes(rows=1, columns=2)}}


def gradients() -> np.ndarray:
    normal = np.random.default_rng(0).standard_normal((NUMBER, ORDER, ORDER))
    return normal.astype(np.float32)


@functools.cache
def polar_factors() -> np.ndarray:
    u, _, v = np.linalg.svd(gradients().astype(float))
    return u @ v


def assert_polar(direction: Any, desired: np.ndarray | None = None) -> None:
    desired = 0.05**0.5 * (polar_factors() if desired is None else desired)
    error = np.linalg.norm(np.asarray(direction, float) - desired, axis=(1, 2))
    assert (error < CLOSE * np.linalg.norm(desired, axis=(1, 2))).all()


def first(optimizer: Any, gradient: Any) -> Any:
    params = jax.tree.map(jnp.zeros_like, gradient)
    updates, _ = jax.jit(optimizer.update)(gradient, optimizer.init(params), params)
    return updates


def test_no_rounding_noise_is_raised_to_the_length_of_an_entry() -> None:
    soap = curvax.scale_by_soap()
    assert_polar(first(soap, jnp.asarray(gradients())))
    order = np.random.default_rng(1).permutation(ORDER)
    permuted = first(soap, jnp.asarray(gradients()[:, order]))
    assert_polar(permuted, polar_factors()[:, order])


@explicit_by_default
@pytest.mark.parametrize("spec", cells([P("x"), P(None, "x")], of=2), ids=str)
def test_with_gradients_on_a_mesh(spec: P, kind: str) -> None:
    mesh = mesh_of(kind)
    gradient = {"w": jax.device_put(gradients(), NamedSharding(mesh, spec))}
    with jax.set_mesh(mesh):
        assert_polar(-first(curvax.soap(1.0, **AXES), gradient)["w"])


@pytest.mark.parametrize("way", ["with injected numbers", "distributed"])
def test_in_another_way(way: str) -> None:
    injected = curvax.inject_hyperparams(curvax.soap)(1.0, **AXES)
    distributed = curvax.soap(1.0, mesh=mesh_of("auto"), **AXES)
    optimizer = distributed if way == "distributed" else injected
    assert_polar(-first(optimizer, {"w": jnp.asarray(gradients())})["w"])
