"""Every method with every policy, storage and code: a layer-wise step is the ordinary one.

The cells are those of `test_algebra.py`, in the weekly run; `tests/layerwise/test_layerwise.py` has
every method. Gradients are given, so that both steps see
the same ones to the last bit, and policies decide alike.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from test_algebra import BLOCK, COMPARED, MOMENT_BITS, STEPS, Cell, given, is_moment

import curvax
from tests.algebra import POSITIVE
from tests.helpers import assert_close
from tests.registry import NAMED

pytestmark = pytest.mark.weekly
LAYERS = 2
AXES = {"*kernel": curvax.MatrixAxes(rows=1, columns=2)}


def optimizer_of(cell: Cell) -> Any:
    """Codes as in the cell, but for the vectors of matrices, which are coded together."""
    plain = cell._replace(moments="plain").make(weight_dimension_numbers=AXES)
    if cell.moments == "plain":
        return plain
    where = lambda path, leaf: leaf.ndim > 2 and is_moment(path, leaf)  # noqa: E731
    settings: dict[str, Any] = {"bits": MOMENT_BITS, "block": BLOCK, "unsigned": POSITIVE}
    return curvax.quantize_state(plain, where=where, **settings)


def data(method: str) -> tuple[Any, Any]:
    """Parameters, and the gradients of each step, of layers with gradients of their own."""
    params, gradients = (
        {name: x for name, x in tree.items() if name.endswith("kernel")} for tree in given(method)
    )
    turned = [gradients, jax.tree.map(lambda g: np.flip(g, -1), gradients)]
    layers = jax.tree.map(lambda p: np.stack([p] * LAYERS), params)
    return layers, jax.tree.map(lambda *g: np.stack(g, axis=1), *turned)


def linear(layer: Any, x: Any, gradient: Any) -> Any:
    """Its gradient, where that of the output is 1, is the given one."""
    return x + sum(jnp.sum(layer[name] * gradient[name]) for name in layer)


def trained(cell: Cell, step: Any) -> Any:
    """Layers and state after all steps."""
    optimizer = optimizer_of(cell)
    layers, gradients = data(cell.method)

    def visit(carry: Any, gradient: Any) -> Any:
        return step(optimizer, *carry, gradient), None

    start = layers, optimizer.init(layers)
    return jax.jit(lambda start, g: jax.lax.scan(visit, start, g)[0])(start, gradients)


def ordinary(optimizer: Any, layers: Any, state: Any, gradient: Any) -> Any:
    updates, state = optimizer.update(gradient, state, layers)
    return optax.apply_updates(layers, updates), state


def during(optimizer: Any, layers: Any, state: Any, gradient: Any) -> Any:
    x, backward = curvax.layerwise(linear, optimizer, layers, state, jnp.zeros([]), xs=gradient)
    return backward(jnp.ones_like(x))[:2]


@pytest.mark.parametrize(
    "cell",
    [
        pytest.param(cell, id=str(cell), marks=pytest.mark.xdist_group(f"layerwise {cell.method}"))
        for cell in COMPARED
    ],
)
def test_a_cell_has_the_parameters_and_the_state_of_an_ordinary_step(cell: Cell) -> None:
    """Over the refreshes at steps 1, 2, 4 and 6. Codes may differ by the rounding of a step."""
    (layers, state), (expected, expected_state) = trained(cell, during), trained(cell, ordinary)
    assert jax.tree.map(jnp.shape, state) == jax.tree.map(jnp.shape, expected_state)
    coded = cell != cell.in_full
    assert_close(layers, expected, NAMED[cell.method].growth * STEPS * (64 if coded else 1))
    counts = lambda tree: [x for x in jax.tree.leaves(tree) if x.dtype == jnp.int32]  # noqa: E731
    assert_close(counts(state), counts(expected_state), factor=0)
