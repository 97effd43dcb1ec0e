r"""Layers that are updated during the backward pass.

An ordinary step computes the gradients of all layers and then updates all of them, so the gradients
of all layers are in memory at once. Here the backward pass goes from the last layer to the first,
and updates each layer as soon as its gradient exists:

1. forward: `x ← block(layer, x)` for each layer; the input of each layer is kept;
2. backward, from the last layer: recompute the block from its input, `gradient, dx ← vjp(dx)`,
   `update, state ← optimizer.update(gradient, state, layer)`, `layer ← layer + update`.

The gradient of the input of a layer is taken before its update, so the numbers are those of an
ordinary step with an optimizer that works matrix by matrix or element by element.

*Memory*: parameters and states, both updated in place if they are donated, the inputs of the
layers, and the gradient and temporaries of one layer. *Cost*: each block is computed twice, as with
`jax.checkpoint`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from .._paths import named_leaves
from ..refresh._due import at_most_once
from ._layer_states import layer_states
from ._mixing import mixes_layers


def layerwise(
    block: Callable[..., Any],
    optimizer: optax.GradientTransformation,
    layers: Any,
    state: Any,
    x: Any,
    xs: Any = None,
) -> tuple[Any, Callable[..., tuple[Any, Any, Any]]]:
    """Applies stacked layers, and returns a backward pass that updates them.

    As `jax.vjp` does, it returns the output and a function from the gradient of the output to the
    gradient of the input. That function also updates the layers, each as soon as its gradient
    exists, so that the gradient of only one layer is in memory. Donate layers and state to the
    jitted step, and they are updated in place.

    Args:
      block: the function `(layer, x) -> x` of one layer, or `(layer, x, xs_i) -> x` with `xs`. The
        output has the structure, shapes and dtypes of the input.
      optimizer: the transformation of the layers, which must treat each matrix, or each element,
        separately. The axes of its matrices are those of the stacked leaves.
      layers: parameters, all layers stacked along the first axis of each leaf, as `jax.lax.scan`
        and `flax.linen.scan` take them.
      state: `optimizer.init(layers)`, or what an earlier step returned.
      x: the input of the first layer, a tree of arrays.
      xs: other inputs of each layer, stacked along the first axis, such as random keys. They get no
        gradient.

    Returns:
      The output of the last layer, and `backward(dx, **extra_args) -> (layers, state, dx)`. It
      takes the gradient of the output, and extra arguments for the optimizer; it returns the
      updated layers, the new state, and the gradient of `x`.

    Raises:
      ValueError: if leaves have different numbers of layers; if the state cannot be cut by layer;
        or if updates depend on a norm over all layers, as with `optax.clip_by_global_norm`.

    Example:
      >>> import curvax, jax, jax.numpy as jnp
      >>> block = lambda layer, x: x + jnp.tanh(x @ layer["kernel"])
      >>> axes = {"kernel": curvax.MatrixAxes(rows=1, columns=2)}
      >>> optimizer = curvax.racs(0.01, weight_dimension_numbers=axes)
      >>> layers = {"kernel": jnp.ones((3, 4, 4))}
      >>> x, backward = curvax.layerwise(
      ...     block, optimizer, layers, optimizer.init(layers), jnp.ones(4)
      ... )
      >>> loss, dx = jax.value_and_grad(lambda x: jnp.mean(x**2))(x)
      >>> layers, state, dx = backward(dx)

    References:
      Lv et al., `Full parameter fine-tuning for large language models with limited resources
      <https://arxiv.org/abs/2306.09782>`_, 2023; Refael et al., `SUMO
      <https://arxiv.org/abs/2505.24749>`_, Algorithm 1.
    """
    number = _number_of(layers)
    states = layer_states(optimizer, layers, number)
    one = jax.tree.map(lambda p: jax.ShapeDtypeStruct((1, *p.shape[1:]), p.dtype), layers)
    if mixes_layers(optimizer, one, states.single.state):
        raise ValueError(
            "optimizer: its updates depend on a number computed from all gradients, such as the "
            "norm in optax.clip_by_global_norm. A layer-wise step has the gradients of one layer "
            "at a time. Clip by matrix instead, or use an ordinary step."
        )

    def forward(x: Any, of_layer: Any) -> tuple[Any, Any]:
        layer, others = of_layer
        return block(layer, x, *others), x

    inputs = () if xs is None else (xs,)
    output, kept = jax.lax.scan(forward, x, (layers, inputs))

    def backward(dx: Any, **extra_args: Any) -> tuple[Any, Any, Any]:
        cut, shared = states.split(state)

        def update(given: Any, own: Any) -> Any:
            x, others = given
            dx, layer, cut, shared = own
            gradient, dx = _vjp(block, layer, x, others, dx)
            updates, new = optax.with_extra_args_support(optimizer).update(
                gradient, states.of_layer(cut, shared), layer, **extra_args
            )
            return dx, optax.apply_updates(layer, updates), *states.parts_of(new)

        def visit(carry: Any, of_layer: Any) -> tuple[Any, Any]:
            dx, layers, cut = carry
            i, *given = of_layer
            layer = jax.tree.map(lambda p: jax.lax.dynamic_slice_in_dim(p, i, 1), layers)
            own = dx, layer, states.slices(cut, i), shared
            dx, layer, own, new_shared = jax.lax.platform_dependent(
                i, given, own, cpu=_alone(update), default=lambda i, *own: update(*own)
            )
            layers = jax.tree.map(
                lambda p, q: jax.lax.dynamic_update_slice_in_dim(p, q, i, 0), layers, layer
            )
            return (dx, layers, states.replaced(cut, i, own)), new_shared

        of_layers = (jnp.arange(number), kept, inputs)
        carry = (_floating(dx), layers, cut)
        (dx_in, updated, cut), shared = jax.lax.scan(visit, carry, of_layers, reverse=True)
        return updated, states.joined(cut, shared), _with_floating(dx, dx_in)

    return output, backward


def _alone(update: Callable[[Any, Any], Any]) -> Callable[[jax.Array, Any, Any], Any]:
    """`update` in a loop of one round, for CPUs.

    Otherwise XLA:CPU reads old values from the arrays of all layers again where it needs them, and
    copies these arrays before it writes the new values. On other platforms it does not, and the
    loop would only keep temporaries alive.
    """
    return lambda i, given, own: at_most_once(update, i >= 0, given, own)


def _number_of(layers: Any) -> int:
    """The size of the first axis of all leaves.

    Raises:
      ValueError: naming the leaf whose first axis differs.
    """
    named = named_leaves(layers).present()
    numbers = {name: x.shape[0] if jnp.ndim(x) else None for name, x in named.items()}
    first = next(iter(numbers.values()), None)
    for name, number in numbers.items():
        if number is None or number != first:
            raise ValueError(
                "layers: the first axis of every leaf must be the layer axis; "
                f"{name!r} has shape {named[name].shape}, but there are {first} layers."
            )
    if first is None:
        raise ValueError("layers must have at least one parameter.")
    return first


def _vjp(block: Any, layer: Any, x: Any, others: Any, dx: Any) -> tuple[Any, Any]:
    """Gradients of a layer, with its axis of size 1, and of the floating leaves of its input."""

    def output(layer: Any, floating: Any) -> Any:
        inside = jax.tree.map(lambda p: p[0], layer)
        return _floating(block(inside, _with_floating(x, floating), *others))

    _, pullback = jax.vjp(output, layer, _floating(x))
    return pullback(dx)


def _is_floating(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact)


def _floating(tree: Any) -> list[Any]:
    """The leaves that have gradients."""
    return [x for x in jax.tree.leaves(tree) if _is_floating(x)]


def _with_floating(tree: Any, floating: list[Any]) -> Any:
    """The tree with other floating leaves."""
    new = iter(floating)
    return jax.tree.map(lambda x: next(new) if _is_floating(x) else x, tree)
