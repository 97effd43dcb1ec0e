"""The state of an optimizer for stacked layers, cut into one state per layer.

`optimizer.init(layers)`, for layers stacked along the first axis of each leaf, gives an ordinary
state. Its portable form has an entry per parameter, whose first axis is a multiple of the number of
layers. So a state per layer is a slice, and a checkpoint moves between a layer-wise step and an
ordinary one.

Arrays without a layer axis, such as the number of steps, are shared: each layer gets the same one,
and of those that the layers return, the step keeps the largest. The class of a state may say
otherwise, as `ClipByLastNormState` does for a sum: its method `over_layers` takes the states that
the layers return, with arrays `(layers, …)`, and gives the one that they share next.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from .._own_state import arrays_in, difference
from .._paths import named_leaves
from ..state._portable import by_parameter, by_stack
from ..state._traced import place_of, traced


@dataclasses.dataclass(frozen=True)
class LayerStates:
    """How the state for all layers is cut into states for one layer each."""

    number: int
    one: Any  # the shapes of one layer, with its axis
    whole: Any  # the traced state for all layers
    single: Any  # that for one
    is_cut: tuple[bool, ...]  # per array of the portable form, whether it has a layer axis

    def check(self, state: Any) -> None:
        """Requires a state to be the optimizer's.

        Raises:
          ValueError: naming the first array that is not the optimizer's for these layers.
        """
        own = named_leaves(self.whole).present()
        message = difference("state", own, arrays_in(state, own), "these layers", dtypes=False)
        if message:
            raise ValueError(message)

    def split(self, state: Any) -> tuple[list[Any], list[Any]]:
        """The arrays with a layer axis, layers one after the other, and the shared arrays."""
        return self._parts(self.whole, state)

    def joined(self, like: Any, cut: list[Any], shared: list[Any]) -> Any:
        """A state like `like`; `shared` has the arrays that the layers returned, `(number, …)`."""
        before = self._parts(self.whole, like)[1]
        combined = jax.tree.map(
            lambda old, new: old.over_layers(new) if _combines(old) else _largest(new),
            self._shared_tree(before),
            self._shared_tree(shared),
            is_leaf=_combines,
        )
        state = self._restored(self.whole, cut, jax.tree.leaves(combined))
        return jax.tree.structure(like).unflatten(jax.tree.leaves(state))

    def of_all(self, cut: list[Any], shared: list[Any]) -> Any:
        """The inverse of `split`."""
        return self._restored(self.whole, cut, shared)

    def of_layer(self, cut: list[Any], shared: list[Any]) -> Any:
        """The state of one layer, from its slices and the shared arrays."""
        return self._restored(self.single, cut, shared)

    def parts_of(self, state: Any) -> tuple[list[Any], list[Any]]:
        """The inverse of `of_layer`."""
        return self._parts(self.single, state)

    def undeclared(self, state: Any) -> list[Any]:
        """The shared floating arrays of a state whose class does not combine those of layers."""
        shared = self._shared_tree(self._parts(self.whole, state)[1])
        nodes = [x for x in jax.tree.leaves(shared, is_leaf=_combines) if not _combines(x)]
        return [x for x in nodes if jnp.issubdtype(x.dtype, jnp.floating)]

    def slices(self, stacked: Any, layer: Any) -> Any:
        """One layer of `stacked`: the layers, and the arrays of their states that are cut."""
        one = self.one, self.parts_of(self.single)[0]
        return jax.tree.map(
            lambda x, y: jax.lax.dynamic_slice_in_dim(x, layer * len(y), len(y)), stacked, one
        )

    def replaced(self, stacked: Any, layer: Any, new: Any) -> Any:
        """`stacked`, with another layer in its place."""
        return jax.tree.map(
            lambda x, y: jax.lax.dynamic_update_slice_in_dim(x, y, layer * len(y), 0), stacked, new
        )

    def _parts(self, like: Any, state: Any) -> tuple[list[Any], list[Any]]:
        state = jax.tree.structure(like).unflatten(jax.tree.leaves(state))
        pairs = list(zip(jax.tree.leaves(by_parameter(state)), self.is_cut, strict=True))
        return [x for x, cut in pairs if cut], [x for x, cut in pairs if not cut]

    def _restored(self, like: Any, cut: list[Any], shared: list[Any]) -> Any:
        own, rest = iter(cut), iter(shared)
        leaves = [next(own if is_cut else rest) for is_cut in self.is_cut]
        return by_stack(like, jax.tree.structure(by_parameter(like)).unflatten(leaves))

    def _shared_tree(self, shared: list[Any]) -> Any:
        """The portable form with holes in place of the arrays that have a layer axis."""
        rest = iter(shared)
        leaves = [None if is_cut else next(rest) for is_cut in self.is_cut]
        return jax.tree.structure(by_parameter(self.whole)).unflatten(leaves)


def layer_states(optimizer: Any, layers: Any, number: int) -> LayerStates:
    """Finds which arrays of the state have a layer axis.

    Raises:
      ValueError: naming the array, if a state for one layer is not a slice of the state for all.
    """
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
        if x.shape == y.shape:
            continue
        if (
            x.shape[:1] != tuple(number * size for size in y.shape[:1])
            or x.shape[1:] != y.shape[1:]
        ):
            raise ValueError(
                f"optimizer: the array {place_of(path)!r} of the state has shape {x.shape} for "
                f"{number} layers and {y.shape} for one, so it cannot be cut by layer. Give the "
                "axes of the parameter without its first, as in weight_dimension_numbers="
                "{'kernel': curvax.MatrixAxes(rows=1, columns=2)}."
            )
    is_cut = tuple(x.shape != y.shape for (_, x), (_, y) in zip(arrays, of_one, strict=True))
    return LayerStates(number, one, whole.state, single.state, is_cut)


def _combines(node: Any) -> bool:
    return hasattr(node, "over_layers")


def _largest(x: jax.Array) -> jax.Array:
    """Counters may differ: a layer whose gradient was not finite did not count.

    A flag says that something holds for all layers. Other arrays are those of each layer.
    """
    return x[0] if jnp.issubdtype(x.dtype, jnp.floating) else jnp.max(x, axis=0)
