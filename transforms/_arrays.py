"""What parameters and gradients may be: checks whose errors name the path of an array."""

import numbers
from typing import Any

import jax
import jax.numpy as jnp

from ._paths import place_of
from ._validate import is_usable, shown


def check_matrices(tree: Any, method: str) -> None:
    """Requires every leaf of `tree` to be a real matrix or a batch of matrices `(..., m, n)`."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        name = place_of(path)
        if jnp.ndim(leaf) < 2:
            raise ValueError(
                f"{method} works on matrices (..., rows, columns), but the leaf {name!r} has shape "
                f"{jnp.shape(leaf)}. Wrap the transformation in curvax.on_matrices, or use the "
                "full optimizer, which gives such leaves to AdamW."
            )
        check_real(name, leaf)


def check_array(name: str, leaf: Any) -> None:
    """Requires a leaf that is an array, its shape, or a number: no string, no function."""
    if not (hasattr(leaf, "dtype") or isinstance(leaf, numbers.Number)):
        raise ValueError(
            f"the parameter {name!r} is {shown(leaf)}; parameters must be arrays or their shapes. "
            "Leave others out (eqx.filter(model, eqx.is_inexact_array), optax.masked)."
        )


def check_real(name: str, leaf: Any) -> None:
    """Requires a leaf with a real floating dtype of at least 16 bits, and no axis of size zero."""
    check_array(name, leaf)
    dtype = jnp.result_type(leaf)
    if not is_usable(dtype):
        narrow = jnp.issubdtype(dtype, jnp.floating)
        complex_ = jnp.issubdtype(dtype, jnp.complexfloating)
        raise ValueError(
            f"the parameter {name!r}, or its gradient, has dtype {dtype}; parameters and gradients "
            "must have a real floating dtype of at least 16 bits. "
            + "Keep them in bfloat16 or float32, and cast to 8 bits within the model." * narrow
            + "Wrap the optimizer in optax.contrib.split_real_and_imaginary." * complex_
            + "Leave others out of the optimizer (optax.masked, or `wrt` of nnx.Optimizer)."
            * (not narrow and not complex_)
        )
    if 0 in jnp.shape(leaf):
        raise ValueError(
            f"the parameter {name!r} has shape {jnp.shape(leaf)}: every axis must be at least 1. "
            "Leave it out of the optimizer (optax.masked, or `wrt` of nnx.Optimizer)."
        )


def check_same_shape(name: str, gradient: Any, parameter: Any) -> None:
    """Requires a gradient to have the shape of its parameter."""
    if jnp.shape(gradient) != jnp.shape(parameter):
        raise ValueError(
            f"the gradient of {name!r} must have the shape of its parameter, "
            f"{jnp.shape(parameter)}; got {jnp.shape(gradient)}."
        )
