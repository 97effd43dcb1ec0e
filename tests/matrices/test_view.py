"""The view of parameters as stacks of matrices: stacked or not, in blocks, by heads."""

import functools
import inspect
import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import curvax
from curvax import MatrixAxes
from tests.cells import ALL_CELLS, cells
from tests.helpers import assert_close, run_scanned, with_spectrum
from tests.reference.head_groups import on_head_groups
from tests.reference.muon import muon

# Directions on batches of matrices, in settings in which their errors stay near one rounding, so
# that two ways of running them agree in the default bound of assert_close.
DIRECTIONS: dict[str, Callable[[], optax.GradientTransformation]] = {
    "muon": functools.partial(
        curvax.scale_by_muon, method=curvax.polar.newton_schulz(3, coefficients="classical")
    ),
    "racs": curvax.scale_by_racs,
    "asgo": functools.partial(curvax.scale_by_asgo, side="left", eps=0.1),
}

directions = [  # whose tests share compiled programs, so they run in one worker
    pytest.param(name, marks=pytest.mark.xdist_group(f"view {name}")) for name in DIRECTIONS
]
some_directions = pytest.mark.parametrize("direction", cells(directions, of=6))


def conditioned_gradients(
    shape: tuple[int, ...], steps: int = 2, seed: int = 0
) -> list[np.ndarray]:
    """Gradients `(..., m, n)` whose matrices have singular values between 1 and 2."""
    *batch, m, n = shape
    gradients = []
    for step in range(steps):
        keys = [
            jax.random.fold_in(jax.random.key(seed), step * 100 + i)
            for i in range(math.prod(batch))
        ]
        values = np.linspace(1, 2, min(m, n))
        matrices = np.stack([with_spectrum(key, m, n, values) for key in keys])
        gradients.append(np.asarray(matrices.reshape(shape), np.float32))
    return gradients


@functools.cache
def compiled(direction: str) -> optax.GradientTransformation:
    """The direction without any view, which compiles once for a shape."""
    return DIRECTIONS[direction]()


@some_directions
def test_padding_never_changes_a_block(direction: str) -> None:
    # 7 × 10 in blocks of at most 4 is 2 × 3 blocks of 4 × 4, of which the last are 3 and 2 wide.
    gradients = conditioned_gradients((7, 10), steps=3)
    view = curvax.on_matrices(DIRECTIONS[direction](), matrices="w", block_size=4)
    updates, _ = run_scanned(view, [{"w": gradient} for gradient in gradients])
    rows, columns = (slice(0, 4), slice(4, 7)), (slice(0, 4), slice(4, 8), slice(8, 10))
    # Of one that is not padded, and of one that is on both sides, or of all.
    blocks = itertools.product(rows, columns) if ALL_CELLS else zip(rows, columns[::2], strict=True)
    for block in blocks:
        alone, _ = run_scanned(compiled(direction), [g[block] for g in gradients])
        in_view = [update["w"][block] for update in updates]
        # A block of a well-conditioned matrix is less well conditioned.
        assert_close(in_view, alone, condition=16)


# Every way to be matrices, all of them 4 × 6 or 6 × 4: a batch of matrices, their axes, and the
# parameter that holds the batch.
WAYS: dict[str, tuple[tuple[int, ...], MatrixAxes | None, Callable[[Any], Any]]] = {
    "a": ((1, 4, 6), None, lambda batch: batch[0]),
    "b": ((1, 4, 6), None, lambda batch: batch[0]),
    "c": ((1, 6, 4), None, lambda batch: batch[0]),
    "layers": ((3, 4, 6), MatrixAxes(rows=1, columns=2), lambda batch: batch),
    "heads": ((3, 6, 4), MatrixAxes(0, 2), lambda batch: np.moveaxis(batch, 0, 1)),
    "merged heads": (
        (3, 6, 4),
        MatrixAxes(0, 1, column_heads=3),
        lambda batch: np.concatenate(list(batch), axis=1),
    ),
    "heads in rows": ((2, 4, 6), MatrixAxes(0, 1, row_heads=2), lambda x: np.concatenate(list(x))),
}


@functools.cache
def batches() -> dict[str, list[np.ndarray]]:
    ways = enumerate(WAYS.items())
    return {name: conditioned_gradients(shape, seed=i) for i, (name, (shape, *_)) in ways}


@functools.cache
def alone(direction: str) -> dict[str, list[np.ndarray]]:
    """The directions of every parameter, each of its matrices by itself."""
    found = {}
    for name, gradients in batches().items():
        runs = [
            run_scanned(compiled(direction), matrix)[0] for matrix in zip(*gradients, strict=True)
        ]
        found[name] = [WAYS[name][2](np.stack(step)) for step in zip(*runs, strict=True)]
    return found


@pytest.mark.parametrize(("stack", "names"), [(True, tuple(WAYS)), (False, ("a", "c", "layers"))])
@some_directions
def test_stacked_unstacked_and_bare_agree(
    direction: str, stack: bool, names: tuple[str, ...]
) -> None:
    gradients = [{name: WAYS[name][2](batches()[name][t]) for name in names} for t in range(2)]
    axes = {name: x for name in names if (x := WAYS[name][1])}
    view = curvax.on_matrices(DIRECTIONS[direction](), stack=stack, weight_dimension_numbers=axes)
    summary = curvax.summarize(view, gradients[0])
    assert summary.count("in stack 4x6") == (4 if stack else 0)
    assert summary.count("in stack 6x4") == (3 if stack else 0)
    assert summary.count("in an entry of its own") == (0 if stack else len(names))
    updates, _ = run_scanned(view, gradients)
    for name in names:
        assert_close([update[name] for update in updates], alone(direction)[name])


LARGE = {"a": (2, 129, 128), "b": (2, 129, 128), "c": (129, 128), "d": (129, 128)}
LARGE |= {"e": (2, 128, 128), "f": (128, 128), "g": (1, 129, 128)}


@pytest.mark.parametrize(
    ("shapes", "given", "arrays"),
    [
        (
            LARGE,
            {},
            {
                **{"a": (2, 129, 128), "b": (2, 129, 128), "g": (1, 129, 128)},
                **{"129x128": (2, 129, 128), "128x128": (3, 128, 128)},
            },
        ),
        (LARGE, {"stack": True}, {"129x128": (7, 129, 128), "128x128": (3, 128, 128)}),
        (LARGE, {"stack": False}, {name: (1, *x)[-3:] for name, x in LARGE.items()}),
        # Cutting them into blocks copies them anyway.
        (dict.fromkeys("ab", (2, 300, 150)), {"block_size": 150}, {"150x150": (8, 150, 150)}),
        # A stack and a parameter of the same name
        (
            {"4x6": (2, 300, 300), "a": (4, 6), "b": (4, 6)},
            {},
            {"4x6": (2, 300, 300), "4x6'": (2, 4, 6)},
        ),
    ],
    ids=["by default", "stacked", "not stacked", "in blocks", "of one name"],
)
def test_large_batches_keep_an_entry_of_their_own(shapes: Any, given: Any, arrays: Any) -> None:
    """Parameters that are batches already need no copy; others share a stack at any size."""
    axes = {"*": MatrixAxes(rows=-2, columns=-1)}
    view = curvax.on_matrices(curvax.momentum(), weight_dimension_numbers=axes, **given)
    zeros = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    found = jax.eval_shape(view.init, zeros).inner
    assert {name: own.inner.mu.shape for name, own in found.items()} == arrays


def test_a_stack_of_mixed_dtypes_has_the_widest_and_updates_their_own() -> None:
    # Layouts follow from shapes alone: gradients may come in other dtypes than parameters.
    params = {"a": jnp.ones((4, 6)), "b": jnp.ones((4, 6), jnp.bfloat16)}
    for stack, of_b in ((True, "float32"), (False, "bfloat16")):
        view = curvax.on_matrices(curvax.momentum(), stack=stack)
        updates, state = view.update(params, view.init(params), params)
        for name, dtype in (("a", "float32"), ("b", of_b)):
            entries = curvax.state_of(view, params, state, name)
            assert [x.dtype for place, x in entries.items() if "mu" in place] == [jnp.dtype(dtype)]
            assert updates[name].dtype == params[name].dtype


def test_four_calls_of_the_library_are_around_a_direction() -> None:
    """Of routing, view, chunks and guard: `tests/shared/own_calls.py` counts what they call."""
    files: list[str] = []
    room = Path(__file__).resolve().parents[2] / "transforms"

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        paths = [Path(frame.filename).resolve() for frame in inspect.stack(0)]
        files.extend(path.stem for path in paths if path.is_relative_to(room))
        return updates, state

    optimizer = curvax.assemble(optax.GradientTransformation(optax.init_empty_state, update), 0.1)
    params = {"kernel": jnp.ones((2, 3)), "bias": jnp.ones(3)}
    optimizer.update(params, optimizer.init(params), params)
    assert files == ["_guard", "_chunks", "_view", "_routing"]


HEADS, AMPLIFIED = 4, 3.4445**5


@pytest.mark.parametrize("group", [1, 2, 4])
@pytest.mark.parametrize("split", [True, False])
def test_heads_in_groups_follow_the_transcription(group: int, split: bool) -> None:
    """Of kernels with an axis of heads, and of kernels in which heads are columns."""
    draw = np.random.default_rng(0)
    gradients = [draw.standard_normal((6, HEADS * 3)) for _ in range(8)]
    columns = (1, 2) if split else 1
    optimizer = curvax.assemble(
        curvax.scale_by_muon(),
        1.0,
        weight_dimension_numbers={
            "*query/kernel": curvax.MatrixAxes(0, columns, column_heads=HEADS // group)
        },
    )
    shape = (6, HEADS, 3) if split else (6, HEADS * 3)
    trees = [{"query": {"kernel": g.reshape(shape)}} for g in gradients]
    with jax.enable_x64(True):
        found, _ = run_scanned(optimizer, trees)
    on_groups = functools.partial(on_head_groups, muon, heads=HEADS, group=group, axis=1)
    for x, expected in zip(found, on_groups(gradients), strict=True):
        own = -x["query"]["kernel"].reshape(6, -1)
        assert_close(own, expected, condition=AMPLIFIED)
