"""KL-Shampoo from roots, in 8 bits, on a mesh: the numbers of one device."""

from typing import Any

import pytest
from jax.sharding import PartitionSpec as P

import curvax
from tests.helpers import assert_close, run_scanned
from tests.shared.meshes import divided_arrays, given, mesh_of, on, steps

SHAPES = {"layers/kernel": (4, 8, 16), "wide/kernel": (8, 16), "wide/bias": (16,)}
SPECS = {"layers/kernel": P(None, "x"), "wide/kernel": P(None, "x"), "wide/bias": P("x")}
AXES = {"layers/kernel": curvax.MatrixAxes(rows=1, columns=2)}
STORED = curvax.quantized(bits=8, block=4, min_elements=1)


def whitened_roots(**places: Any) -> Any:
    direction = curvax.precondition(
        refresh=curvax.every(2), side="left", root=2, eps=1e-2, statistics="kl", storage=STORED
    )
    return curvax.assemble(direction, 0.1, **places)


@pytest.mark.weekly
def test_whitened_roots_on_a_mesh_are_those_of_one_device() -> None:
    mesh, growth = mesh_of("explicit", 4), 1024.0
    whole, gradients = given(SHAPES)
    optimizer = whitened_roots(weight_dimension_numbers=AXES, mesh=mesh)
    params = on(mesh, whole, SPECS)
    updates, state = steps(optimizer, [on(mesh, g, SPECS) for g in gradients], params, mesh)
    alone = whitened_roots(weight_dimension_numbers=AXES)
    expected, states = run_scanned(alone, gradients, whole)
    assert_close(updates, expected, growth)
    parts = [x for x in divided_arrays(state) if x.ndim]
    assert parts and all(not x.is_fully_replicated for x in parts)
    portable = curvax.portable_state(optimizer, params, state)
    assert_close(portable, curvax.portable_state(alone, whole, states[-1]), growth)
    again = curvax.place_state(optimizer, params, portable)
    assert_close(curvax.portable_state(optimizer, params, again), portable, 0.0)
