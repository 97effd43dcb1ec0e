"""Householder reflectors: products, factorizations, derivatives; by LAPACK and as on TPUs."""

import contextlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from curvax.transforms.linalg import _qr
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
from tests.tpu_forms import forms_of_tpus

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


PLATFORMS = {"lapack": contextlib.nullcontext, "tpu": forms_of_tpus}
EPS = float(np.finfo(np.float32).eps)


@pytest.mark.parametrize(
    ("platform", "order"), [*(("lapack", d) for d in ORDERS), ("tpu", 1), ("tpu", PANEL + 9)]
)
def test_reflectors_and_signs_make_the_matrix(platform, order):
    u = orthogonal(jax.random.key(order), order, order)
    with PLATFORMS[platform]():
        v, signs = jax.jit(lambda u: reflectors_of(u))(np.float32(u))
    exact = platform == "lapack"
    assert not np.triu(v, 1).any() and np.abs(v).max() <= 1 + 4 * EPS * (not exact)
    assert not exact or (np.diag(v) == 1).all()
    assert set(np.unique(signs)) <= {-1, 1}
    assert_close(_product(v) * np.asarray(signs), u, 8 * order**0.5, eps=EPS)


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


FUNCTIONS: dict[str, Any] = {
    "complement": _qr.orthogonal_complement,
    "qr": lambda x: jnp.concatenate(_qr.qr(x)),
}


@pytest.mark.parametrize(("name", "platform"), cells(FUNCTIONS, PLATFORMS, of=2))
def test_derivatives_are_those_of_differences(name: str, platform: str) -> None:
    """In reverse mode, of one matrix and of a stack."""
    random = np.random.default_rng(0)
    with PLATFORMS[platform](), jax.enable_x64(True):
        x, along = (jnp.asarray(random.normal(size=(2, 5, 2))) for _ in range(2))
        loss = lambda x: jnp.sum(jnp.sin(3 * FUNCTIONS[name](x)))  # noqa: E731
        both = jax.jit(jax.value_and_grad(loss))
        stacked = jax.jit(jax.grad(lambda x: jnp.sum(jax.vmap(loss)(x))))(x)
        step = 1e-6
        for own, direction, of_stack in zip(x, along, stacked, strict=True):
            found = np.vdot(both(own)[1], direction)
            ahead, behind = (both(own + c * direction)[0] for c in (step, -step))
            difference = (ahead - behind) / (2 * step)
            assert abs(found - difference) < 1e-6 * abs(difference)
            assert abs(np.vdot(of_stack, direction) - found) < 1e-9 * abs(found)
