"""Memory of low-rank methods, from shapes alone: Table 3 of RACS and Alice.

Gong et al., arXiv:2502.07752, section F.4, count 2 bytes for each number of the weights, of Adam's
moments of all that is not a matrix (embedding, norms), and of the method's state of the kernels and
of the last layer, which has Adam in the columns "Mem.*", and always for Adam, Apollo and RACS.

Numbers of our states count 2 bytes too, but Alice's tracked moment Q̃ 4: with that the printed
figures come out, with 2 they do not. At 1.3B Table 10 prints a width that would make 7 billion
parameters; section F.4's numbers are those of a width of 2048 and 24 layers.

`git show 18ca9bb:benchmarks/results/papers/low_rank_memory.md` has all figures, and those of SUMO's
Table 1.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import curvax
from benchmarks._trees import LLAMA, LLAMA_130M, Shapes, abstract_kernels
from tests.cells import cells

SIZES = {  # with rank and leading basis, of Tables 7, 10 and 11
    "60M": (Shapes(512, 1376, 8, 32000), 128, 40),
    "130M": (LLAMA_130M, 256, 40),
    "350M": (Shapes(1024, 2736, 24, 32000), 256, 40),
    "1.3B": (LLAMA["1.3B"], 512, 160),
}


def abstract_model(shapes: Shapes) -> dict[str, Any]:
    def array(*shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16)

    ends = shapes.vocabulary, shapes.width
    norms = {f"norm_{i}": {"scale": array(shapes.width)} for i in range(2 * shapes.layers + 1)}
    others = {"embedding": {"embedding": array(*ends)}, "lm_head": {"kernel": array(*ends[::-1])}}
    return abstract_kernels(shapes, jnp.bfloat16) | norms | others


ADAM_LAST: Any = {"weight_dimension_numbers": {"lm_head/kernel": None}}  # Mem.*
UNTRACKED: dict[str, Any] = {"b3": None}
LOW, LOW_ADAM_LAST = (0.21, 0.51, 1.20, 4.25), (0.26, 0.57, 1.29, 4.43)
SMALL = (0.23, 0.43, 0.93, 2.98)
ROWS: list[tuple[Any, dict[str, Any], tuple[float, ...]]] = [  # and what is printed, in GiB
    (optax.adam, {}, (0.32, 0.75, 2.05, 7.48)),
    (curvax.racs, {}, SMALL),
    (curvax.apollo, {"rank": 1, "whole": True}, SMALL),
    (curvax.apollo, {"basis": curvax.subspaces.svd()}, LOW_ADAM_LAST),
    (curvax.galore, {}, LOW),
    (curvax.galore, ADAM_LAST, LOW_ADAM_LAST),
    (curvax.fira, {}, LOW),
    (curvax.fira, ADAM_LAST, LOW_ADAM_LAST),
    (curvax.alice, UNTRACKED, LOW),
    (curvax.alice, UNTRACKED | ADAM_LAST, (0.26, 0.57, 1.29, 4.44)),
    (curvax.alice, {}, (0.22, 0.53, 1.24, 4.42)),
    (curvax.alice, ADAM_LAST, (0.26, 0.59, 1.33, 4.60)),
]


@pytest.mark.parametrize("name", cells(SIZES, of=4))
def test_memory_is_what_alice_prints_in_table_3(name: str) -> None:
    """Every figure within 0.01 GiB; so are the bytes that states really take, with counters."""
    model, rank, leading = SIZES[name]
    params = abstract_model(model)
    for method, options, published in ROWS:
        given: dict[str, Any] = {"rank": rank, "dtype": "bfloat16"}
        if method is curvax.alice:
            given["switching"] = curvax.subspaces.complement(leading)
        given = {} if method in (optax.adam, curvax.racs) else given | options
        state = jax.eval_shape(method(1.0, **given).init, params)
        counted = taken = 2 * sum(x.size for x in jax.tree.leaves(params))
        for path, x in jax.tree_util.tree_leaves_with_path(state):
            tracked = "tracked" in jax.tree_util.keystr(path, simple=True, separator="/").split("/")
            counted += x.size * (2 + 2 * tracked) * jnp.issubdtype(x.dtype, jnp.floating)
            taken += x.size * x.dtype.itemsize
        printed = published[[*SIZES].index(name)]
        assert all(abs(found / 2**30 - printed) <= 0.01 for found in (counted, taken)), printed
