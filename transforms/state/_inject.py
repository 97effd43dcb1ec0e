"""Hyperparameters in the state: `optax.inject_hyperparams` with the right static arguments."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any, ParamSpec

import jax
import jax.numpy as jnp
import numpy as np
import optax

from .._keywords import check_keywords
from .._validate import Value, check_schedule, checked, shown

P = ParamSpec("P")


def inject_hyperparams(
    factory: Callable[..., optax.GradientTransformation],
    static_args: str | Iterable[str] = (),
    hyperparam_dtype: jax.typing.DTypeLike = jnp.float32,
) -> Callable[..., optax.GradientTransformationExtraArgs]:
    """`optax.inject_hyperparams` that keeps static arguments static, and float32.

    Use it to read, set or schedule hyperparameters during training. Optax's own function takes
    every integer for a hyperparameter and every callable for a schedule, such as a `rank` or a
    mask; and it rounds to the parameters' dtype, in which 0.999 is 1 for bfloat16. Here the
    hyperparameters are those arguments, given or default, that are

    - a float or a floating array without axes (an integer too, where the default is a float or the
      argument is a learning rate);
    - a schedule: a callable from a step to a number, or an Optax `StatefulSchedule`.

    The numbers of an argument that is a value, such as `compensation=subspaces.optimal()`, a policy
    or a storage, are hyperparameters too, under the names of both, as in `compensation_weight` or
    `refresh_threshold`. This name is also an argument, for a schedule.

    Everything else is static. Base optimizers and `others` have hyperparameters of their own, as in
    `others=inject_hyperparams(optax.adamw)(1e-3)`.

    Args:
      factory: an optimizer or transformation of this library or any other.
      static_args: names of further arguments to keep static.
      hyperparam_dtype: dtype of the hyperparameters in the state.

    Returns:
      A callable with the arguments of `factory`, which takes a schedule wherever `factory` takes a
      number. It makes a transformation whose state holds the numbers in `hyperparams`.

    Raises:
      ValueError: if `factory` is not a function, or `static_args` names an argument that it does
        not have.

    Example:
      >>> import curvax, jax, jax.numpy as jnp, optax
      >>> schedule = optax.linear_schedule(0.02, 0.0, 100)
      >>> optimizer = curvax.inject_hyperparams(curvax.galore)(schedule, rank=2, weight_decay=0.1)
      >>> params = {"dense": {"kernel": jnp.ones((4, 8)), "bias": jnp.zeros(8)}}
      >>> state = optimizer.init(params)
      >>> state.hyperparams["weight_decay"] = jnp.float32(0.2)
      >>> updates, state = jax.jit(optimizer.update)(params, state, params)
      >>> "rank" in state.hyperparams, round(float(state.hyperparams["b2"]), 6)
      (False, 0.999)
      >>> fira = curvax.subspaces.fira()
      >>> optimizer = curvax.inject_hyperparams(curvax.fira)(
      ...     schedule, rank=2, compensation=fira, compensation_weight=lambda step: 1 / (1 + step)
      ... )
    """
    if not callable(factory):
        raise ValueError(
            "factory must be a function that makes an optimizer, such as curvax.soap, and not the "
            f"optimizer; got {shown(factory)}."
        )
    named = {static_args} if isinstance(static_args, str) else set(static_args)
    optax.inject_hyperparams(factory, named)  # checks the names
    signature = inspect.signature(factory)

    @functools.wraps(factory)
    def injected(*args: Any, **kwargs: Any) -> optax.GradientTransformationExtraArgs:
        check_keywords(factory, signature.parameters, kwargs)
        known = {name: x for name, x in kwargs.items() if name in signature.parameters}
        defaults = signature.bind_partial(*args, **known)
        defaults.apply_defaults()
        made, extended = _with_numbers(factory, signature, defaults.arguments, named)
        bound = extended.bind(*args, **kwargs)
        bound.apply_defaults()
        static = set(named)
        for name, value in bound.arguments.items():
            number = _number_of(name, value, extended.parameters[name].default)
            if name in named or (number is None and not _is_schedule(value)):
                static.add(name)
            elif number is not None:
                bound.arguments[name] = number
        inject = optax.inject_hyperparams(made, static, hyperparam_dtype)  # pyright: ignore
        return inject(*bound.args, **bound.kwargs)  # pyright: ignore

    return injected


def scheduled(
    factory: Callable[P, optax.GradientTransformation],
) -> Callable[P, optax.GradientTransformation]:
    """Checks a direction's arguments; decay rates `b1`, `b2` and `b3` may be schedules."""
    # The direction's state has their counts, on each device: also on a mesh with Explicit axes.
    factory = checked(factory)

    @functools.wraps(factory)
    def made(*args: P.args, **kwargs: P.kwargs) -> optax.GradientTransformation:
        rates = {name for name in ("b1", "b2", "b3") if callable(kwargs.get(name))}
        if not rates:
            return factory(*args, **kwargs)
        for name in rates:
            check_schedule(f"{name} must be a number in [0, 1) or a schedule", kwargs[name])
        fixed = inspect.signature(factory).parameters.keys() - rates
        return optax.inject_hyperparams(factory, fixed, jnp.dtype(jnp.float32))(*args, **kwargs)

    return made


def _with_numbers(
    factory: Callable[..., Any],
    signature: inspect.Signature,
    arguments: dict[str, Any],
    named: set[str],
) -> tuple[Callable[..., Any], inspect.Signature]:
    """The factory with the numbers of its values as further arguments, and its signature."""
    places = {
        f"{name}_{x.name}": (name, x.name, number)
        for name, value in arguments.items()
        if isinstance(value, Value) and dataclasses.is_dataclass(value) and name not in named
        for x in dataclasses.fields(value)  # pyright: ignore[reportArgumentType]
        if (number := _number_of(x.name, getattr(value, x.name), x.default)) is not None
    }
    if not places:
        return factory, signature

    def made(*args: Any, **kwargs: Any) -> Any:
        for argument, (name, field, _) in places.items():
            kwargs[name] = dataclasses.replace(kwargs[name], **{field: kwargs.pop(argument)})
        return factory(*args, **kwargs)

    keyword = inspect.Parameter.KEYWORD_ONLY
    more = [inspect.Parameter(x, keyword, default=n) for x, (_, _, n) in places.items()]
    extended = signature.replace(parameters=[*signature.parameters.values(), *more])
    made.__signature__ = extended  # pyright: ignore
    return made, extended


def _number_of(name: str, value: Any, default: Any) -> Any:
    """The value as a real number, or `None`; for integers, the default or the name decides."""
    if isinstance(value, (jax.Array, np.ndarray, np.generic)):
        return value if value.ndim == 0 and jnp.issubdtype(value.dtype, jnp.floating) else None
    if isinstance(value, int) and not isinstance(value, bool):
        is_real = isinstance(default, float) or name.endswith("learning_rate")
        return float(value) if is_real else None
    return value if isinstance(value, float) else None


def _is_schedule(value: Any) -> bool:
    """Whether `value` maps a step to a number. Classes, such as dtypes, are callable but do not."""
    if isinstance(value, optax.schedules.StatefulSchedule):
        return True
    if not callable(value) or isinstance(value, type):
        return False
    try:
        result = jax.eval_shape(value, jax.ShapeDtypeStruct((), jnp.int32))
    except Exception:  # a mask, a predicate or an optimizer may raise anything on a step
        return False
    return (
        isinstance(result, jax.ShapeDtypeStruct)
        and result.shape == ()
        and jnp.issubdtype(result.dtype, jnp.number)
    )
