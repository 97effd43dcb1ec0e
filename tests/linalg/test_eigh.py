"""Eigenbases: their order, their signs, and their refinement."""

import jax
import jax.numpy as jnp
import numpy as np

from curvax.transforms.linalg._eigh import eigenbasis, refined_basis, with_fixed_signs
from tests.helpers import assert_close


def test_signs_and_order_of_bases():
    generator = np.random.default_rng(0)
    q = np.linalg.qr(generator.standard_normal((6, 6)))[0]
    a = np.float32((q * np.array([1, 9, 4, 25, 16, 36.0])) @ q.T)
    u = np.asarray(jax.jit(eigenbasis)(a))
    assert_close(np.diag(u.T @ a @ u), np.array([36, 25, 16, 9, 4, 1.0]), 64)
    fixed = jax.jit(with_fixed_signs)
    assert np.array_equal(fixed(-u), u)
    flipped, order = jax.jit(lambda a, u: refined_basis(a, u, 1, jnp.any))(a, u[:, ::-1])
    assert np.array_equal(order, np.arange(6)[::-1])
    assert_close(flipped, u, 64, condition=12)
    tie = np.float32([[-0.5, 0.5], [0.5, -0.5]])
    assert np.array_equal(fixed(tie), [[0.5, 0.5], [-0.5, -0.5]])
