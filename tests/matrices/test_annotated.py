"""Arrays that know their axes, in boxes like those of Haliax, Simply and penzai."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import curvax
from curvax import MatrixAxes, MatrixRule
from curvax.transforms._paths import named_leaves

STATIC = {"static": True}


class Axis(NamedTuple):
    """As in Haliax."""

    name: str
    size: int


@dataclasses.dataclass(frozen=True)
class NamedArray:
    """As in Haliax: a node without keys, whose axes have names."""

    array: Any
    axes: tuple[Axis, ...]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Linear:
    """As in Haliax: a module that knows which axes are inputs."""

    weight: Any
    bias: Any
    In: Any = dataclasses.field(metadata=STATIC)
    Out: Any = dataclasses.field(metadata=STATIC)


@dataclasses.dataclass(frozen=True)
class AnnotatedArray:
    """As in Simply: a node without keys."""

    array: Any
    dim_annotation: str | None


@dataclasses.dataclass(frozen=True)
class PenzaiArray:
    """As penzai's `NamedArray`."""

    data_array: Any
    named_axes: dict[str, int]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ParameterValue:
    """As in penzai."""

    value: Any
    label: str = dataclasses.field(metadata=STATIC)


class Keyless:
    """A node of children without keys."""

    def __init__(self, *children: Any):
        self.children = children


jax.tree_util.register_pytree_node(
    NamedArray, lambda x: ((x.array,), x.axes), lambda axes, x: NamedArray(x[0], axes)
)
jax.tree_util.register_pytree_node(
    AnnotatedArray,
    lambda x: ((x.array,), x.dim_annotation),
    lambda letters, x: AnnotatedArray(x[0], letters),
)
jax.tree_util.register_pytree_node(Keyless, lambda x: (x.children, None), lambda _, x: Keyless(*x))
jax.tree_util.register_pytree_with_keys(
    PenzaiArray,
    lambda x: (
        [(jax.tree_util.GetAttrKey("data_array"), x.data_array)],
        tuple(x.named_axes.items()),
    ),
    lambda axes, x: PenzaiArray(x[0], dict(axes)),
)

SIZES = {"embed": 32, "heads": 4, "head_size": 8, "mlp": 16, "vocab": 100, "layers": 3}
SIZES |= {"experts": 5, "Embed": 32, "Heads": 4, "HeadSize": 8, "Layers": 3}


def named(names: str) -> NamedArray:
    axes = tuple(Axis(name, SIZES[name]) for name in names.split())
    shape = tuple(axis.size for axis in axes)
    return NamedArray(jax.ShapeDtypeStruct(shape, jnp.float32), axes)


def linear(inputs: str, outputs: str, weight: str) -> Linear:
    In, Out = (tuple(Axis(name, SIZES[name]) for name in x.split()) for x in (inputs, outputs))
    return Linear(named(weight), None, In[0] if len(In) == 1 else In, Out)


def test_named_axes_and_letters_tell() -> None:
    """What the layers of the code bases in `test_code_bases.py` do not have."""
    array = jax.ShapeDtypeStruct((3, 5, 32, 16), jnp.float32)
    norm = {"weight": named("layers embed")}
    found = MatrixRule()(
        {
            "table": {"weight": named("vocab embed")},
            "lm_head": {"weight": named("vocab embed")},
            "skip": named("layers embed"),
            "attn": {"w": named("Layers Embed Heads HeadSize")},
            "mix": {"w": named("layers experts embed mlp")},
            "experts_up": linear("embed", "mlp", "experts embed mlp"),
            "down": linear("mlp", "embed", "layers embed mlp"),
            "letters": {"w": AnnotatedArray(array, "..oi")},
        }
    )
    assert found == {
        "table/weight": "embedding",
        "lm_head/weight": MatrixAxes(1, 0),
        "skip": "a vector per layer",
        "attn/w": MatrixAxes(1, (2, 3)),
        "mix/w": MatrixAxes(2, 3),
        "experts_up/weight": MatrixAxes(1, 2),
        "down/weight": MatrixAxes(2, 1),
        "letters/w": MatrixAxes(3, 2),
    }
    assert found["down/weight"].said_by == "axes of the family haliax"
    # What is selected is a matrix whatever its box says.
    assert isinstance(MatrixRule("all")({"ln": norm})["ln/weight"], MatrixAxes)


def test_a_box_without_a_key_is_not_a_part_of_the_path() -> None:
    tree = {
        "lm_head": {"kernel": AnnotatedArray(jnp.ones((4, 8)), None)},
        "pair": Keyless({"w": jnp.ones((2, 3))}, jnp.ones(3)),
        "alone": Keyless(Keyless({"kernel": jnp.ones((2, 3))})),
    }
    names = named_leaves(tree).names
    assert names == ("alone/kernel", "lm_head/kernel", "pair/0/w", "pair/1")
    assert MatrixRule(output_layer="auto")(tree)["lm_head/kernel"] == "output layer"


def assert_updates(params: Any) -> None:
    """Updates are in the boxes of the parameters."""
    optimizer = curvax.muon(0.1)
    update = jax.jit(lambda p: optimizer.update(p, optimizer.init(p), p)[0])(params)
    assert jax.tree.structure(update) == jax.tree.structure(params)
    assert jax.tree.map(jnp.shape, update) == jax.tree.map(jnp.shape, params)


def test_specifications_and_updates_go_through_boxes() -> None:
    boxes = {"q": linear("embed", "heads head_size", "heads head_size embed")}
    params = jax.tree.map(lambda x: jnp.ones(x.shape), boxes)
    said = MatrixAxes(0, (1, 2))
    for spec in ({"q/weight": said}, jax.tree.map(lambda _: said, boxes)):
        assert MatrixRule(weight_dimension_numbers=spec)(params) == {"q/weight": said}
    assert "1 matrix 32×32" in curvax.summarize(curvax.muon(0.1), params)
    assert_updates(params)


def test_labels_and_named_axes_of_penzai() -> None:
    """Its trainer gives the optimizer a tuple of parameters."""
    expected: dict[str, tuple[dict[str, int], Any]] = {
        "block/attention/query.weights": (
            {"embedding": 32, "heads": 4, "projection": 8},
            MatrixAxes(0, (1, 2)),
        ),
        "block/attention/output.weights": (
            {"heads": 4, "projection": 8, "embedding": 32},
            MatrixAxes((0, 1), 2),
        ),
        "block/mlp/up.weights": ({"embedding": 32, "neurons": 16}, MatrixAxes(0, 1)),
        "block/mlp/up.bias": ({"neurons": 16}, "bias of up"),
        "block/mixer.weights": ({"features_out": 8, "features": 4}, MatrixAxes(1, 0)),
        "stack/norm/scale.weights": ({"layers": 3, "embedding": 32}, "a vector per layer"),
        "embedder.embeddings": ({"vocabulary": 50, "embedding": 32}, "embedding"),
    }
    params = tuple(
        ParameterValue(PenzaiArray(jnp.ones(tuple(axes.values())), axes), label)
        for label, (axes, _) in expected.items()
    )
    assert MatrixRule()(params) == {label: axes for label, (_, axes) in expected.items()}
    assert_updates(params)
    said = MatrixRule(weight_dimension_numbers={"block/mixer.weights": None})
    assert said(params)["block/mixer.weights"] == "weight_dimension_numbers is None"
    table = ParameterValue(jnp.ones((4, 8)), "embed.embeddings")  # without names of axes
    assert MatrixRule()((table,)) == {"embed.embeddings": "embedding"}
