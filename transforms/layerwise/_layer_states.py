"""The state of an optimizer for stacked layers, as one state per layer.

It is an ordinary state. In its portable form, the first axis of an entry is a multiple of the
number of layers, so the state of a layer is a slice. Arrays without a layer axis, such as counts,
are common: each layer gets the same one, and the step keeps the largest of those that the layers
return. The class of a state may say otherwise, as `ClipByLastNormState` does for a sum: its method
`over_layers` gives the next common state from those that the layers return, `(layers, …)`.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from .._stacks import StateSplit
from ..state._traced import by_parameter, by_stack, place_of, traced


@dataclasses.dataclass(frozen=True)
class LayerStates:
    """How the state for all layers is cut into states for one layer each."""

    number: int  # of layers
    one: Any  # the shapes of one layer, with its axis
    whole: Any  # the traced state for all layers
    single: Any  # that for one
    split: StateSplit  # of the portable form of both: the arrays with a layer axis, and the common

    def parts(self, like: Any, state: Any) -> tuple[Any, Any]:
        """The arrays with a layer axis and the common ones, of a state like `whole` or `single`.

        Each is the portable form of the state, with holes in place of the other arrays.
        """
        state = jax.tree.structure(like).unflatten(jax.tree.leaves(state))
        return self.split.parts(by_parameter(state))

    def restored(self, like: Any, per_layer: Any, common: Any) -> Any:
        """The inverse of `parts`."""
        return by_stack(like, self.split.joined(per_layer, common))

    def combined(self, like: Any, per_layer: Any, common: Any) -> Any:
        """A state like `like`; `common` has the arrays that the layers returned, `(number, …)`."""
        before = self.parts(self.whole, like)[1]
        combined = jax.tree.map(
            lambda old, new: old.over_layers(new) if _combines(old) else _largest(new),
            before,
            common,
            is_leaf=_combines,
        )
        state = self.restored(self.whole, per_layer, combined)
        return jax.tree.structure(like).unflatten(jax.tree.leaves(state))

    def undeclared(self, state: Any) -> list[Any]:
        """The common arrays of a state whose class does not combine those of layers."""
        common = self.parts(self.whole, state)[1]
        return [x for x in jax.tree.leaves(common, is_leaf=_combines) if not _combines(x)]

    def slices(self, stacked: Any, layer: Any) -> Any:
        """One layer of `stacked`: the layers, and the per-layer arrays of their states."""
        one = self.one, self.parts(self.single, self.single)[0]
        return jax.tree.map(
            lambda x, y: jax.lax.dynamic_slice_in_dim(x, layer * len(y), len(y)), stacked, one
        )

    def replaced(self, stacked: Any, layer: Any, new: Any) -> Any:
        return jax.tree.map(
            lambda x, y: jax.lax.dynamic_update_slice_in_dim(x, y, layer * len(y), 0), stacked, new
        )


def layer_states(optimizer: Any, layers: Any, number: int) -> LayerStates:
    """Finds which arrays of the state have a layer axis."""
    one = jax.tree.map(lambda x: jax.ShapeDtypeStruct((1, *x.shape[1:]), x.dtype), layers)
    whole, single = traced(optimizer, layers), traced(optimizer, one)
    if whole.divisions:
        raise ValueError(
            "optimizer: layerwise takes no optimizer with mesh= or mesh_axis=, which distribute "
            "the matrices of all layers at once. Shard the parameters instead."
        )
    states = [by_parameter(t.state) for t in (whole, single)]
    arrays, of_one = map(jax.tree_util.tree_leaves_with_path, states)
    if [path for path, _ in arrays] != [path for path, _ in of_one]:
        raise ValueError(
            "optimizer: the state for all layers has other entries than the state for one; "
            "layerwise needs an optimizer that treats each layer alike."
        )
    for (path, x), (_, y) in zip(arrays, of_one, strict=True):
        of_layers = (*(number * size for size in y.shape[:1]), *y.shape[1:])
        if x.shape not in (y.shape, of_layers):
            raise ValueError(
                f"optimizer: the array {place_of(path)!r} of the state has shape {x.shape} for "
                f"{number} layers and {y.shape} for one, so it cannot be cut by layer. Give the "
                "axes of the parameter without its first, as in weight_dimension_numbers="
                "{'kernel': curvax.MatrixAxes(rows=1, columns=2)}."
            )
    has_layers = tuple(x.shape != y.shape for (_, x), (_, y) in zip(arrays, of_one, strict=True))
    split = StateSplit(jax.tree.structure(states[0]), has_layers)
    return LayerStates(number, one, whole.state, single.state, split)


def _combines(node: Any) -> bool:
    return hasattr(node, "over_layers")


def _largest(x: jax.Array) -> jax.Array:
    """Counters may differ: a layer whose gradient was not finite did not count.

    A flag says that something holds for all layers, such as `last_finite` of `apply_if_finite`.
    Other arrays are those of each layer.
    """
    if x.dtype == jnp.bool_:
        return jnp.all(x, axis=0)
    return x[0] if jnp.issubdtype(x.dtype, jnp.floating) else jnp.max(x, axis=0)
