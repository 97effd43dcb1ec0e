"""The matrix view: which parameters are matrices, how they are cut out, and in which trees."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.core import FrozenDict
from helpers import (
    ALL_CELLS,
    assert_close,
    gradients_like,
    normal_like,
    run,
    share,
    with_spectrum,
)

import curvax
from curvax import MatrixAxes, MatrixRule
from curvax.transforms.matrices._axes import matrix_form

# Directions on batches of matrices, in settings in which their errors stay near one rounding, so
# that two ways of running them agree in the default bound of assert_close.
DIRECTIONS: dict[str, Callable[[], optax.GradientTransformation]] = {
    "muon": functools.partial(curvax.scale_by_muon, coefficients="classical", steps=3),
    "racs": curvax.scale_by_racs,
    "asgo-left": functools.partial(curvax.scale_by_asgo, side="left", eps=0.1),
    "asgo-right": functools.partial(curvax.scale_by_asgo, side="right", eps=0.1),
    "svd": functools.partial(curvax.orthogonalize, "svd"),
}
directions = [  # whose tests share compiled programs, so they run in one worker
    pytest.param(name, marks=pytest.mark.xdist_group(f"view {name}")) for name in DIRECTIONS
]
every_direction = pytest.mark.parametrize("direction", directions)


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


def in_one_program(transformation: Any) -> Callable[[list[Any]], list[Any]]:
    """The updates of a list of gradients; compiles once for each shape and number of steps."""

    @jax.jit
    def scanned(params: Any, gradients: Any) -> Any:
        def step(state: Any, gradient: Any) -> Any:
            return transformation.update(gradient, state, params)[::-1]

        return jax.lax.scan(step, transformation.init(params), gradients)[1]

    def updates_of(gradients: list[Any]) -> list[Any]:
        together = jax.tree.map(lambda *steps: np.stack(steps), *gradients)
        updates = jax.device_get(scanned(gradients[0], together))
        return [jax.tree.map(lambda x: x[i], updates) for i in range(len(gradients))]  # noqa: B023

    return updates_of


@functools.cache
def compiled(direction: str) -> Callable[[list[Any]], list[Any]]:
    """The directions of a batch of matrices without any view."""
    return in_one_program(DIRECTIONS[direction]())


def computations(f: Callable[..., Any], *args: Any) -> Any:
    """For each output of `f` a digest of all that it follows from: equal if the same is computed.

    The order in which outputs are computed is left out, and so are the names of arguments.
    """
    jaxpr, shapes = jax.make_jaxpr(f, return_shape=True)(*args)
    known: dict[Any, str] = {}

    def of(x: Any) -> str:
        return repr(x) if hasattr(x, "val") else known[x]

    def digest(text: str) -> str:
        return hashlib.sha256(re.sub(" at 0x[0-9a-f]+", "", text).encode()).hexdigest()

    for variable, value in zip(jaxpr.jaxpr.constvars, jaxpr.consts, strict=True):
        known[variable] = digest(f"{variable.aval} {np.asarray(value).tobytes()}")
    known |= {x: digest(f"argument {i} {x.aval}") for i, x in enumerate(jaxpr.jaxpr.invars)}
    for equation in jaxpr.eqns:
        inputs = [of(x) for x in equation.invars]
        for i, x in enumerate(equation.outvars):
            known[x] = digest(f"{equation.primitive} {equation.params} {inputs} {i} {x.aval}")
    return jax.tree.unflatten(jax.tree.structure(shapes), map(of, jaxpr.jaxpr.outvars))


# --- One parameter as matrices -------------------------------------------------------------------


@st.composite
def parameters_and_axes(draw: st.DrawFn) -> tuple[tuple[int, ...], MatrixAxes, int | None]:
    """A shape, a way to see it as matrices, and a block size (with heads: none)."""
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=4)))
    order = draw(st.permutations(range(len(shape))))
    first, second = sorted(draw(st.tuples(*[st.integers(0, len(shape))] * 2)))
    rows, columns = tuple(order[:first]), tuple(order[first:second])
    negative = draw(st.booleans())
    heads = [
        draw(st.sampled_from([d for d in range(1, size + 1) if size % d == 0]))
        for size in (math.prod(shape[a] for a in rows), math.prod(shape[a] for a in columns))
    ]
    axes = MatrixAxes(rows, tuple(a - len(shape) for a in columns) if negative else columns, *heads)
    block_size = draw(st.none() | st.integers(1, 6)) if heads == [1, 1] else None
    return shape, axes, block_size


def tiles_by_hand(x: np.ndarray, axes: MatrixAxes, block_size: int | None) -> list[np.ndarray]:
    """The matrices of `x`, unpadded, in the order of batch, row tile, column tile."""
    rows, columns = (tuple(a % x.ndim for a in part) for part in (axes.rows, axes.columns))  # pyright: ignore
    batch = [a for a in range(x.ndim) if a not in (*rows, *columns)]
    sizes = [math.prod(x.shape[a] for a in part) for part in (batch, rows, columns)]
    stack = np.transpose(x, (*batch, *rows, *columns)).reshape(sizes)

    def edges(size: int, heads: int) -> list[tuple[int, int]]:
        tiles = heads if block_size is None else -(-size // block_size)
        length = -(-size // tiles)
        return [(i * length, min((i + 1) * length, size)) for i in range(tiles)]

    return [
        matrix[top:bottom, left:right]
        for matrix in stack
        for top, bottom in edges(sizes[1], axes.row_heads)
        for left, right in edges(sizes[2], axes.column_heads)
    ]


@hypothesis.settings(max_examples=40, deadline=None, derandomize=True, database=None)
@hypothesis.example(((5, 3), MatrixAxes((0,), (1,)), 2))  # padded on both sides
@hypothesis.example(((3, 2, 5, 4), MatrixAxes((3, 0), (2,)), 3))
@hypothesis.example(((4, 3, 6), MatrixAxes((0,), (-1,), row_heads=2, column_heads=3), None))
@hypothesis.given(parameters_and_axes())
def test_matrices_are_the_tiles_of_the_parameter(
    drawn: tuple[tuple[int, ...], MatrixAxes, int | None],
) -> None:
    shape, axes, block_size = drawn
    form = matrix_form("w", shape, axes, block_size)
    x = np.arange(1.0, 1 + math.prod(shape)).reshape(shape)

    @jax.jit
    def there_and_back(x: Any) -> tuple[Any, Any]:
        matrices = form.to_matrices(x)
        return matrices, form.from_matrices(matrices)

    matrices, back = jax.device_get(there_and_back(x))
    assert matrices.shape == (form.count, *form.tile)
    assert block_size is None or max(form.tile) <= block_size
    for matrix, tile in zip(matrices, tiles_by_hand(x, axes, block_size), strict=True):
        padded = np.zeros(form.tile)
        padded[: tile.shape[0], : tile.shape[1]] = tile
        np.testing.assert_array_equal(matrix, padded)
    np.testing.assert_array_equal(back, x)


@pytest.mark.parametrize(
    ("size", "block_size", "blocks", "length"),
    [(10, 4, 3, 4), (9, 8, 2, 5), (12, 4, 3, 4), (3, 4, 1, 3), (1201, 1200, 2, 601)],
)
def test_blocks_are_balanced(size: int, block_size: int, blocks: int, length: int) -> None:
    form = matrix_form("w", (size, 1), MatrixAxes(0, 1), block_size)
    assert (form.row_tiles, form.tile[0]) == (blocks, length)


@every_direction
def test_padding_never_changes_a_block(direction: str) -> None:
    # 7 × 10 in blocks of at most 4 is 2 × 3 blocks of 4 × 4, of which the last are 3 and 2 wide.
    gradients = conditioned_gradients((7, 10), steps=3)
    view = curvax.on_matrices(DIRECTIONS[direction](), matrices="w", block_size=4)
    updates = in_one_program(view)([{"w": gradient} for gradient in gradients])
    rows, columns = (slice(0, 4), slice(4, 7)), (slice(0, 4), slice(4, 8), slice(8, 10))
    # Of one that is not padded, and of one that is on both sides, or of all.
    blocks = itertools.product(rows, columns) if ALL_CELLS else zip(rows, columns[::2], strict=True)
    for block in blocks:
        alone = compiled(direction)([g[block] for g in gradients])
        in_view = [update["w"][block] for update in updates]
        # A block of a well-conditioned matrix is less well conditioned.
        assert_close(in_view, alone, condition=16)


@every_direction
def test_one_block_is_the_whole_matrix(direction: str) -> None:
    matrix = {"a": jax.ShapeDtypeStruct((4, 6), jnp.float32)}

    def computed(**view: Any) -> Any:
        transformation = curvax.on_matrices(DIRECTIONS[direction](), matrices="a", **view)
        state = jax.eval_shape(transformation.init, matrix)
        return (
            computations(transformation.init, matrix),
            computations(transformation.update, matrix, state, matrix),
        )

    assert computed(block_size=6) == computed()
    assert computed(block_size=5) != computed()


# Every way to be matrices, all of them 4 × 6 or 6 × 4: batches of them, and where the axes are.
BATCHES = {"a": (1, 4, 6), "b": (1, 4, 6), "c": (1, 6, 4), "layers": (3, 4, 6)}
BATCHES |= {"heads": (3, 6, 4), "merged heads": (3, 6, 4), "heads in rows": (2, 4, 6)}
AXES = {
    "layers": MatrixAxes(rows=1, columns=2),
    "heads": MatrixAxes(0, 2),
    "merged heads": MatrixAxes(0, 1, column_heads=3),
    "heads in rows": MatrixAxes(0, 1, row_heads=2),
}
PLAIN = ("a", "c", "layers")


def as_parameter(name: str, batch: Any) -> Any:
    """A batch of matrices as it lies in the parameter of this name."""
    if name == "heads":
        return np.moveaxis(batch, 0, 1)
    if name in AXES and name != "layers":
        return np.concatenate(list(batch), axis=1 if name == "merged heads" else 0)
    return batch if name == "layers" else batch[0]


def as_batch(name: str, parameter: Any) -> Any:
    """The inverse of `as_parameter`."""
    if name == "heads":
        return np.moveaxis(parameter, 1, 0)
    if name in AXES and name != "layers":
        axis = 1 if name == "merged heads" else 0
        return np.stack(np.split(parameter, BATCHES[name][0], axis=axis))
    return parameter if name == "layers" else parameter[None]


@functools.cache
def batches() -> dict[str, list[np.ndarray]]:
    return {
        name: [np.asarray(g) for g in conditioned_gradients(shape, seed=i)]
        for i, (name, shape) in enumerate(BATCHES.items())
    }


@functools.cache
def alone(direction: str) -> dict[str, list[np.ndarray]]:
    """The directions of every batch, each matrix by itself."""
    found = {}
    for name, gradients in batches().items():
        number = BATCHES[name][0]
        runs = [compiled(direction)([g[i] for g in gradients]) for i in range(number)]
        found[name] = [np.stack(step) for step in zip(*runs, strict=True)]
    return found


def together(direction: str, stack: bool, names: tuple[str, ...]) -> dict[str, list[np.ndarray]]:
    """The directions of every batch, from one view of all of these parameters."""
    gradients = [
        {name: as_parameter(name, batches()[name][step]) for name in names} for step in range(2)
    ]
    axes = {name: AXES[name] for name in names if name in AXES}
    view = curvax.on_matrices(DIRECTIONS[direction](), stack=stack, weight_dimension_numbers=axes)
    summary = curvax.summarize(view, gradients[0])
    assert summary.count("in stack 4x6") == (4 if stack else 0)
    assert summary.count("in stack 6x4") == (3 if stack else 0)
    assert summary.count("in an entry of its own") == (0 if stack else len(names))
    updates = in_one_program(view)(gradients)
    return {name: [as_batch(name, u[name]) for u in updates] for name in names}


@every_direction
def test_heads_and_scanned_layers_run_alone(direction: str) -> None:
    assert_close(together(direction, True, tuple(BATCHES)), alone(direction))


@pytest.mark.parametrize("direction", share(directions, of=2))
def test_unstacked_and_bare_agree(direction: str) -> None:
    viewed = together(direction, False, PLAIN)
    assert_close(viewed, {name: alone(direction)[name] for name in PLAIN})


def test_head_wise_splits_queries_and_keys_alone() -> None:
    kernels = {f"{name}/kernel": jnp.ones((8, 2, 4)) for name in ("query", "key", "value")}
    head_wise = MatrixRule(head_wise=True)(kernels)
    assert head_wise == {
        "query/kernel": MatrixAxes(rows=0, columns=2),
        "key/kernel": MatrixAxes(rows=0, columns=2),
        "value/kernel": MatrixAxes(rows=0, columns=(1, 2)),
    }


def test_large_matrices_keep_an_entry_of_their_own() -> None:
    params = {f"{name}/kernel": jnp.zeros((129, 128)) for name in "ab"}
    params |= {f"{name}/kernel": jnp.zeros((128, 128)) for name in "cd"}
    for stack, keys in (
        (None, {"a/kernel", "b/kernel", "128x128"}),
        (True, {"129x128", "128x128"}),
        (False, set(params)),
    ):
        state = curvax.on_matrices(curvax.momentum(), stack=stack).init(params)
        assert set(state.inner.inner.mu) == keys


def test_a_stack_and_a_parameter_of_the_same_name_stay_apart() -> None:
    params = {"4x6": jnp.zeros((300, 300)), "a": jnp.zeros((4, 6)), "b": jnp.zeros((4, 6))}
    state = curvax.on_matrices(curvax.momentum()).init(params)
    assert sorted(x.shape for x in state.inner.inner.mu.values()) == [(1, 300, 300), (2, 4, 6)]


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


# --- Specifications ------------------------------------------------------------------------------

SPEC_PARAMS = {
    "dense": {"kernel": jnp.ones((4, 6)), "bias": jnp.ones(6)},
    "layers": {"kernel": jnp.ones((2, 4, 6)), "gate": jnp.ones((2, 4, 6))},
}
LAYERS = MatrixAxes(rows=1, columns=2)
OPTAX_LAYERS = optax.contrib.MuonDimensionNumbers(reduction_axis=1, output_axis=2)
SPEC_TREE = {
    "dense": {"kernel": MatrixAxes(0, 1), "bias": None},
    "layers": {"kernel": LAYERS, "gate": LAYERS},
}
SPECS = {
    "tree": SPEC_TREE,
    "callable": lambda params: jax.tree.map(
        lambda x: {1: None, 2: MatrixAxes(0, 1), 3: LAYERS}[x.ndim], params
    ),
    "prefix": {"dense": SPEC_TREE["dense"], "layers": LAYERS},
    "pattern": {"layers/*": LAYERS},
    "pattern of a node": {"layers": LAYERS},
    "first pattern wins": {"layers/kernel": LAYERS, "*/gate": LAYERS, "layers/*": None},
    "optax": {"layers": OPTAX_LAYERS},
    "optax in a tree": {
        "dense": SPEC_TREE["dense"],
        "layers": dict.fromkeys(SPEC_TREE["layers"], OPTAX_LAYERS),
    },
    "negative axes": {"layers/*": MatrixAxes(rows=-2, columns=-1)},
}


def step_with(spec: Any) -> tuple[Any, Any]:
    """What a first step computes with these axes, and the shapes of what matrices have."""
    # Both look at the tree, once whole and once with holes where other parameters were.
    rule = MatrixRule(weight_dimension_numbers=spec, stack=False)
    optimizer = curvax.muon(0.1, method="svd", matrices=rule)

    def step(params: Any) -> Any:
        return optimizer.update(params, optimizer.init(params), params)

    return computations(step, SPEC_PARAMS), jax.eval_shape(step, SPEC_PARAMS)[1]


@functools.cache
def step_with_tree() -> Any:
    return step_with(SPEC_TREE)[0]


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_all_ways_to_specify_axes_are_the_same(spec: Any) -> None:
    computed, state = step_with(spec)
    assert computed == step_with_tree()
    matrices = state.inner_states["matrices"].inner_state[0].inner.inner[0][0].mu
    assert {name: x.shape for name, x in matrices.items()} == {
        "dense/kernel": (1, 4, 6),
        "layers/gate": (2, 4, 6),
        "layers/kernel": (2, 4, 6),
    }


@pytest.mark.parametrize("last", ["out", "wo"])
def test_a_prefix_may_end_at_a_node_called_value(last: str) -> None:
    params = {"attention": {n: {"kernel": jnp.ones((4, 4))} for n in ("key", "value", last)}}
    spec = {"attention": {"key": MatrixAxes(0, 1), "value": None, last: MatrixAxes(1, 0)}}
    assert MatrixRule(weight_dimension_numbers=spec)(params) == {
        "attention/key/kernel": MatrixAxes(0, 1),
        "attention/value/kernel": "weight_dimension_numbers is None",
        f"attention/{last}/kernel": MatrixAxes(1, 0),
    }


@pytest.mark.parametrize(
    "selection",
    [
        "a/*",
        ["a/kernel"],
        ("a",),
        ["a/kernel", "a/none"],
        lambda path, leaf: path == "a/kernel" and leaf.ndim == 2,
    ],
    ids=["pattern", "list", "node", "absent leaf", "predicate"],
)
def test_matrices_can_be_selected(selection: Any) -> None:
    params = {"a": {"kernel": jnp.ones((4, 4)), "none": None}, "b": {"kernel": jnp.ones((4, 4))}}
    treatments = MatrixRule(matrices=selection)(params)
    assert treatments == {"a/kernel": MatrixAxes(0, 1), "b/kernel": "not selected by matrices"}


def test_all_takes_every_parameter_as_a_matrix() -> None:
    params = {
        "embed/embedding": jnp.ones((9, 4)),
        "query/bias": jnp.ones((2, 4)),
        "norm/scale": jnp.ones(4),
        "t": jnp.ones(()),
        "mask": jnp.ones((1, 1, 5)),
    }
    forms = {
        name: matrix_form(name, params[name].shape, axes)
        for name, axes in MatrixRule(matrices="all")(params).items()
        if isinstance(axes, MatrixAxes)
    }
    assert {name: (form.count, *form.tile) for name, form in forms.items()} == {
        "embed/embedding": (1, 9, 4),
        "query/bias": (1, 1, 8),
        "norm/scale": (1, 1, 4),
        "t": (1, 1, 1),
        "mask": (1, 1, 5),
    }


@pytest.mark.parametrize(
    "rule",
    [
        {"matrices": ["a/*", "b/*"], "weight_dimension_numbers": {"b/*": None}},
        {"matrices": ["a/*", "head/*"], "output_layer": "auto"},
        {"matrices": ["a/*", "head/*"], "output_layer": "head/*"},
        {"matrices": ["a/*", "head/*"], "output_layer": lambda path, leaf: path.startswith("head")},
    ],
    ids=["specified as none", "output layer found", "output layer named", "output layer predicate"],
)
def test_a_pattern_may_fit_only_what_is_no_matrix_for_another_reason(rule: dict[str, Any]) -> None:
    params = {name: {"kernel": jnp.ones((4, 4))} for name in ("a", "b", "head")}
    optimizer = curvax.racs(0.1, matrices=MatrixRule(**{"output_layer": None, **rule}))
    updates, states = run(optimizer, [params], params)
    assert all(np.any(x) for x in jax.tree.leaves(updates))
    places = curvax.state_of(optimizer, params, states[0], "a/kernel")
    assert any("rows" in place.split("/") for place in places)


# --- The default rule ----------------------------------------------------------------------------


class LinenTransformer(nn.Module):
    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = nn.Embed(32, 8, name="embed")(tokens)
        x = nn.MultiHeadDotProductAttention(2, name="attention")(nn.LayerNorm(name="norm")(x))
        x = nn.Dense(8, name="mlp")(nn.Dense(16, name="wide")(x))
        return nn.Dense(32, name="decoder")(nn.RMSNorm(name="ln_f")(x))


class NnxTransformer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(32, 8, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(2, 8, decode=False, rngs=rngs)
        self.norm, self.ln_f = nnx.LayerNorm(8, rngs=rngs), nnx.RMSNorm(8, rngs=rngs)
        self.wide, self.mlp = nnx.Linear(8, 16, rngs=rngs), nnx.Linear(16, 8, rngs=rngs)
        self.decoder = nnx.Linear(8, 32, rngs=rngs)


def transformer(kind: str) -> Any:
    """The abstract parameters of the transformer above."""
    if kind == "linen":
        tokens = jax.ShapeDtypeStruct((1, 4), jnp.int32)
        return jax.eval_shape(LinenTransformer().init, jax.random.key(0), tokens)["params"]
    state = nnx.state(nnx.eval_shape(lambda: NnxTransformer(nnx.Rngs(0))), nnx.Param)
    return nnx.to_pure_dict(state) if kind == "nnx pure dict" else state


@pytest.mark.parametrize("kind", ["linen", "nnx", "nnx pure dict"])
@pytest.mark.parametrize("output_layer", [None, "auto"])
def test_the_default_rule_on_a_transformer(kind: str, output_layer: str | None) -> None:
    attention_in, plain = MatrixAxes(rows=0, columns=(1, 2)), MatrixAxes(rows=0, columns=1)
    expected = {
        "attention/key/bias": "bias of key",
        "attention/key/kernel": attention_in,
        "attention/out/bias": "vector",
        "attention/out/kernel": MatrixAxes(rows=(0, 1), columns=2),
        "attention/query/bias": "bias of query",
        "attention/query/kernel": attention_in,
        "attention/value/bias": "bias of value",
        "attention/value/kernel": attention_in,
        "decoder/bias": "vector",
        "decoder/kernel": "output layer" if output_layer else plain,
        "embed/embedding": "embedding",
        "ln_f/scale": "vector",
        "mlp/bias": "vector",
        "mlp/kernel": plain,
        "norm/bias": "vector",
        "norm/scale": "vector",
        "wide/bias": "vector",
        "wide/kernel": plain,
    }
    assert MatrixRule(output_layer=output_layer)(transformer(kind)) == expected


@pytest.mark.parametrize(
    ("path", "shape", "expected"),
    [
        ("Conv_0/kernel", (3, 3, 4, 8), MatrixAxes((0, 1, 2), 3)),
        ("conv/kernel", (3, 4, 8), MatrixAxes((0, 1), 2)),
        ("layers/conv1/kernel", (3, 3, 3, 4, 8), MatrixAxes((0, 1, 2, 3), 4)),
        ("GroupNorm_0/scale", (2, 4), "scale of GroupNorm_0"),
        ("ln_1/weight", (2, 4), "weight of ln_1"),
        ("position_embedding", (1, 16, 8), "embedding"),
        ("wte/weight", (32, 8), "embedding"),
        ("unembed/kernel", (8, 32), MatrixAxes(0, 1)),
        ("patch_embed/kernel", (12, 8), MatrixAxes(0, 1)),
        ("0", (4, 8), MatrixAxes(0, 1)),
        ("cls_token", (1, 1, 8), "vector"),
    ],
)
def test_the_default_rule_on_single_parameters(
    path: str, shape: tuple[int, ...], expected: Any
) -> None:
    assert MatrixRule()({path: jax.ShapeDtypeStruct(shape, jnp.float32)}) == {path: expected}


@pytest.mark.parametrize("layer", ["Dense_0", "query", "value", "out"])
def test_a_scanned_dense_layer_is_never_merged(layer: str) -> None:
    """Its kernel `(layers, in, out)` has as many axes as an attention kernel; its bias tells."""

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
            return nn.Dense(8, name=layer)(x), None

    blocks = nn.scan(Block, variable_axes={"params": 0}, split_rngs={"params": True}, length=3)
    x = jax.ShapeDtypeStruct((1, 8), jnp.float32)
    params = jax.eval_shape(blocks().init, jax.random.key(0), x, None)["params"]
    assert params[layer]["kernel"].shape == (3, 8, 8)
    with pytest.raises(ValueError, match=f"{layer}/kernel.*weight_dimension_numbers"):
        MatrixRule()(params)


@pytest.mark.parametrize(
    ("shapes", "output_layer", "found"),
    [
        ({"embed/embedding": (32, 8), "dec/kernel": (8, 32), "mlp/kernel": (8, 8)}, "auto", "dec"),
        ({"lm_head/kernel": (8, 32), "mlp/kernel": (8, 8)}, "auto", "lm_head"),
        ({"readout_0/weight": (8, 32), "mlp/weight": (8, 8)}, "auto", "readout_0"),
        # Both by shape, one of them by name too: the hidden layer stays a matrix.
        ({"wte/embedding": (32, 8), "up/kernel": (8, 32), "head/kernel": (8, 32)}, "auto", "head"),
        ({"a/kernel": (8, 32), "b/kernel": (8, 8)}, "a/*", "a"),
        ({"a/kernel": (8, 32), "b/kernel": (8, 8)}, ["a"], "a"),
        ({"a/kernel": (8, 32), "b/kernel": (8, 8)}, lambda path, x: x.shape[1] == 32, "a"),
        ({"a/kernel": (8, 32), "b/kernel": (8, 8)}, "auto", None),
        ({"head/kernel": (8, 32), "b/kernel": (8, 8)}, None, None),
    ],
    ids=[
        *("by shape", "by name", "by numbered name", "by both", "by pattern", "by node"),
        *("by predicate", "none to find", "not asked for"),
    ],
)
def test_the_output_layer_goes_to_adam(
    shapes: Mapping[str, tuple[int, ...]], output_layer: Any, found: str | None
) -> None:
    params = {name: jnp.ones(shape) for name, shape in shapes.items()}
    optimizer = curvax.racs(0.1, matrices=MatrixRule(output_layer=output_layer))
    state = jax.jit(optimizer.init)(params)
    for name in params:
        places = curvax.state_of(optimizer, params, state, name)
        in_adam = any("nu" in place.split("/") for place in places)
        assert in_adam == (name.split("/")[0] == found or "embed" in name), name


def test_a_second_head_beside_the_output_layer_is_a_matrix() -> None:
    # A value head beside the language model's: by name both are output layers, by shape one is.
    shapes = {"embed/embedding": (32, 8), "lm_head/kernel": (8, 32), "head/kernel": (8, 2)}
    params = {name: jnp.ones(shape) for name, shape in shapes.items()}
    optimizer = curvax.racs(0.1)
    updates, _ = run(optimizer, [params], params)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(updates))


# --- Trees of every kind -------------------------------------------------------------------------


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Layer:
    kernel: Any
    bias: Any = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Network:
    dense: Layer
    head: Layer


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class CallableLayer:
    """Like an Equinox module: a pytree of its parameters that is also the function."""

    weight: Any
    bias: Any = None

    def __call__(self, x: jax.Array) -> jax.Array:
        return x @ self.weight


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class CallableNetwork:
    dense: CallableLayer
    head: CallableLayer

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.head(self.dense(x))


class NnxNetwork(nnx.Module):
    def __init__(self) -> None:
        self.dense = nnx.Linear(4, 6, rngs=nnx.Rngs(0))
        self.head = nnx.Linear(6, 4, use_bias=False, rngs=nnx.Rngs(0))


def as_dict(kernel: Any, bias: Any, head: Any) -> Any:
    return {"dense": {"kernel": kernel, "bias": bias}, "head": {"kernel": head}}


def as_nnx_state(kernel: Any, bias: Any, head: Any) -> Any:
    structure = jax.tree.structure(nnx.state(NnxNetwork(), nnx.Param))
    return structure.unflatten(jax.tree.leaves(as_dict(kernel, bias, head)))


def as_partitioned(kernel: Any, bias: Any, head: Any) -> Any:
    return as_dict(
        nn.Partitioned(kernel, ("in", "out")),
        nn.Partitioned(bias, ("out",)),
        nn.Partitioned(head, (None, "out")),
    )


TREES: dict[str, Callable[..., Any]] = {
    "Linen dict": as_dict,
    "frozen dict": lambda *leaves: FrozenDict(as_dict(*leaves)),
    "Partitioned boxes": as_partitioned,
    "nnx.State": as_nnx_state,
    "flat dict": lambda kernel, bias, head: {"kernel": kernel, "b": bias, "head": head},
    "tuple": lambda kernel, bias, head: (kernel, bias, head),
    "list": lambda kernel, bias, head: [kernel, (bias,), [head]],
    "dataclass": lambda kernel, bias, head: Network(Layer(kernel, bias), Layer(head)),
    "callable": lambda kernel, bias, head: CallableNetwork(
        CallableLayer(kernel, bias), CallableLayer(head)
    ),
}
LIKE_FLAX = ("Linen dict", "frozen dict", "Partitioned boxes", "nnx.State", "dataclass")
METHODS: dict[str, Callable[..., Any]] = {
    "muon": functools.partial(curvax.muon, steps=2),
    "racs": functools.partial(curvax.racs, matrices=MatrixRule(output_layer=None), iterations=2),
    "asgo": curvax.asgo,
}


@functools.cache
def tree_gradient() -> tuple[jax.Array, ...]:
    return gradients_like(tuple(np.zeros(shape) for shape in ((4, 6), (6,), (6, 4))), 1)[0]


def first_step(method: str, tree: str) -> Callable[..., Any]:
    """From a gradient, as leaves in the order of `TREES`: updates and what matrices have."""
    build, optimizer = TREES[tree], METHODS[method](0.1, weight_decay=0.1)

    def step(*gradient: Any) -> tuple[list[Any], Any]:
        params = build(*gradient)
        before = optimizer.init(params)
        updates, state = optimizer.update(params, before, params)
        assert jax.tree.structure(updates) == jax.tree.structure(params)
        assert jax.tree.map(jax.typeof, state) == jax.tree.map(jax.typeof, before)
        leaves = dict(zip(jax.tree.leaves(build(0, 1, 2)), jax.tree.leaves(updates), strict=True))
        return [leaves[i] for i in range(3)], state.inner_states["matrices"]

    return step


@functools.cache
def step_of_dict(method: str) -> Any:
    """What it computes for a dict, which is something."""
    step = first_step(method, "Linen dict")
    updates, matrices = jax.jit(step)(*tree_gradient())
    assert all(np.any(x) for x in jax.tree.leaves(updates))
    assert any(x.ndim >= 2 and np.any(x) for x in jax.tree.leaves(matrices))
    return computations(step, *tree_gradient())


@pytest.mark.parametrize(
    ("method", "tree"), share(itertools.product(METHODS, list(TREES)[1:]), of=3)
)
def test_every_kind_of_tree(method: str, tree: str) -> None:
    """The same is computed, in whatever order."""
    assert computations(first_step(method, tree), *tree_gradient()) == step_of_dict(method)


def test_other_computations_would_be_noticed() -> None:
    """The negative control."""
    x = jnp.ones((2, 2))
    plain, swapped, other = (
        computations(f, x, x)
        for f in (
            lambda a, b: {"sum": a + 2 * b, "product": a @ b},
            lambda a, b: {"product": a @ b, "sum": a + 2 * b},
            lambda a, b: {"sum": b + 2 * a, "product": a @ b},
        )
    )
    assert plain == swapped
    assert plain["product"] == other["product"] and plain["sum"] != other["sum"]


@pytest.mark.parametrize("tree", LIKE_FLAX)
def test_parameters_have_the_same_names_in_every_tree_of_flax(tree: str) -> None:
    params = TREES[tree](*tree_gradient())
    optimizer = curvax.muon(0.1, matrices=MatrixRule(stack=False))
    state = optimizer.init(params)
    for name, fields in (("dense/kernel", "mu"), ("dense/bias", "mu nu"), ("head/kernel", "mu")):
        places = curvax.state_of(optimizer, params, state, name)
        counter = ["skipped"] if "nu" in fields else ["skipped/" + name]  # of vectors, one array
        moments = [f"{field}/{name}" for field in fields.split()]
        ends = counter + moments
        assert len(places) == len(ends), name
        assert all(place.endswith(end) for place, end in zip(places, ends, strict=True)), name


def test_a_callable_tree_of_axes_is_a_tree() -> None:
    """A callable tree must not be taken for a function from parameters to a specification."""
    params = TREES["callable"](*tree_gradient())
    spec = jax.tree.map(lambda x: MatrixAxes(1, 0) if x.ndim == 2 else None, params)
    treatments = MatrixRule(weight_dimension_numbers=spec)(params)
    assert treatments == {
        "dense/weight": MatrixAxes(1, 0),
        "dense/bias": "weight_dimension_numbers is None",
        "head/weight": MatrixAxes(1, 0),
    }


def test_a_callable_tree_of_booleans_is_a_mask() -> None:
    params = TREES["callable"](*tree_gradient())
    mask = jax.tree.map(lambda x: x.ndim == 2, params)
    optimizer = curvax.muon(0.1, steps=2, weight_decay=0.1, weight_decay_mask=mask)
    plain = curvax.muon(0.1, steps=2)
    gradients = [params]
    decayed, undecayed = (run(o, gradients, params)[0][0] for o in (optimizer, plain))
    assert_close(decayed.dense.bias, undecayed.dense.bias, factor=0)
    assert_close(decayed.head.weight, undecayed.head.weight - 0.01 * params.head.weight, 4)


def test_tied_parameters_are_one_parameter() -> None:
    class Tied(nnx.Module):
        def __init__(self) -> None:
            self.first = nnx.Linear(4, 4, use_bias=False, rngs=nnx.Rngs(0))
            self.second = nnx.Linear(4, 4, use_bias=False, rngs=nnx.Rngs(0))
            self.second.kernel = self.first.kernel

    def loss(model: Tied) -> jax.Array:
        return jnp.sum(jnp.sin(model.second(model.first(jnp.eye(4)))))

    model = Tied()
    before = model.first.kernel[...]
    optimizer = nnx.Optimizer(model, curvax.muon(0.1, method="svd"), wrt=nnx.Param)
    nnx.jit(lambda optimizer, model: optimizer.update(model, nnx.grad(loss)(model)))(
        optimizer, model
    )
    gradient = jax.jit(jax.grad(lambda w: jnp.sum(jnp.sin(w @ w))))(before)
    plain = {"first": {"kernel": before}}
    (updates,), _ = run(curvax.muon(0.1, method="svd"), [{"first": {"kernel": gradient}}], plain)
    assert model.first.kernel is model.second.kernel
    # The two gradients agree up to rounding, of which small singular values make more.
    step = model.first.kernel[...] - before
    assert_close(step, updates["first"]["kernel"], condition=64)


def test_low_rank_factors_are_matrices_and_the_rest_stays() -> None:
    model = nnx.LoRALinear(4, 6, lora_rank=2, rngs=nnx.Rngs(0))
    kernel = model.kernel[...]
    factors = nnx.state(model, nnx.LoRAParam)
    gradients = normal_like(jax.random.key(3), factors)
    transformation = curvax.muon(0.1, method="svd")
    optimizer = nnx.Optimizer(model, transformation, wrt=nnx.LoRAParam)
    summary = curvax.summarize(transformation, factors)
    assert "lora/lora_a | 4×2 float32 | 1 matrix 4×2" in summary
    assert "lora/lora_b | 2×6 float32 | 1 matrix 2×6" in summary
    before = jax.tree.map(jnp.copy, nnx.to_pure_dict(factors))
    nnx.jit(lambda optimizer, model: optimizer.update(model, gradients))(optimizer, model)
    plain = nnx.to_pure_dict(gradients)
    (updates,), _ = run(curvax.muon(0.1, method="svd"), [plain], before)
    after = nnx.to_pure_dict(nnx.state(model, nnx.LoRAParam))
    assert_close(after, optax.apply_updates(before, updates), 4)
    assert_close(model.kernel[...], kernel, factor=0)
