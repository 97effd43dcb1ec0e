"""What arguments may be: one table of rules for all factories and values, and what reads it.

`RULES` has the rule of each argument by its name and, where a function allows something else, by
`function.name`. `checked` reads it for a factory, `check_fields` for the fields of a value. The
signature says the rest: `bool` is a flag, and what may be `None` takes it beside its rule. An error
is a `ValueError` that names the argument, its value and the allowed values. Real numbers that are
tracers are not checked: `inject_hyperparams` calls factories with them.
"""

import abc
import dataclasses
import functools
import inspect
import numbers
import re
import sys
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer

from ._keywords import check_keywords

MODULES = ("policies", "subspaces", "polar", "grafts", "eigenbases", "weights")
"""Where curvax has functions that give a value for an argument."""

MAX_INTEGER = 2**31 - 1
"""The largest integer of a compiled program: int32, as JAX has it by default."""


def shown(value: Any) -> str:
    """A value in one short line; of a function of curvax that gives one, how to call it."""
    name = getattr(value, "__name__", None)
    for module in ("curvax", *(f"curvax.{name}" for name in MODULES)):
        is_public = name is not None and getattr(sys.modules.get(module), name, None) is value
        if is_public and value.__module__.startswith("curvax.transforms."):
            arguments = inspect.signature(value).parameters.values()
            needed = ", ".join(a.name for a in arguments if a.default is a.empty)
            return f"the function {name}; call it: {module}.{name}({needed})"
    text = " ".join(repr(value).split())
    return text if len(text) <= 80 else f"{text[:76]} ..."


def concrete(value: Any) -> float | None:
    """The value as a float; `None` for a tracer, NaN if it is not a number, or a bool."""
    if isinstance(value, Tracer):
        return None
    is_scalar = isinstance(value, (np.ndarray, jax.Array)) and value.ndim == 0
    is_bool = isinstance(value, bool) or getattr(value, "dtype", None) == "bool"
    try:
        is_number = (isinstance(value, numbers.Real) or is_scalar) and not is_bool
        return float(value) if is_number else float("nan")
    except OverflowError:  # of an integer
        return float("nan")


class Rule(abc.ABC):
    """The values that an argument may have; as text, what it must be."""

    got = ", got"

    @abc.abstractmethod
    def __contains__(self, value: Any) -> bool: ...

    def hint(self, name: str, value: Any) -> str:
        """Sentences to add to the error about another value."""
        del name, value
        return ""

    def check(self, name: str, value: Any, more: str = "") -> None:
        """Raises the error that names the argument."""
        if value not in self:
            hint = self.hint(name, value)
            raise ValueError(f"{name} must be {self}{more}{self.got} {shown(value)}.{hint}")


@dataclasses.dataclass(frozen=True)
class Number(Rule):
    """The real numbers of an interval, such as "[0, 1)", and schedules of them; and tracers."""

    interval: str
    scheduled: bool = False

    def __str__(self) -> str:
        or_one = " or a schedule (a function of the step to one)" * self.scheduled
        return f"a number in {self.interval}{or_one}"

    def __contains__(self, value: Any) -> bool:
        low, high = map(float, self.interval[1:-1].split(","))
        number = concrete(value)
        if number is None or low < number < high:
            return True
        return (number == low and "[" in self.interval) or (number == high and "]" in self.interval)

    def check(self, name: str, value: Any, more: str = "") -> None:
        """Raises the error that names the argument; a schedule is tried."""
        if self.scheduled and callable(value):
            check_schedule(f"{name} must be {self}", value)
        else:
            super().check(name, value, more)


@dataclasses.dataclass(frozen=True)
class Integer(Rule):
    """The integers between two, no bools; tracers if programs do not depend on the number."""

    low: int
    high: int = MAX_INTEGER
    traced: bool = False

    def __str__(self) -> str:
        return f"an integer of at least {self.low}"

    def __contains__(self, value: Any) -> bool:
        if isinstance(value, Tracer):
            return self.traced
        integral = isinstance(value, numbers.Integral) or (
            isinstance(value, np.ndarray) and value.ndim == 0 and value.dtype.kind in "iu"
        )
        return integral and not isinstance(value, bool) and self.low <= int(value) <= self.high

    def hint(self, name: str, value: Any) -> str:
        """The largest integer, or what makes arrays of integers."""
        if isinstance(value, int) and value > self.high:
            return f" The largest is {self.high}."
        return if_injected(name, value)


class Flag(Rule):
    """Bools, and tracers."""

    def __str__(self) -> str:
        return "True or False"

    def __contains__(self, value: Any) -> bool:
        return isinstance(value, (bool, np.bool_, Tracer))


@dataclasses.dataclass(frozen=True)
class OneOf(Rule):
    """A few values: words, mostly."""

    values: Collection[Any]
    got = "; got"

    def __str__(self) -> str:
        return f"one of {', '.join(map(repr, self.values))}"

    def __contains__(self, value: Any) -> bool:
        return any(value is a or (type(value) is type(a) and value == a) for a in self.values)


def is_usable(dtype: Any) -> bool:
    """Whether a dtype is real, floating, and of those that JAX promotes: not float8 or float4."""
    return jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits >= 16


class Dtype(Rule):
    """Real floating dtypes that JAX promotes, and their names."""

    got = "; got"

    def __str__(self) -> str:
        return "a real floating dtype of at least 16 bits, such as 'bfloat16' or 'float32'"

    def __contains__(self, value: Any) -> bool:
        try:
            return is_usable(jnp.dtype(value))
        except TypeError:
            return False

    def hint(self, name: str, value: Any) -> str:
        """The name for which a short one stands, and what has fewer bits."""
        long = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
        write = f" Write {long[value]!r}." if isinstance(value, str) and value in long else ""
        return f"{write} (curvax.quantize_state stores moments in 8 or 4 bits.)"


RULES: dict[str, Rule] = {
    name: rule
    for rule, names in (
        # Decay rates and shares.
        (Number("[0, 1)"), "b1 b2 b3 decay error_feedback ema_nesterov.gamma cushion tolerance"),
        (Number("[0, 1)", scheduled=True), "primal_average.mu_x"),
        (Number("[0, 1]", scheduled=True), "lowest highest"),
        (Number("[0, 1]"), "tail_average.share"),
        (Number("(0, 1]"), "mu_y"),
        (Number("(0, 1)"), "lower"),
        (Number("[-1, 1)"), "min_agree"),
        # Rates, scales, dampings and bounds.
        (Number("[0, inf)", scheduled=True), "learning_rate adam_learning_rate ema_nesterov.beta"),
        (Number("[0, inf)", scheduled=True), "weight_decay"),
        (Number("[0, inf)"), "decay.weight_decay add_cautious_decay.weight_decay eps initial"),
        (Number("[0, inf)"), "scale weight residual inward min_rms rounding_floor"),
        (Number("[0, inf)"), "below_norm.threshold"),
        (Number("(0, inf)"), "beta coefficient consistent_rms max_norm normalize_matrices.length"),
        (Number("(0, inf)"), "outward rms share cholesky.eps packed.eps clip_logits.threshold"),
        (Number("(0, inf]"), "limit max_damping threshold"),
        (Number("[1, inf]"), "gamma"),
        (Number("[1, inf)"), "safety tau"),
        (Number("(1, inf)"), "ratio"),
        # Integers.
        (Integer(1), "block block_size column_heads iterations max_order min_elements most"),
        (Integer(1), "oversampling rank rounds row_heads skip_spikes.warmup_steps steps"),
        (Integer(1, traced=True), "check_every k root statistics_every power_iteration.iterations"),
        (Integer(1, traced=True), "tail_average.start tail_average.end"),
        (Integer(1, 1000), "coefficient_rows.steps polar_express.steps"),
        (Integer(0), "leading warmup_steps"),
        (Integer(0, 2**63 - 1), "seed"),  # from which JAX makes a random key
        (Integer(-MAX_INTEGER), "offset"),
        # Words. Those that are the keys of a table are checked beside it.
        (OneOf(("both", "left", "right", "smaller")), "side"),
        (OneOf(("left", "right", "smaller")), "asgo.side"),
        (OneOf(("left", "right")), "dasgo.side precondition_diagonal.side"),
        (OneOf(("left", "right", "smaller", "larger")), "dion.side normalize_neurons.side"),
        (
            OneOf(("smaller", "larger", "left", "right", "std")),
            "in_subspace.side galore.side fira.side apollo.side alice.side sumo.side",
        ),
        (OneOf(("gradient", "momentum", "kl")), "precondition.statistics shampoo.statistics"),
        (OneOf(("gradient", "kl")), "in_eigenbasis.statistics soap.statistics"),
        (OneOf(("absolute", "relative", "floor", "outside")), "damping_mode"),
        (OneOf(("relative", "absolute")), "cholesky.damping_mode"),
        (OneOf(("practical", "theoretical", "from_momentum")), "variant"),
        (OneOf(("ema", "sum")), "accumulate"),
        (OneOf(("first", "sum")), "blend.length"),
        (OneOf(("frobenius", "gram", "aol")), "newton_schulz.norm"),
        (OneOf(("rms", "spectral")), "normalize_matrices.norm"),
        (OneOf(("matrix", "row", "column")), "floor.unit"),
        (OneOf(("parameter", "matrix")), "skip_spikes.unit"),
        (Dtype(), "dtype"),
    )
    for name in names.split()
}
"""By the name of an argument, or of a function without `scale_by_` and an argument."""


@functools.cache
def rules_of(made: Any) -> dict[str, tuple[Rule, bool]]:
    """By argument of a factory or a value's class: its rule, and whether it takes `None` too."""
    owner = re.sub("(?<=[a-z])(?=[A-Z])", "_", made.__name__).lower().removeprefix("scale_by_")
    rules = {}
    for name, parameter in inspect.signature(made, eval_str=True).parameters.items():
        is_flag = parameter.annotation in (bool, bool | None)
        rule = RULES.get(f"{owner}.{name}") or (Flag() if is_flag else RULES.get(name))
        if rule is not None:
            none = type(None) in get_args(parameter.annotation)
            rules[name] = rule, none or parameter.default is None
    return rules


def check_arguments(made: Any, values: Mapping[str, Any]) -> None:
    """Checks arguments of a factory, or fields of a value's class."""
    for name, (rule, optional) in rules_of(made).items():
        if name in values and not (optional and values[name] is None):
            rule.check(name, values[name], " or None" * optional)


F = TypeVar("F", bound=Callable[..., Any])


def checked(factory: F) -> F:
    """A factory that checks what it is given."""
    code = factory.__code__
    arguments = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]

    @functools.wraps(factory)
    def call(*args: Any, **kwargs: Any) -> Any:
        check_keywords(factory, arguments, kwargs)
        check_arguments(factory, {**dict(zip(arguments, args, strict=False)), **kwargs})
        return factory(*args, **kwargs)

    same: Any = call
    return same


def check_fields(value: Any, but: Any = None) -> None:
    """Checks the fields of a value, `but` one that says nothing: its class' `__post_init__`."""
    values = {name: x for name, x in vars(value).items() if but is None or x is not but}
    check_arguments(type(value), values)


NO_STATE = "state is None; it must be that of optimizer.init(params), or of the last update."


def check_state_given(state: Any) -> None:
    """Requires a state in `update`."""
    if state is None:
        raise ValueError(NO_STATE)


def check_given(state: Any, params: Any) -> None:
    """Requires a state and parameters in `update`."""
    check_state_given(state)
    if params is None:
        raise ValueError("update needs params: optimizer.update(gradients, state, params).")


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


def check_schedule(allowed: str, value: Any) -> None:
    """Requires a function of the step to a number; `allowed` begins the error."""
    try:
        # Of a new function: JAX would keep the trace of this one for calls under another precision.
        rate = jax.eval_shape(lambda step: value(step), jax.ShapeDtypeStruct((), "int32"))
    except jax.errors.JAXTypeError:  # it reads the step, which has to be concrete
        return
    except Exception as error:
        made = "; call it to make a schedule" if isinstance(error, TypeError) else ""
        raise ValueError(f"{allowed}; {shown(value)} of a step raises {error!r}{made}.") from error
    if getattr(rate, "shape", None) != ():
        raise ValueError(f"{allowed}; {shown(value)} of a step gives {rate}.")


def if_injected(name: str, value: Any) -> str:
    """A sentence to add to the message about an argument that has to be static."""
    if not isinstance(value, jax.Array):
        return ""
    return (
        " It has to be a Python integer, which no schedule gives; optax.inject_hyperparams makes "
        "arrays of all numbers, where curvax.inject_hyperparams keeps integers (or add "
        f"{name!r} to Optax's static_args)."
    )


class Value(abc.ABC):  # noqa: B024
    """An option that has options of its own, such as a method with its number of steps.

    A value is a frozen dataclass that a factory makes, and not callable, because Optax's
    `inject_hyperparams` takes callables for schedules; ours makes hyperparameters of its numbers.
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
