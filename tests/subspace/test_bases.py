"""Bases of subspaces: orthonormal, of gradients of any scale, without Gram matrices."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import curvax
from curvax import subspaces
from curvax.transforms.subspace._bases import SubspaceCheck
from tests.cells import cells
from tests.helpers import assert_close
from tests.shared.low_rank import GRADIENTS, RANK, STEPS, due_steps, trajectories

FINDERS = {
    "svd": subspaces.svd(),
    "randomized": subspaces.randomized(2),
    "iterated": subspaces.iterated(),
    "by QR": subspaces.iterated(rotate=False),
    "complement": subspaces.complement(2),
    "full_basis": subspaces.full_basis(1),
    "complement of a random one": subspaces.complement(2, subspaces.randomized(2)),
    "gaussian_mix": subspaces.gaussian_mix(2),
    "gaussian": subspaces.gaussian(kept=False),
}


@functools.cache
def _with_everything(finder):
    """`in_subspace` with this finder and all that the finder allows."""
    basis = FINDERS[finder]
    return curvax.in_subspace(
        optax.scale_by_adam(),
        RANK,
        basis=basis,
        refresh=curvax.every(4),
        carry=subspaces.rotate() if basis.kept else None,
        # Of a basis that is not orthonormal nothing may be outside, step after step.
        compensation=subspaces.optimal() if basis.orthonormal else subspaces.fira(),
        b3=0.999 if basis.kept else None,
    )


@pytest.mark.parametrize(("finder", "shape"), cells(FINDERS, GRADIENTS, of=28))
def test_bases_are_orthonormal_and_kept_as_declared_and_every_field_advances(finder, shape):
    given = {shape: GRADIENTS[shape]}
    directions, states = trajectories(_with_everything(finder), given, "float32")
    basis = FINDERS[finder]
    for name in directions:
        assert np.isfinite(directions[name]).all()
        subspace = states[name].subspace
        assert subspace.refreshes[-1] == len(due_steps(4)) and not subspace.rejected.any()
        if basis.orthonormal:
            gram = np.asarray(subspace.basis.mT @ subspace.basis)
            eye = np.broadcast_to(np.eye(RANK), gram.shape)
            assert_close(gram, eye, 32, eps=float(np.finfo("float32").eps))
        if basis.kept:
            moved = [
                t
                for t in range(2, STEPS + 1)
                if (subspace.basis[t - 1] != subspace.basis[t - 2]).any()
            ]
            assert moved == due_steps(4)[1:]
        for field in ("tracked", "compensation"):
            for leaf in jax.tree.leaves(getattr(subspace, field)):
                for before, after in itertools.pairwise(leaf):
                    assert (before != after).any(), (field, name)
        for moment in (states[name].inner.mu, states[name].inner.nu):
            assert all((x != y).any() for x, y in itertools.pairwise(moment))


@pytest.mark.parametrize(
    ("finder", "shape"),
    cells(["svd", "randomized", "complement", "gaussian_mix"], GRADIENTS, of=12),
)
def test_bases_do_not_depend_on_the_gradients_scale(finder, shape):
    """At the first step: second moments of all of them may leave the range of float32."""
    first = []
    for power in (0, -100, 60):
        scaled = {shape: [g * 2.0**power for g in GRADIENTS[shape]]}
        _, states = trajectories(_with_everything(finder), scaled, "float32")
        first.append({name: state.subspace.basis[0] for name, state in states.items()})
    assert_close(first[1:], [first[0]] * 2, factor=0)


@pytest.mark.parametrize("rotate", [None, True, False])
@pytest.mark.parametrize("b3", [0.999, None])
def test_the_gradients_gram_matrix_is_never_formed(rotate, b3):
    """Nor any other square of the gradient's order, from the first step on."""
    start = subspaces.randomized(2)
    basis = start if rotate is None else subspaces.iterated(rotate=rotate, start=start)
    direction = curvax.in_subspace(
        optax.identity(), RANK, basis=basis, refresh=curvax.every(4), b3=b3
    )
    gradient = jax.ShapeDtypeStruct((64, 80), jnp.float32)
    state = jax.eval_shape(direction.init, gradient)
    program = jax.jit(direction.update).lower(gradient, state).as_text()
    assert "tensor<64x80xf32>" in program
    for square in ("64x64", "80x80"):
        assert square not in program


def test_randomized_bases_capture_nearly_all_that_the_exact_ones_do():
    m, n, rank = 96, 160, 12
    generator = np.random.default_rng(3)
    left = np.linalg.qr(generator.standard_normal((m, m)))[0]
    right = np.linalg.qr(generator.standard_normal((n, m)))[0]
    randomized, exact = (
        jax.jit(functools.partial(basis.find, rank=rank))
        for basis in (subspaces.randomized(), subspaces.svd())
    )
    for power, least in ((1.0, 0.99), (0.5, 0.95)):
        g = np.float32((left * np.arange(1, m + 1) ** -power) @ right.T)
        check = SubspaceCheck(g, g[:, :rank], None, None, jnp.bool_(True), jax.random.key(0))
        energies = [
            float(np.sum((np.asarray(find(check)).T @ g) ** 2)) for find in (randomized, exact)
        ]
        assert least * energies[1] <= energies[0] <= 1.0001 * energies[1]
