"""Sums of two directions: shared parts, devices, zeros and what is not finite."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import curvax
from tests.helpers import assert_close, gradients_like, normal, run
from tests.shared.meshes import mesh_of, on, steps


def test_what_both_share_is_kept_once() -> None:
    momentum = curvax.momentum(0.9)
    shared = curvax.blend(optax.identity(), optax.identity(), (0.3, 0.7), shared=momentum)
    states = [jax.eval_shape(part.init, jnp.ones((4, 6))) for part in (shared, momentum)]
    sizes = [sum(x.size * (x.ndim > 0) for x in jax.tree.leaves(state)) for state in states]
    assert sizes[0] == sizes[1]


def test_devices_share_the_matrices_of_both_directions() -> None:
    both = curvax.blend(curvax.scale_by_muon(), curvax.scale_by_muon(b2=0.9), (0.5, 0.5))
    params = normal(jax.random.key(0), {f"{i}/kernel": (4, 6) for i in range(5)})
    gradients = gradients_like(params, 3)
    mesh = mesh_of("auto")
    alone, _ = run(curvax.assemble(both, 0.1), gradients, params)
    on_mesh = curvax.assemble(both, 0.1, mesh=mesh)
    shared, _ = steps(on_mesh, [on(mesh, g) for g in gradients], on(mesh, params), mesh)
    assert_close(jax.tree.map(np.asarray, shared), alone, 64, condition=100)


def test_zeros_stay_zero_and_what_is_not_finite_shows() -> None:
    double = optax.scale(2.0)
    part = curvax.blend(optax.identity(), double, (0.5, 0.5))
    x = jnp.zeros((3, 2, 2)).at[1].set(1.0).at[2, 0, 0].set(jnp.nan)
    found, _ = part.update(x, part.init(x))
    assert not np.asarray(found[0]).any() and np.isfinite(found[1]).all()
    assert not np.isfinite(found[2]).all()
    opposed = curvax.blend(optax.identity(), double, (1.0, -0.5))
    assert not np.asarray(opposed.update(x, opposed.init(x))[0][1]).any()
