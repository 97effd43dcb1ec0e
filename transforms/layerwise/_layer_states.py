"""The state of an optimizer for stacked layers, cut into one state per layer.

`optimizer.init(layers)`, for layers stacked along the first axis of each leaf, gives an ordinary
state. Its portable form has an entry per parameter, whose first axis is a multiple of the number of
layers. So a state per layer is a slice, and a checkpoint moves between a layer-wise step and an
ordinary one.

Arrays without a layer axis, such as the number of steps, are shared: each layer gets the same one,
and of what the layers return, the step keeps the largest. The class of a state may say otherwise,
as `ClipByLastNormState` does for a sum: its attribute `over_layers` has a function by field, which
takes what the layers returned, `(layers, …)`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from .._own_state import arrays_in, difference
from .._paths import named_leaves
from ..state._portable import by_parameter, by_stack
from ..state._traced import Traced, place_of, traced


@dataclasses.dataclass(frozen=True)
class LayerStates:
    """How the state for `number` stacked layers is cut into states for one layer each."""

    number: int
    one: Any  # the shapes of one layer, with its axis
    whole: Traced
    single: Traced
    cut: tuple[bool, ...]  # which arrays have a layer axis
    rules: tuple[Any, ...]  # per array how what the layers return is combined, if they share it

    def check_own(self, state: Any) -> None:
        """Requires the optimizer's state for all layers.

        Raises:
          ValueError: naming the first array that differs.
        """
        own = named_leaves(self.whole.state).present()
        message = difference("state", own, arrays_in(state, own), "these layers", dtypes=False)
        if message:
            raise ValueError(message)

    def split(self, state: Any) -> tuple[list[Any], list[Any]]:
        """The arrays with a layer axis, layers one after the other, and the shared arrays."""
        return self._parts(self.whole, state)

    def slices(self, cut: list[Any], layer: jax.Array) -> list[Any]:
        """One layer's part of the arrays with a layer axis."""
        sizes = [len(x) // self.number for x in cut]
        return [
            jax.lax.dynamic_slice_in_dim(x, layer * size, size)
            for x, size in zip(cut, sizes, strict=True)
        ]

    def replaced(self, cut: list[Any], layer: jax.Array, own: list[Any]) -> list[Any]:
        """The arrays with a layer axis, with another part for one layer."""
        return [
            jax.lax.dynamic_update_slice_in_dim(x, part, layer * len(part), 0)
            for x, part in zip(cut, own, strict=True)
        ]

    def of_layer(self, cut: list[Any], shared: list[Any]) -> Any:
        """The state of one layer, from its slices and the shared arrays."""
        return self._restored(self.single, cut, shared)

    def parts_of(self, state: Any) -> tuple[list[Any], list[Any]]:
        """The inverse of `of_layer`."""
        return self._parts(self.single, state)

    def joined(self, cut: list[Any], shared: list[Any]) -> Any:
        """The inverse of `split`; `shared` has what each layer returned, `(number, …)` each."""
        rules = [rule for rule, cut in zip(self.rules, self.cut, strict=True) if not cut]
        combined = [rule(x) for rule, x in zip(rules, shared, strict=True)]
        return self._restored(self.whole, cut, combined)

    def undeclared(self, state: Any) -> list[Any]:
        """Of a layer's state, the shared floating arrays whose class has no rule for them."""
        _, shared = self.parts_of(state)
        rules = [rule for rule, cut in zip(self.rules, self.cut, strict=True) if not cut]
        return [
            x
            for x, rule in zip(shared, rules, strict=True)
            if rule is _largest and jnp.issubdtype(x.dtype, jnp.floating)
        ]

    def _parts(self, like: Traced, state: Any) -> tuple[list[Any], list[Any]]:
        pairs = zip(jax.tree.leaves(by_parameter(like.stacks, state)), self.cut, strict=True)
        of: dict[bool, list[Any]] = {True: [], False: []}
        for x, cut in pairs:
            of[cut].append(x)
        return of[True], of[False]

    def _restored(self, like: Traced, cut: list[Any], shared: list[Any]) -> Any:
        arrays = {True: iter(cut), False: iter(shared)}
        structure = jax.tree.structure(by_parameter(like.stacks, like.state))
        state = structure.unflatten([next(arrays[own]) for own in self.cut])
        return by_stack(like.stacks, like.state, state)


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
    shapes, of_one = (
        jax.tree_util.tree_leaves_with_path(by_parameter(t.stacks, t.state))
        for t in (whole, single)
    )
    if [path for path, _ in shapes] != [path for path, _ in of_one]:
        raise ValueError(
            "optimizer: the state for all layers has other entries than the state for one; "
            "layerwise needs an optimizer that treats each layer alike."
        )

    def has_axis(path: Any, x: Any, y: Any) -> bool:
        if x.shape == y.shape:
            return False
        if x.ndim and x.shape == (number * y.shape[0], *y.shape[1:]):
            return True
        raise ValueError(
            f"optimizer: the array {place_of(path)!r} of the state has shape {x.shape} for "
            f"{number} layers and {y.shape} for one, so it cannot be cut by layer. Give the axes "
            "of the parameter without its first, as in weight_dimension_numbers="
            "{'kernel': curvax.MatrixAxes(rows=1, columns=2)}."
        )

    cut = tuple(has_axis(path, x, y) for (path, x), (_, y) in zip(shapes, of_one, strict=True))
    rules = tuple(jax.tree.leaves(_rules(by_parameter(whole.stacks, whole.state))))
    return LayerStates(number, one, whole, single, cut, rules)


def _rules(state: Any) -> Any:
    """A tree like the state, with the rule of each array."""

    def of(node: Any) -> Any:
        if not _declares(node):
            return _largest
        declared = node.over_layers
        fields = {
            name: jax.tree.map(lambda _, rule=declared[name]: rule, field)
            if name in declared
            else _rules(field)
            for name, field in node._asdict().items()
        }
        return type(node)(**fields)

    return jax.tree.map(of, state, is_leaf=_declares)


def _declares(node: Any) -> bool:
    return hasattr(node, "over_layers")


def _largest(x: jax.Array) -> jax.Array:
    """Counters may differ: a layer whose gradient was not finite did not count."""
    return jnp.max(x, axis=0) if jnp.issubdtype(x.dtype, jnp.integer) else x[0]
