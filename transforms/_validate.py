"""Argument checks shared by all factories, and the base of options that have options.

Each raises a `ValueError` that names the argument, its value and the allowed values. Real numbers
that are tracers are not checked: `inject_hyperparams` calls factories with them.
"""

from __future__ import annotations

import abc
import inspect
import numbers
import sys
import textwrap
from collections.abc import Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer

_OF_VALUES = ("policies", "subspaces", "polar", "grafts", "eigenbases", "weights")
MODULES = ("curvax", *(f"curvax.{name}" for name in _OF_VALUES))
"""Where functions of curvax are found that give a value for an argument."""

MAX_INTEGER = 2**31 - 1
"""The largest integer of a compiled program: int32, as JAX has it by default."""


def shown(value: Any) -> str:
    """A value in one short line; of a function of curvax that gives one, how to call it."""
    name = getattr(value, "__name__", None)
    for module in MODULES:
        is_public = name is not None and getattr(sys.modules.get(module), name, None) is value
        if is_public and value.__module__.startswith("curvax.transforms."):
            arguments = inspect.signature(value).parameters.values()
            needed = ", ".join(a.name for a in arguments if a.default is a.empty)
            return f"the function {name}; call it: {module}.{name}({needed})"
    return textwrap.shorten(repr(value), 80, placeholder=" ...")


def check_transformation(name: str, value: Any) -> None:
    """Requires an Optax transformation."""
    if not isinstance(value, optax.GradientTransformation):
        raise ValueError(f"{name} must be an Optax transformation, got {shown(value)}.")


def as_transformation(name: str, value: Any) -> optax.GradientTransformationExtraArgs:
    """An Optax transformation that takes extra arguments, from one or from `optax.MultiSteps`."""
    if isinstance(value, optax.MultiSteps):
        update: Any = value.update
        return optax.GradientTransformationExtraArgs(value.init, update)
    check_transformation(name, value)
    return optax.with_extra_args_support(value)


def check_predicate(name: str, value: Any) -> None:
    """Requires a function of a path and a leaf."""
    try:
        inspect.signature(value).bind("path", None)
    except TypeError as error:
        raise ValueError(
            f"{name} must be a predicate that is called with path and leaf, such as "
            f"lambda path, leaf: leaf.ndim == 2; got {shown(value)}."
        ) from error
    except ValueError:  # a function in C without a signature
        return


def concrete(value: Any) -> float | None:
    """The value as a float; `None` for a tracer, NaN if it is not a number, or a bool."""
    if isinstance(value, Tracer):
        return None
    if isinstance(value, bool) or getattr(value, "dtype", None) == "bool":
        return float("nan")
    if isinstance(value, numbers.Real) or (
        isinstance(value, (np.ndarray, jax.Array)) and value.ndim == 0
    ):
        try:
            return float(value)
        except OverflowError:  # of an integer
            return float("nan")
    return float("nan")


def check_interval(
    name: str,
    value: Any,
    low: float,
    high: float = float("inf"),
    *,
    open_low: bool = False,
    open_high: bool = True,
) -> None:
    """Requires `low <= value <= high`; an open end is excluded."""
    number = concrete(value)
    if number is None:
        return
    above = number > low if open_low else number >= low
    below = number < high if open_high else number <= high
    if not (above and below):
        bounds = f"{'(' if open_low else '['}{low:g}, {high:g}{')' if open_high else ']'}"
        raise ValueError(f"{name} must be a number in {bounds}, got {value!r}.")


def check_rate(name: str, value: Any) -> None:
    """Requires a learning rate: a number of at least 0, or a schedule, a function of the step."""
    allowed = f"{name} must be a number in [0, inf) or a schedule, a function of the step to one"
    if callable(value):
        check_schedule(allowed, value)
        return
    number = concrete(value)
    if number is not None and not 0 <= number < float("inf"):
        raise ValueError(f"{allowed}; got {value!r}.")


def check_schedule(allowed: str, value: Any) -> None:
    """Requires a function of the step to a number; `allowed` begins the error."""
    try:
        rate = jax.eval_shape(value, jax.ShapeDtypeStruct((), "int32"))
    except jax.errors.JAXTypeError:  # it reads the step, which has to be concrete
        return
    except Exception as error:
        made = "; call it to make a schedule" if isinstance(error, TypeError) else ""
        raise ValueError(f"{allowed}; {shown(value)} of a step raises {error!r}{made}.") from error
    if getattr(rate, "shape", None) != ():
        raise ValueError(f"{allowed}; {shown(value)} of a step gives {rate}.")


def check_decay(name: str, value: Any) -> None:
    """Requires the decay rate of a moving average: 0 <= value < 1."""
    check_interval(name, value, 0.0, 1.0)


def check_adam(b1: Any, b2: Any, eps: Any) -> None:
    """Requires Adam's decay rates and its ε, which Optax does not check."""
    check_decay("b1", b1)
    check_decay("b2", b2)
    check_interval("eps", eps, 0.0)


def check_positive_int(name: str, value: Any, *, traced: bool = False) -> None:
    """Requires an integer of at least 1; a bool is not accepted."""
    check_integer(name, value, 1, traced=traced)


def check_integer(
    name: str, value: Any, low: int, high: int = MAX_INTEGER, *, traced: bool = False
) -> None:
    """Requires an integer from `low` to `high`; a bool is not accepted.

    A tracer is accepted only with `traced`, where programs do not depend on the number.
    """
    if traced and isinstance(value, Tracer):
        return
    integral = isinstance(value, numbers.Integral) or (
        isinstance(value, np.ndarray) and value.ndim == 0 and value.dtype.kind in "iu"
    )
    if isinstance(value, bool) or not integral or not low <= int(value) <= high:
        too_large = integral and int(value) > high
        allowed = f"from {low} to {high}" if too_large else f"of at least {low}"
        raise ValueError(
            f"{name} must be an integer {allowed}, got {value!r}.{if_injected(name, value)}"
        )


def check_seed(value: Any) -> None:
    """Requires a `seed` from which JAX makes a random key."""
    check_integer("seed", value, 0, 2**63 - 1)


def if_injected(name: str, value: Any) -> str:
    """A sentence to add to the message about an argument that has to be static."""
    if not isinstance(value, jax.Array):
        return ""
    return (
        " It has to be a Python integer, and optax.inject_hyperparams makes arrays of all numbers: "
        f"use curvax.inject_hyperparams, or add {name!r} to Optax's static_args."
    )


def check_choice(name: str, value: Any, allowed: Collection[Any]) -> None:
    """Requires `value` to be one of `allowed`."""
    if not any(value is a or (type(value) is type(a) and value == a) for a in allowed):
        choices = ", ".join(repr(a) for a in allowed)
        raise ValueError(f"{name} must be one of {choices}; got {value!r}.")


class Value(abc.ABC):  # noqa: B024
    """An option that has options of its own, such as a method with its number of steps.

    A value is a frozen dataclass that a factory makes. It is not callable, because Optax's
    `inject_hyperparams` takes callables for schedules. `curvax.inject_hyperparams` makes
    hyperparameters of its numbers.
    """


def check_value(name: str, value: Any, kind: type, examples: str) -> None:
    """Requires a value of this kind, rather than the function or class that makes one."""
    if not isinstance(value, kind):
        raise ValueError(f"{name} must be {examples}, got {shown(value)}.")


def as_value(name: str, value: Any, kind: type, example: str, names: Mapping[Any, Any]) -> Any:
    """`value`, or the value of this name in `names`, where `None` may be a name too."""
    if (value is None or isinstance(value, str)) and value in names:
        return names[value]
    choices = ", ".join(map(repr, names))
    check_value(name, value, kind, f"one of {choices}, or a value such as {example}")
    return value


def check_bool(name: str, value: Any) -> None:
    """Requires a bool."""
    if not isinstance(value, (bool, np.bool_, Tracer)):
        raise ValueError(f"{name} must be True or False, got {value!r}.")


def check_dtype(name: str, value: Any) -> np.dtype:
    """The dtype that `value` names; it must be a real floating one."""
    try:
        dtype = jnp.dtype(value)
    except TypeError:
        dtype = None
    if dtype is None or not _is_usable(dtype):
        name_of = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
        short = isinstance(value, str) and value in name_of
        hint = f"; write {name_of[value]!r}" if short else ""
        raise ValueError(
            f"{name} must be a real floating dtype of at least 16 bits, such as 'bfloat16' or "
            f"'float32'; got {value!r}{hint}. (curvax.quantize_state stores moments in 8 or 4 "
            "bits.)"
        )
    return dtype


def _is_usable(dtype: Any) -> bool:
    """Whether a dtype is real, floating, and of those that JAX promotes: not float8 or float4."""
    return jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits >= 16


def check_matrices(tree: Any, method: str) -> None:
    """Requires every leaf of `tree` to be a real matrix or a batch of matrices `(..., m, n)`."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
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
    if not _is_usable(dtype):
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
            f"the parameter {name!r} has shape {jnp.shape(leaf)}: every axis must be at least 1."
        )


def check_same_shape(name: str, gradient: Any, parameter: Any) -> None:
    """Requires a gradient to have the shape of its parameter."""
    if jnp.shape(gradient) != jnp.shape(parameter):
        raise ValueError(
            f"the gradient of {name!r} must have the shape of its parameter, "
            f"{jnp.shape(parameter)}; got {jnp.shape(gradient)}."
        )
