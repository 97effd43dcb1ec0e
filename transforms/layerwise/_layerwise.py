r"""Layers that are updated during the backward pass.

1. Forward: `x ← block(layer, x)` for each layer; the input of each layer is kept.
2. Backward, from the last layer: recompute the block from its input, `gradient, dx ← vjp(dx)`,
   `update, state ← optimizer.update(gradient, state, layer)`, `layer ← layer + update`.

*Memory*: parameters and states, both updated in place if they are donated, the inputs of the
layers, and the gradient and temporaries of one layer. *Cost*: each block is computed twice, as with
`jax.checkpoint`.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from .._paths import named_leaves
from .._validate import Flag
from ..linalg._loops import alone
from ..state._portable import in_structure
from ..state._traced import check_optimizer
from ..weights._int8 import from_int8
from ._layer_states import LayerStates, layer_states
from ._mixing import check_layers_are_independent


def layerwise(
    block: Callable[..., Any],
    optimizer: optax.GradientTransformation,
    layers: Any,
    state: Any,
    x: Any,
    xs: Any = None,
    *,
    stacked: bool = True,
) -> tuple[Any, Callable[..., tuple[Any, Any, Any]]]:
    """Applies layers, and returns a backward pass that updates them.

    As `jax.vjp` does, it returns the output and a function from the gradient of the output to the
    gradient of the input. That function also updates the layers, each as soon as its gradient
    exists, so that the gradient of only one layer is in memory. Donate layers and state to the
    jitted step, and they are updated in place.

    A model is a chain of such calls, and its step runs their backward passes in reverse: embedding
    and head with `stacked=False`, the layers between them in one call, or in one call per layer if
    they are not alike. Each call has an optimizer and a state of its own, and each parameter must
    occur in one call. Nothing checks this, because a call does not see the others: if two calls get
    the same weights, as with tied embeddings or micro-batches, each returns these weights with an
    update by its own part of the gradient.

    Args:
      block: the function `(layer, x) -> x` of one layer, or `(layer, x, xs_i) -> x` with `xs`. The
        output has the structure, shapes and dtypes of the input, except with `stacked=False`.
      optimizer: the transformation of the layers, which must treat each layer separately, matrix by
        matrix or element by element. The axes of its matrices are those of the leaves of `layers`.
      layers: parameters, all layers stacked along the first axis of each leaf, as `jax.lax.scan`
        and `flax.linen.scan` take them; with `stacked=False` those of one layer. `block` gets
        weights in 8 bits (`curvax.to_int8`) decoded.
      state: `optimizer.init(layers)`, or the state that an earlier step returned.
      x: the input of the first layer, a tree of arrays. Integers in it have no gradient.
      xs: other inputs of each layer, stacked along the first axis, such as random keys. They get no
        gradient. With `stacked=False` those of the layer, such as the targets of a loss.
      stacked: whether there is a layer axis. Without it `block` and optimizer may be any.

    Returns:
      The output of the last layer, and `backward(dx, **extra_args) -> (layers, state, dx)`. It
      takes the gradient of the output (1.0 for a loss), and extra arguments for the optimizer,
      which each layer gets as they are; it returns the updated layers, the new state, and the
      gradient of `x`, with its integers.

    Raises:
      ValueError: if leaves have different numbers of layers, or are integers; if `block` returns
        something else than it gets; if the state is not the optimizer's, or cannot be cut by layer.
        In `backward`, if the update of a layer depends on other layers, as with
        `optax.clip_by_global_norm` (see `curvax.clip_by_last_norm`), or if all layers would get the
        same noise, as with `optax.add_noise`.

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

      docs/memory.md has a whole model, with embedding and head.

    References:
      Lv et al., `Full parameter fine-tuning for large language models with limited resources
      <https://arxiv.org/abs/2306.09782>`_, 2023; Refael et al., `SUMO
      <https://arxiv.org/abs/2505.24749>`_, Algorithm 1.
    """
    Flag().check("stacked", stacked)
    check_optimizer(optimizer, layers, ("block", "optimizer", "layers", "state", "x"))
    if not callable(block):
        raise ValueError(
            f"block, the first argument, must be a function of a layer and its input; got "
            f"{type(block)}."
        )
    _check_floating(layers)
    optimizer = optax.with_extra_args_support(optimizer)
    inputs = () if xs is None else (xs,)
    if not stacked:
        return _one_part(block, optimizer, layers, state, x, inputs)
    number = _number_of_layers(layers)
    _check_layer_axis("layers", layers, number)
    _check_layer_axis("xs", xs, number)
    states = layer_states(optimizer, layers, number)
    in_structure("state", states.whole, state, made_for="these layers", dtypes=False)
    x = jax.tree.map(jnp.asarray, x)

    def forward(x: Any, of_layer: Any) -> tuple[Any, Any]:
        layer, others = of_layer
        try:
            output = block(from_int8(layer), x, *others)
        except Exception as error:
            if note := _about_lists(layers):
                error.add_note(f"layers: {note}")
            raise
        _check_output(x, output)
        return output, x

    output, kept = jax.lax.scan(forward, x, (layers, inputs))

    def backward(dx: Any, **extra_args: Any) -> tuple[Any, Any, Any]:
        check_layers_are_independent(optimizer, layers, states, extra_args)
        per_layer, common = states.parts(states.whole, state)
        step = functools.partial(_layer_step, block, optimizer, states, extra_args)

        def visit(carry: Any, of_layer: Any) -> tuple[Any, Any]:
            (dx, stacked), (i, *inputs) = carry, of_layer
            changed = i, dx, states.slices(stacked, i), common
            i, dx, layer, returned = alone(step, (stacked, common, *inputs), changed)
            return (dx, states.replaced(stacked, i, layer)), returned

        carry = _cotangents(dx, output), (layers, per_layer)
        of_layers = jnp.arange(number), kept, inputs
        (dx, (updated, per_layer)), returned = jax.lax.scan(visit, carry, of_layers, reverse=True)
        return updated, states.combined(state, per_layer, returned), _with_floating(x, dx)

    return output, backward


def _layer_step(
    block: Any, optimizer: Any, states: LayerStates, extra_args: Any, inputs: Any, changed: Any
) -> Any:
    """The gradient of a layer, and then its update.

    `inputs` are all layers with the arrays of their states, the common arrays, and the inputs of
    this layer. `changed` starts with its index and the gradient of its output; the result, in the
    same form, is the index for writes, the gradient of the layer's input, the new layer with the
    arrays of its state, and the common arrays.
    """
    (stacked, common, x, others), (i, dx, *_) = inputs, changed
    layer, _ = states.slices(stacked, i)
    first = lambda layer, *x: block(jax.tree.map(lambda p: p[0], layer), *x)  # noqa: E731
    gradient, dx = _vjp(first, layer, x, others, dx)
    # The layer is sliced again, and written, at an index that exists once `dx` has read its
    # weights. If XLA could write them earlier, it would copy those of all layers.
    _, per_layer = states.slices(stacked, i)
    i, dx = jax.lax.optimization_barrier((i, dx))
    layer, _ = states.slices(stacked, i)
    state = states.restored(states.single, per_layer, common)
    updates, state = optimizer.update(gradient, state, layer, **extra_args)
    per_layer, common = states.parts(states.single, state)
    return i, dx, (optax.apply_updates(layer, updates), per_layer), common


def _one_part(
    block: Any, optimizer: Any, layer: Any, state: Any, x: Any, others: Any
) -> tuple[Any, Any]:
    output = block(from_int8(layer), x, *others)

    def backward(dx: Any, **extra_args: Any) -> tuple[Any, Any, Any]:
        def update_part(inputs: Any, changed: Any) -> Any:
            # The barriers: XLA keeps nothing of the forward pass for the block that is computed
            # again, and no gradient for later. The forward pass comes first, or the parameters
            # that it reads would be copied before they are updated in place.
            (x, others, dx, _), (layer, state, _) = jax.lax.optimization_barrier((inputs, changed))
            gradient, dx = _vjp(block, layer, x, others, dx)
            updates, state = optimizer.update(gradient, state, layer, **extra_args)
            new = optax.apply_updates(layer, updates)
            return jax.lax.optimization_barrier((new, state, dx))

        inputs = x, others, _cotangents(dx, output), output
        new, new_state, dx = alone(update_part, inputs, (layer, state, _floating(x)))
        return new, new_state, _with_floating(x, dx)

    return output, backward


def _check_floating(layers: Any) -> None:
    for name, x in named_leaves(jax.eval_shape(from_int8, layers)).present().items():
        if not _is_floating(x):
            raise ValueError(
                f"layers: parameters must be floating, because they get gradients; {name!r} has "
                f"dtype {x.dtype}. Give integers in xs, or in x."
            )


def _number_of_layers(layers: Any) -> int:
    """The length of the first axis of the first leaf; 0 if it has no axis."""
    if not (leaves := jax.tree.leaves(layers)):
        raise ValueError("layers must have at least one parameter.")
    number = len(leaves[0]) if jnp.ndim(leaves[0]) else 0
    if jnp.shape(leaves[0])[:1] == (0,):
        raise ValueError(
            "layers: there must be at least one layer; the first axis of its arrays, the layer "
            "axis, has length 0."
        )
    return number


def _check_layer_axis(argument: str, tree: Any, number: int) -> None:
    for name, x in named_leaves(tree).present().items():
        if jnp.shape(x)[:1] != (number,):
            raise ValueError(
                f"{argument}: the first axis of every array must be the layer axis, of {number} "
                f"layers; {name or 'it'!r} has shape {jnp.shape(x)}. {_about_lists(tree)}"
            )


def _about_lists(tree: Any) -> str:
    """How to give a list of layers, if it is one."""
    if not isinstance(tree, list | tuple):
        return ""
    return (
        f"It is a {type(tree).__name__}: stack layers that are alike, by "
        "jax.tree.map(lambda *x: jnp.stack(x), *layers), or give stacked=False and one of them."
    )


def _check_output(x: Any, output: Any) -> None:
    kind = functools.partial(jax.tree.map, lambda x: f"{jnp.result_type(x)}{[*jnp.shape(x)]}")
    if (before := kind(x)) != (after := kind(output)):
        raise ValueError(
            f"block: a layer gets {before} and returns {after}, but the next layer takes what it "
            "returns. Give stacked=False to parts that change it, such as an embedding or a head."
        )


def _vjp(block: Any, layer: Any, x: Any, others: Any, dx: Any) -> tuple[Any, Any]:
    """Gradients of a layer, decoded, and of the floating leaves of its input."""

    def output(layer: Any, floating: Any) -> Any:
        return _floating(block(layer, _with_floating(x, floating), *others))

    _, pullback = jax.vjp(output, from_int8(layer), _floating(x))
    return pullback(dx)


def _is_floating(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact)


def _floating(tree: Any) -> list[Any]:
    return [x for x in jax.tree.leaves(tree) if _is_floating(x)]


def _cotangents(dx: Any, output: Any) -> list[Any]:
    """The gradient of the floating arrays of `output`, in their dtypes."""
    arrays = _floating(jax.tree.map(jnp.asarray, dx))
    return [x.astype(y.dtype) for x, y in zip(arrays, _floating(output), strict=True)]


def _with_floating(tree: Any, floating: list[Any]) -> Any:
    new = iter(floating)
    return jax.tree.map(lambda x: next(new) if _is_floating(x) else x, tree)
