"""Products with a transpose, and gradients that are multiplied: as NumPy's, and without copies."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import TO_READ, assert_close, normal_like, program

import curvax
from curvax.transforms._guard import guard_matrices
from curvax.transforms._side import LEFT, RIGHT, Side
from curvax.transforms.linalg._products import gram_of, times_transposed, transposed_times

BATCHES = ((), (1,), (2, 3))


@pytest.mark.parametrize("batch", BATCHES, ids=str)
def test_products_are_numpys(batch: tuple[int, ...]) -> None:
    shapes = [jax.ShapeDtypeStruct((*batch, *mn), jnp.float32) for mn in ((4, 6), (5, 6), (4, 3))]
    a, b, c = normal_like(jax.random.key(0), shapes)
    precision = jax.lax.Precision.HIGHEST

    @jax.jit
    def products(a: jax.Array, b: jax.Array, c: jax.Array) -> list[jax.Array]:
        found = [times_transposed(a, b, precision), transposed_times(a, c, precision)]
        return found + [gram_of(a, side, precision) for side in Side]

    x, y, z = (np.asarray(m, np.float64) for m in (a, b, c))
    xt, yt = x.swapaxes(-1, -2), y.swapaxes(-1, -2)
    assert_close(products(a, b, c), [x @ yt, xt @ z, x @ xt, xt @ x], eps=1.2e-7)


def copies(f: Any, *args: Any) -> list[str]:
    """What makes transposed copies in the compiled program."""
    text = jax.jit(f).lower(*args).compile(compiler_options=TO_READ).as_text() or ""
    return re.findall(r"f32\[\S* (?:transpose|copy)\(", text)


def test_a_matrix_alone_is_not_transposed_to_be_multiplied() -> None:
    x = jnp.ones((1, 40, 48))
    muon = curvax.scale_by_muon()
    state = muon.init(x)
    assert not copies(lambda x: gram_of(x, LEFT), x)
    assert not copies(lambda x: gram_of(x, RIGHT), x)
    assert not copies(lambda x: times_transposed(x, 2 * x), x)
    assert not copies(lambda x: transposed_times(x, 2 * x), x)
    assert not copies(lambda x: muon.update(x, state)[0], x)
    assert copies(lambda x: x @ x.mT, x), "XLA has learned it: these functions are no longer needed"


def test_zeros_for_a_bad_gradient_are_not_written_to_be_multiplied() -> None:
    """One choice is made of what has the gradient's shape: the direction."""
    x = jax.ShapeDtypeStruct((2, 5, 7), jnp.float32)
    told = curvax.scale_by_shampoo(graft=None, refresh=3, statistics_every=1)
    untold = optax.chain(told)

    def choices(inner: optax.GradientTransformation) -> int:
        guarded = guard_matrices(inner)
        text = program(guarded.update, x, jax.eval_shape(guarded.init, x))
        return len(re.findall(r"f32\[2,5,7\] = (?:select_n|jit\[name=_where)", text))

    assert choices(told) == 1 < choices(untold)


def test_a_gradient_is_not_read_once_more_to_see_whether_it_is_usable() -> None:
    """The Gram matrix that is taken in tells, and the norm that a direction is grafted to."""
    x = jax.ShapeDtypeStruct((1, 40, 48), jnp.float32)

    def number(kind: str, transformation: optax.GradientTransformation) -> int:
        step = jax.jit(transformation.update)
        lowered = step.lower(x, jax.eval_shape(transformation.init, x))
        return (lowered.compile(compiler_options=TO_READ).as_text() or "").count(f" {kind}(")

    asgo, shampoo = curvax.scale_by_asgo(refresh=3), curvax.scale_by_shampoo(refresh=3, side="left")
    assert number("dot", guard_matrices(asgo)) == number("dot", asgo)
    assert number("reduce", guard_matrices(shampoo)) == number("reduce", shampoo)
    assert number("reduce", guard_matrices(optax.chain(shampoo))) > number("reduce", shampoo)

    def sums(transformation: optax.GradientTransformation) -> int:
        guarded = guard_matrices(transformation)
        text = program(guarded.update, x, jax.eval_shape(guarded.init, x))
        return len(re.findall(r"reduce_sum\[[^]]*axes=\(1, 2\)", text))

    assert sums(asgo) == 0 < sums(optax.chain(asgo))
