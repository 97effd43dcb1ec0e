"""The state of an optimizer for stacked layers, cut into one state per layer.

`optimizer.init(layers)`, for layers stacked along the first axis of each leaf, gives an ordinary
state. Its portable form has an entry per parameter, whose first axis is a multiple of the number of
layers. So a state per layer is a slice, and a checkpoint moves between a layer-wise step and an
ordinary one.

Arrays without a layer axis, such as the number of steps, are shared: each layer gets the same one,
and of those that the layers return, the step keeps the largest. The class of a state may say
otherwise, as `ClipByLastNormState` does for a sum: its attribute `over_layers` has a function by
field, which takes the arrays of all layers, `(layers, …)`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
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
    # Per array of the portable form: None if it has a layer axis, else how the layers' combine.
    rules: tuple[Callable[[jax.Array], jax.Array] | None, ...]

    def split(self, state: Any) -> tuple[list[Any], list[Any]]:
        """The arrays with a layer axis, layers one after the other, and the shared arrays.

        Raises:
          ValueError: naming the first array that is not the optimizer's for these layers.
        """
        own = named_leaves(self.whole).present()
        message = difference("state", own, arrays_in(state, own), "these layers", dtypes=False)
        if message:
            raise ValueError(message)
        return self._parts(self.whole, state)

    def joined(self, like: Any, cut: list[Any], shared: list[Any]) -> Any:
        """A state like `like`; `shared` has the arrays that the layers returned, `(number, …)`."""
        rules = [rule for rule in self.rules if rule]
        combined = [rule(x) for rule, x in zip(rules, shared, strict=True)]
        state = self._restored(self.whole, cut, combined)
        return jax.tree.structure(like).unflatten(jax.tree.leaves(state))

    def of_layer(self, cut: list[Any], shared: list[Any]) -> Any:
        """The state of one layer, from its slices and the shared arrays."""
        return self._restored(self.single, cut, shared)

    def parts_of(self, state: Any) -> tuple[list[Any], list[Any]]:
        """The inverse of `of_layer`."""
        return self._parts(self.single, state)

    def undeclared(self, state: Any) -> list[Any]:
        """Of a layer's state, the shared floating arrays whose class has no rule for them."""
        pairs = zip(self.parts_of(state)[1], filter(None, self.rules), strict=True)
        return [x for x, r in pairs if r is _largest and jnp.issubdtype(x.dtype, jnp.floating)]

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
        pairs = list(zip(jax.tree.leaves(by_parameter(state)), self.rules, strict=True))
        return [x for x, rule in pairs if not rule], [x for x, rule in pairs if rule]

    def _restored(self, like: Any, cut: list[Any], shared: list[Any]) -> Any:
        own, rest = iter(cut), iter(shared)
        leaves = [next(rest if rule else own) for rule in self.rules]
        return by_stack(like, jax.tree.structure(by_parameter(like)).unflatten(leaves))


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
    rules: list[Any] = _rules(states[0])
    for k, ((path, x), (_, y)) in enumerate(zip(arrays, of_one, strict=True)):
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
        rules[k] = None
    return LayerStates(number, one, whole.state, single.state, tuple(rules))


def _rules(state: Any) -> list[Callable[[jax.Array], jax.Array]]:
    """How the layers' combine, for each array of a state."""
    rules = []
    for node in jax.tree.leaves(state, is_leaf=_has_rules):
        if not _has_rules(node):
            rules.append(_largest)
            continue
        for name, field in node._asdict().items():
            rule = node.over_layers.get(name)
            rules += [rule] * len(jax.tree.leaves(field)) if rule else _rules(field)
    return rules


def _has_rules(node: Any) -> bool:
    return hasattr(node, "over_layers")


def _largest(x: jax.Array) -> jax.Array:
    """Counters may differ: a layer whose gradient was not finite did not count."""
    return jnp.max(x, axis=0) if jnp.issubdtype(x.dtype, jnp.integer) else x[0]
