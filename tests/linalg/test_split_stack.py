"""Parts of a stack: the same as slices, from one kernel on CPUs."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import curvax
from curvax.transforms.linalg._platforms import split_stack
from tests.helpers import OPTIMIZED

SIZES = ((4,), (1, 1, 1, 1), (2, 1, 3))


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_parts_are_slices(sizes: tuple[int, ...], dtype: str) -> None:
    """Of a stack, of a batch of them, and of the derivatives on the way back."""
    stack = np.random.default_rng(0).standard_normal((sum(sizes), 3, 5)).astype(dtype)
    apart = lambda x: list(split_stack(x, sizes))  # noqa: E731
    doubled = lambda x: [2 * part for part in apart(x)]  # noqa: E731

    @jax.jit
    def found(stack: Any, twice: Any, parts: Any) -> Any:
        return apart(stack), jax.vmap(apart)(twice), jax.vjp(doubled, stack)[1](parts)[0]

    twice, parts = np.stack([stack, -stack]), np.split(stack, np.cumsum(sizes)[:-1])
    want = parts, [np.stack([part, -part]) for part in parts], stack + stack
    jax.tree.map(np.testing.assert_array_equal, found(stack, twice, parts), want)
    outside = apart(jnp.asarray(stack))  # of programs
    jax.tree.map(np.testing.assert_array_equal, outside, parts)


def test_a_cpu_compiles_no_slice_of_its_own_for_a_leaf_and_others_have_slices() -> None:
    view = curvax.on_matrices(optax.scale(-0.1))
    params = {f"w{i}": np.full((4, 6), 1.0 + i, np.float32) for i in range(12)}
    state = view.init(params)

    def plainly(params: Any) -> Any:
        return dict(enumerate(-0.1 * jnp.stack(list(params.values()))))

    update = jax.jit(lambda x: view.update(x, state)[0])
    program, plain = (
        str(f.lower(params).compile(compiler_options=OPTIMIZED).as_text())
        for f in (update, jax.jit(plainly))
    )
    assert (plain.count(" slice("), program.count(" slice(")) == (12, 0)
    assert program.count(" dynamic-slice(") == program.count(" call(") == 12
    traced = update.trace(params)
    for platform, slices in (("cuda", 12), ("tpu", 12), ("cpu", 0)):
        text = traced.lower(lowering_platforms=(platform,)).as_text()
        assert text.count("stablehlo.slice") == slices
        assert ("inlineable" in text) == ("dynamic_slice" in text) == (not slices)
