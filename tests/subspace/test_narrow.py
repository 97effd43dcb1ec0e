"""Bases and moments in bfloat16: which arrays they are, and that rounding does no harm."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import curvax
from tests.cells import cells
from tests.helpers import scanned

UNIT = float(jnp.finfo(jnp.bfloat16).eps)


def _wide_arrays(method: str, **options: Any) -> dict[str, tuple[str, int]]:
    """The dtype and the size of the state's floating-point arrays, by field."""
    direction = getattr(curvax, f"scale_by_{method}")(rank=4, **options)
    state = jax.eval_shape(direction.init, jnp.zeros((3, 16, 24)))
    return {
        jax.tree_util.keystr(path[-1:], simple=True): (leaf.dtype.name, leaf.size)
        for path, leaf in jax.tree_util.tree_leaves_with_path(state)
        if jnp.issubdtype(leaf.dtype, jnp.floating)
    }


@pytest.mark.parametrize("method", ["galore", "fira", "alice", "apollo", "sumo"])
def test_bases_and_moments_take_two_bytes_and_all_else_four(method: str) -> None:
    found = _wide_arrays(method, dtype="bfloat16")
    assert {name: size for name, (_, size) in found.items()} == {
        name: size for name, (_, size) in _wide_arrays(method).items()
    }
    narrow = {name for name, (dtype, _) in found.items() if dtype == "bfloat16"}
    assert narrow == {"basis", "mu", "nu"} & {*found}


def test_an_average_in_bfloat16_follows() -> None:
    """Rounded to the nearest, a second moment with b2 = 0.999 would not decay at all."""
    b2, steps = 0.999, 400
    gradients = np.zeros((steps, 8, 64), np.float32)
    gradients[0] = np.random.default_rng(0).standard_normal((8, 64))
    direction = curvax.scale_by_galore(rank=4, b2=b2, dtype="bfloat16")
    second = np.asarray(scanned(direction)(gradients)[1][0].inner.nu, np.float64)
    decayed = second[-1].sum() / second[0].sum()
    assert decayed == pytest.approx(b2 ** (steps - 1), rel=0.02)
    nearest = jnp.asarray(second[0], jnp.bfloat16)
    assert (jnp.bfloat16(b2) * nearest == nearest).all()


@pytest.mark.parametrize("method", cells(["galore", "alice"], of=2))
def test_the_rounding_of_a_basis_is_not_taken_for_a_gradient(method: str) -> None:
    """Of gradients of rank one the other directions of the basis hold nothing."""
    left, right = np.random.default_rng(0).standard_normal((2, 16))
    gradients = np.stack([np.outer(left, right) * s for s in (1.0, 2.0, 0.5)]).astype(np.float32)
    options = {"alice": {"switching": curvax.subspaces.complement(1)}}.get(method, {})
    make = getattr(curvax, f"scale_by_{method}")
    wide, narrow = (
        scanned(make(rank=3, dtype=dtype, **options))(gradients)[0] for dtype in (None, "bfloat16")
    )
    assert np.linalg.norm(narrow - wide) < 2 * UNIT * np.linalg.norm(wide)
