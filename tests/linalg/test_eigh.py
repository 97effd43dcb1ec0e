"""Eigenbases: their order, their signs, and their refinement."""

import jax
import jax.numpy as jnp
import numpy as np

from curvax.transforms.linalg._eigh import with_fixed_signs
from curvax.transforms.linalg._turns import by_eigh, by_qr
from tests.helpers import assert_close


def test_signs_and_order_of_bases():
    generator = np.random.default_rng(0)
    q = np.linalg.qr(generator.standard_normal((6, 6)))[0]
    a = np.float32((q * np.array([1, 9, 4, 25, 16, 36.0])) @ q.T)
    u = np.asarray(jax.jit(by_eigh)(jnp.eye(6), a).basis)
    assert_close(np.diag(u.T @ a @ u), np.array([36, 25, 16, 9, 4, 1.0]), 64)
    fixed = jax.jit(with_fixed_signs)
    assert np.array_equal(fixed(-u), u)
    flipped = u[:, ::-1]
    turn = jax.jit(lambda u, h: by_qr(u, h, 1, jnp.any))(flipped, flipped.T @ a @ flipped)
    assert np.array_equal(turn.order, np.arange(6)[::-1])
    assert_close(turn.basis, u, 64, condition=12)
    tie = np.float32([[-0.5, 0.5], [0.5, -0.5]])
    assert np.array_equal(fixed(tie), [[0.5, 0.5], [-0.5, -0.5]])
