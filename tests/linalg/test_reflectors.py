"""Products of Householder reflectors, and their factorizations."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from curvax.transforms.linalg._qr import (
    LEAST_PANELS,
    PANEL,
    Reflectors,
    formed,
    panels_of,
    reflected,
    reflectors_of,
)
from tests.cells import cells
from tests.helpers import assert_close, orthogonal

# One reflector, less than a panel, panels in part, and two loops.
ORDERS = (1, 2, PANEL - 1, PANEL + 1, PANEL * 2 * LEAST_PANELS + 3)

factored = jax.jit(reflectors_of)
there = jax.jit(lambda v, x: reflected(unsigned(v), x))
back = jax.jit(lambda v, x: reflected(unsigned(v), x, inverse=True))
whole = jax.jit(lambda v: formed(unsigned(v), precision="highest"))


def unsigned(v: jax.Array) -> Reflectors:
    return panels_of(v, jnp.ones(v.shape[:-1], v.dtype))


def _product(v: np.ndarray) -> np.ndarray:
    """`H_1 ⋯ H_d`, one reflector at a time."""
    product = np.eye(len(v))
    for column in np.asarray(v, np.float64).T:
        product -= 2 * np.outer(product @ column, column) / (column @ column)
    return product


@pytest.mark.parametrize("order", ORDERS)
def test_reflectors_and_signs_make_the_matrix(order):
    u = orthogonal(jax.random.key(order), order, order)
    v, signs = factored(np.float32(u))
    assert np.array_equal(np.triu(v), np.eye(order)) and np.abs(v).max() <= 1
    assert set(np.unique(signs)) <= {-1, 1}
    assert_close(
        _product(v) * np.asarray(signs), u, 8 * order**0.5, eps=float(np.finfo(np.float32).eps)
    )


@pytest.mark.parametrize("order", cells(ORDERS, of=2))
def test_panels_are_the_reflectors_one_by_one(order):
    """Also of vectors that no decomposition gave, of any length."""
    generator = np.random.default_rng(order)
    v = np.tril(generator.standard_normal((order, order))) * generator.uniform(
        0.01, 100, (1, order)
    )
    v, x = np.float32(v), np.float32(generator.standard_normal((order, 3)))
    product = _product(v)
    assert_close(there(v, x), product @ x, 64 * order**0.5)
    assert_close(back(v, x), product.T @ x, 64 * order**0.5)
    assert_close(whole(v), product, 64 * order**0.5)


def test_batches_are_their_matrices():
    generator = np.random.default_rng(0)
    order = PANEL + 7
    v = np.float32(np.tril(generator.standard_normal((2, order, order))) + 8 * np.eye(order))
    x = np.float32(generator.standard_normal((2, order, 5)))
    u = np.float32([orthogonal(jax.random.key(i), order, order) for i in range(2)])
    found = there(v, x), whole(v), *factored(u)
    for i in range(2):
        alone = there(v[i], x[i]), whole(v[i]), *factored(u[i])
        assert_close([y[i] for y in found], list(alone))


@pytest.mark.parametrize("order", (3, PANEL + 1))
def test_signed_permutations_are_exact(order):
    """Columns that need no reflection, and columns that are all reflection."""
    generator = np.random.default_rng(order)
    signs = generator.choice([-1.0, 1.0], order)
    for u in (np.eye(order), -np.eye(order), np.eye(order)[generator.permutation(order)] * signs):
        v, s = factored(np.float32(u))
        assert_close(there(v, jnp.diag(s)), np.float32(u))


def test_programs_do_not_grow_with_the_order():
    def lines(order):
        v, x = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((order, order), (order, 8)))
        programs = jax.jit(lambda v, x: (there(v, x), whole(v))).lower(v, x).as_text()
        return len(programs.splitlines())

    assert lines(PANEL * 64) == lines(PANEL * 16) < 600
