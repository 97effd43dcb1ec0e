"""Arrays that know their axes, in boxes like those of Haliax and Simply."""

from __future__ import annotations

import dataclasses
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest

import curvax
from curvax import MatrixAxes, MatrixRule
from curvax.transforms._paths import named_leaves


class Axis(NamedTuple):
    """As in Haliax."""

    name: str
    size: int


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True)
class NamedArray:
    """As in Haliax: a node without keys, whose axes have names."""

    array: Any
    axes: tuple[Axis, ...]

    def tree_flatten(self) -> Any:
        return (self.array,), self.axes

    @classmethod
    def tree_unflatten(cls, axes: Any, children: Any) -> NamedArray:
        return cls(children[0], axes)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Linear:
    """As in Haliax: a module that knows which axes are inputs."""

    weight: Any
    bias: Any
    In: Any = dataclasses.field(metadata={"static": True})
    Out: Any = dataclasses.field(metadata={"static": True})


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True)
class AnnotatedArray:
    """As in Simply."""

    array: Any
    metadata: Any

    @property
    def dim_annotation(self) -> str | None:
        return self.metadata.get("dim_annotation")

    def tree_flatten(self) -> Any:
        return (self.array,), tuple(self.metadata.items())

    @classmethod
    def tree_unflatten(cls, metadata: Any, children: Any) -> AnnotatedArray:
        return cls(children[0], MappingProxyType(dict(metadata)))


@jax.tree_util.register_pytree_node_class
class Keyless:
    """A node of two children without keys."""

    def __init__(self, *children: Any):
        self.children = children

    def tree_flatten(self) -> Any:
        return self.children, None

    @classmethod
    def tree_unflatten(cls, _: Any, children: Any) -> Keyless:
        return cls(*children)


SIZES = {"embed": 32, "heads": 4, "kv_heads": 2, "head_size": 8, "mlp": 16, "vocab": 100}
SIZES |= {"layers": 3, "experts": 5, "qkv": 3, "Embed": 32, "Heads": 4, "HeadSize": 8, "Layers": 3}


def named(*names: str) -> NamedArray:
    axes = tuple(Axis(name, SIZES[name]) for name in names)
    shape = tuple(axis.size for axis in axes)
    return NamedArray(jax.ShapeDtypeStruct(shape, jnp.float32), axes)


def linear(inputs: str, outputs: str, weight: str, bias: str = "") -> Linear:
    In, Out = (
        tuple(Axis(name, SIZES[name]) for name in axes.split()) for axes in (inputs, outputs)
    )
    return Linear(
        named(*weight.split()),
        named(*bias.split()) if bias else None,
        In[0] if len(In) == 1 else In,
        Out,
    )


HALIAX: dict[str, tuple[Any, Any]] = {
    "embeddings/token_embeddings/weight": (named("vocab", "embed"), "embedding"),
    "table/weight": (named("vocab", "embed"), "embedding"),
    "ln/weight": (named("layers", "embed"), "weight of ln"),
    "lm_head/weight": (named("vocab", "embed"), MatrixAxes(1, 0)),
    "skip": (named("layers", "embed"), "a vector per layer"),
    "attn/w": (named("Layers", "Embed", "Heads", "HeadSize"), MatrixAxes(1, (2, 3))),
    "attn/out/weight": (named("embed", "heads", "head_size"), MatrixAxes((1, 2), 0)),
    "mix/w": (named("layers", "experts", "embed", "mlp"), MatrixAxes(2, 3)),
}
LAYERS: dict[str, tuple[Linear, Any, Any]] = {
    "q_proj": (
        linear("embed", "kv_heads heads head_size", "layers kv_heads heads head_size embed"),
        MatrixAxes(4, (1, 2, 3)),
        None,
    ),
    "o_proj": (
        linear("heads head_size", "embed", "layers embed heads head_size", "layers embed"),
        MatrixAxes((2, 3), 1),
        "bias of o_proj",
    ),
    "down_proj": (linear("mlp", "embed", "layers embed mlp"), MatrixAxes(2, 1), None),
    "experts_up": (linear("embed", "mlp", "experts embed mlp"), MatrixAxes(1, 2), None),
    "c_attn": (
        linear("embed", "qkv heads head_size", "qkv heads head_size embed"),
        MatrixAxes(3, (1, 2)),
        None,
    ),
}


def nested(flat: dict[str, Any]) -> dict[str, Any]:
    root: dict[str, Any] = {}
    for path, leaf in flat.items():
        *parents, last = path.split("/")
        node = root
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = leaf
    return root


def test_named_axes_tell() -> None:
    found = MatrixRule()(nested({name: box for name, (box, _) in HALIAX.items()}))
    assert found == {name: treatment for name, (_, treatment) in HALIAX.items()}


def test_layers_know_inputs_and_outputs() -> None:
    found = MatrixRule()(nested({name: layer for name, (layer, *_) in LAYERS.items()}))
    for name, (_, weight, bias) in LAYERS.items():
        assert found[f"{name}/weight"] == weight
        assert found[f"{name}/weight"].said_by == "axes of the family haliax"
        assert found.get(f"{name}/bias") == bias


@pytest.mark.parametrize(
    ("letters", "shape", "treatment"),
    [
        ("ioo", (32, 4, 8), MatrixAxes(0, (1, 2))),
        ("oii", (32, 4, 8), MatrixAxes((1, 2), 0)),
        (".io", (3, 32, 16), MatrixAxes(1, 2)),
        ("..oi", (3, 5, 32, 16), MatrixAxes(3, 2)),
        (".i", (100, 32), "no inputs or no outputs (simply)"),
        ("h", (32,), "no inputs or no outputs (simply)"),
    ],
)
def test_letters_tell(letters: str, shape: tuple[int, ...], treatment: Any) -> None:
    box = AnnotatedArray(
        jax.ShapeDtypeStruct(shape, jnp.float32), MappingProxyType({"dim_annotation": letters})
    )
    assert MatrixRule()({"layer": {"w": box}}) == {"layer/w": treatment}


def test_a_box_without_a_key_is_not_a_part_of_the_path() -> None:
    plain = AnnotatedArray(jnp.ones((4, 8)), MappingProxyType({}))
    tree = {
        "lm_head": {"kernel": plain},
        "pair": Keyless({"w": jnp.ones((2, 3))}, jnp.ones(3)),
        "alone": Keyless(Keyless({"kernel": jnp.ones((2, 3))})),
    }
    names = named_leaves(tree).names
    assert names == ("alone/kernel", "lm_head/kernel", "pair/0/w", "pair/1")
    assert MatrixRule(output_layer="auto")(tree)["lm_head/kernel"] == "output layer"


def test_specifications_and_updates_go_through_boxes() -> None:
    boxes = {"q": linear("embed", "heads head_size", "heads head_size embed")}
    params = jax.tree.map(lambda x: jnp.ones(x.shape), boxes)
    said = MatrixAxes(0, (1, 2))
    for spec in ({"q/weight": said}, jax.tree.map(lambda _: said, boxes)):
        assert MatrixRule(weight_dimension_numbers=spec)(params) == {"q/weight": said}
    optimizer = curvax.muon(0.1)
    assert "1 matrix 32×32" in curvax.summarize(optimizer, params)
    update = jax.jit(lambda p: optimizer.update(p, optimizer.init(p), p)[0])(params)
    assert jax.tree.structure(update) == jax.tree.structure(params)
    assert jax.tree.map(jnp.shape, update) == jax.tree.map(jnp.shape, params)


def test_what_is_selected_is_a_matrix_whatever_its_box_says() -> None:
    optimizer = curvax.asgo(0.1)
    text = curvax.summarize(optimizer, {"ln": {"weight": named("layers", "embed")}})
    assert "not a matrix" not in text
