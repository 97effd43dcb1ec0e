"""Products with a transpose: as NumPy's, and without copies."""

import functools
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import curvax
from curvax.transforms._side import LEFT, RIGHT, Side
from curvax.transforms.linalg._products import gram, multiplied, square_of_lower
from tests.cells import cells
from tests.helpers import TO_READ, assert_close, normal_like
from tests.shared.programs import temporaries

BATCHES = ((), (1,), (2, 3))


@pytest.mark.parametrize("batch", BATCHES, ids=str)
def test_products_are_numpys(batch: tuple[int, ...]) -> None:
    shapes = [jax.ShapeDtypeStruct((*batch, *mn), jnp.float32) for mn in ((4, 6), (5, 6), (4, 3))]
    a, b, c = normal_like(jax.random.key(0), shapes)
    precision = jax.lax.Precision.HIGHEST

    @jax.jit
    def products(a: jax.Array, b: jax.Array, c: jax.Array) -> list[jax.Array]:
        found = [multiplied(a, b, precision, (-1, -1)), multiplied(a, c, precision, (-2, -2))]
        return found + [gram(a, side, precision) for side in Side]

    x, y, z = (np.asarray(m, np.float64) for m in (a, b, c))
    xt, yt = x.swapaxes(-1, -2), y.swapaxes(-1, -2)
    assert_close(products(a, b, c), [x @ yt, xt @ z, x @ xt, xt @ x], eps=1.2e-7)


def test_the_square_of_a_triangle_takes_half_of_the_products_of_a_square() -> None:
    wide = jax.ShapeDtypeStruct((64, 64), np.float32)
    cost: Any = jax.jit(square_of_lower).lower(wide).cost_analysis()
    assert cost["flops"] < 1.1 * 64**3


def copies(f: Any, *args: Any) -> list[str]:
    """What makes transposed copies in the compiled program."""
    text = jax.jit(f).lower(*args).compile(compiler_options=TO_READ).as_text() or ""
    return re.findall(r"f32\[\S* (?:transpose|copy)\(", text)


def test_a_matrix_alone_is_not_transposed_to_be_multiplied() -> None:
    x = jnp.ones((1, 40, 48))
    muon = curvax.scale_by_muon()
    state = muon.init(x)
    assert not copies(lambda x: gram(x, LEFT), x)
    assert not copies(lambda x: gram(x, RIGHT), x)
    assert not copies(lambda x: multiplied(x, 2 * x, sums=(-1, -1)), x)
    assert not copies(lambda x: multiplied(x, 2 * x, sums=(-2, -2)), x)
    assert not copies(lambda x: muon.update(x, state)[0], x)
    assert copies(lambda x: x @ x.mT, x), "XLA has learned it: these functions are no longer needed"


@pytest.mark.parametrize("make", cells([curvax.scale_by_asgo, curvax.scale_by_shampoo], of=2))
def test_a_guard_needs_no_more_than_one_copy_of_the_gradients(make: Any) -> None:
    """In a step that makes them: zeros are not written anew for each product."""
    shapes = {"square": (1, 64, 64), "wide": (1, 64, 256), "tall": (1, 256, 64)}
    params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}

    def of(transformation: optax.GradientTransformation) -> int:
        def step(params: Any, state: Any) -> tuple[Any, Any]:
            made = jax.tree.map(lambda x: jnp.cumsum(x, axis=-1), params)
            gradients = jax.lax.optimization_barrier(made)  # as written by a backward pass
            updates, state = transformation.update(gradients, state, params)
            return optax.apply_updates(params, updates), state

        state = jax.eval_shape(transformation.init, params)
        return temporaries(step, params, state, options=TO_READ)

    axes = {"*": curvax.MatrixAxes(rows=1, columns=2)}
    view = functools.partial(
        curvax.on_matrices, make(refresh=3), stack=False, weight_dimension_numbers=axes
    )
    copy = sum(4 * math.prod(shape) for shape in shapes.values())
    assert of(view(guard=True)) <= of(view(guard=False)) + copy
