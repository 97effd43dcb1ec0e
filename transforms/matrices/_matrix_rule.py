"""The rule that decides which parameters are matrices, and along which axes.

It asks, in this order: the user's axes (`_specification`), the output layer (`_output_layer`), the
box around the array (`_annotated`), the family of models (`_families`), and the rule for the name,
the shape and what lies beside it (`_names`, `_parameters`, `_readings`), also what goes to other
optimizers (`shapes_around`). Without evidence, one error lists all such parameters.
"""

import dataclasses
import enum
import re
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from .._arrays import check_real
from .._paths import check_patterns, matches, named_leaves, shapes_around
from .._validate import check_fields, check_predicate, shown
from ._annotated import annotated
from ._families import NAMES, Family
from ._form import MatrixAxes, Reading, Readings, as_tuple
from ._names import OF_CHANNELS, Shapes, as_read
from ._output_layer import find_output_layer
from ._parameters import Parameter, Parameters
from ._readings import axes_of
from ._specification import specified

Treatment = MatrixAxes | str
"""The axes of a matrix, or the reason why a parameter is not a matrix."""

Selection = str | Sequence[str] | Callable[[str, Any], bool]
"""Glob pattern(s) on paths, or a predicate of path and leaf."""

_WORDS: dict[str, tuple[str, Callable[[Mapping[str, Any]], frozenset[str]]]] = {
    "matrices": ("all", frozenset),
    "output_layer": ("auto", find_output_layer),
}
"""By argument, the word for a selection, and the paths that it selects."""

_SHOWN = 5
"""The most parameters that an error names in its first line."""

_SHARED_TABLE = re.compile(r"(.*/)?pytree/\d+/weight")
"""The layers of Equinox' `Shared`, of which one is often a table."""


class _Default(enum.Enum):
    METHODS_OWN = "the method's own"

    def __repr__(self) -> str:
        return f"<{self.value}>"


METHODS_OWN: Any = _Default.METHODS_OWN
"""The default of fields for which a method may have its own; outside a method it means `None`.

It differs from `None`, with which a user switches off the default of a method."""


@dataclasses.dataclass(frozen=True)
class MatrixRule:
    """Decides whether each parameter is a matrix, or a batch of matrices, and along which axes.

    The default rule (`docs/matrices.md` has all of it) goes by path, shape and siblings:

    | parameter | treatment |
    |---|---|
    | vectors, biases, scales, gates, parameters of norms | not a matrix |
    | embeddings of tokens and positions, learned tokens | not a matrix |
    | `kernel`, `w`, `wq`, `up_proj`, ... `(in, out)` | rows × columns as stored |
    | `weight` `(out, in)`, torch's and Equinox's | columns × rows, unless its bias contradicts |
    | `query`, `key`, `value` `(D, H, K)` | `D × H·K` (`head_wise`: `H` of `D × K`) |
    | `out` `(H, K, D)` | `H·K × D` |
    | convolutions, `kernel` `(..., in, out)` | all axes but the last × last |
    | convolutions, `weight` `(out, in, ...)` | all axes but the first × first |
    | depthwise convolutions, by name, or beside `A_log`: a filter per channel | not a matrix |
    | two axes, any other name | rows × columns as stored; `summarize` calls it a guess |
    | a possible stack of layers, and anything else | an error with the readings to paste |

    Every optimizer takes a rule as its argument `matrices`. A field that is left out takes the
    default of the method, if it has one (`matrices="all"` of `asgo` and `dasgo`,
    `output_layer="auto"` of `racs` and `apollo`, `block_size=1200` of `shampoo`), else `None`.
    A field set to `None` is `None` in every method.

    Args:
      matrices: which parameters are matrices. `None` is the rule above. `"all"` takes every
        parameter (a vector, a `bias` or a `scale` is then a matrix with one row). A glob pattern on
        paths (`*` also matches "/"), several patterns, or a predicate `(path, leaf) -> bool` select
        parameters.
      weight_dimension_numbers: axes that override those of the rule. Either a tree (or prefix tree)
        of `MatrixAxes`, dimension numbers of Optax's Muon or GaLore, or `None` (not a matrix) with
        the structure of the parameters; or a callable from the parameters to such a tree; or a
        mapping from path patterns to entries, in which the first match wins. The rule decides on
        unmatched parameters, and on those that lack the axes of an entry for many parameters.
      head_wise: whether query and key kernels `(D, H, K)` are one matrix per head.
      output_layer: a pattern or predicate for an output layer that is *not* a matrix. `"auto"`
        finds it (see `find_output_layer`); `None` makes no exception.
      block_size: cuts matrices into balanced blocks of at most this many rows and columns, each a
        separate matrix; `None` does not cut. Where it does not divide a side, the last blocks have
        a row or column of zeros, which counts in the means that `swan`, `kl_shampoo` and
        `normalize_matrices` take over rows and columns.
      family: conventions of a family of models; `curvax.rules` has rules with one.
      guess: `False` makes an error of each matrix that `summarize` calls a guess.
      stack: `True` stacks all matrices of one shape in one array, `False` stacks none, and `None`
        stacks all but parameters that are a batch of matrices of more than 128 × 128 elements
        already, such as scanned layers and experts: these have an array of their own.

    Raises:
      ValueError: naming the invalid field.

    Example:
      >>> import curvax
      >>> rule = curvax.MatrixRule(block_size=256, head_wise=True)
      >>> optimizer = curvax.shampoo(1e-3, matrices=rule)
    """

    matrices: Selection | None = METHODS_OWN
    weight_dimension_numbers: Any = None
    head_wise: bool = False
    output_layer: Selection | None = METHODS_OWN
    block_size: int | None = METHODS_OWN
    stack: bool | None = None
    family: Family | None = None
    guess: bool = True

    def __post_init__(self):
        _check_selection("matrices", self.matrices)
        _check_selection("output_layer", self.output_layer)
        _check_no_rule("weight_dimension_numbers", self.weight_dimension_numbers)
        check_fields(self, but=METHODS_OWN)
        if not (self.family is None or isinstance(self.family, Family)):
            raise ValueError(
                "family must be None or that of a rule in curvax.rules, such as "
                f"curvax.rules.maxtext.family; got {self.family!r}."
            )

    def __call__(self, params: Any) -> dict[str, Treatment]:
        """Returns the treatment of each parameter by path.

        Raises:
          ValueError: naming the parameter, if its dtype is not real and floating, if it has an axis
            of size zero, or if it needs a specification; naming the argument, if a pattern matches
            no parameter or a tree has another structure.
        """
        named = named_leaves(params)
        leaves = named.present()
        for name, leaf in leaves.items():
            check_real(name, leaf)
        shapes = shapes_around(named)
        read = as_read(shapes)
        parameters = Parameters({read[name]: shape for name, shape in shapes.items()})
        boxed = annotated(params, named, read, parameters)
        specification = specified(self.weight_dimension_numbers, params, named.names, shapes)
        complete = as_rule(self)
        excluded = _selected("output_layer", complete.output_layer, leaves, named.names) or ()
        chosen = _selected("matrices", complete.matrices, leaves, named.names)

        # The user's word goes before that of a box.
        said: dict[str, Treatment] = {n: x for n, x in boxed.items() if isinstance(x, MatrixAxes)}
        if chosen is not None:
            said |= dict.fromkeys(leaves.keys() - chosen, "not selected by matrices")
        said |= {n: x or "weight_dimension_numbers is None" for n, x in specification.items()}
        said |= dict.fromkeys(excluded, "output layer")

        def treatment(name: str) -> Treatment | Readings:
            p = parameters.each[read[name]]
            return self._treatment(p, boxed.get(name), selected=chosen is not None)

        treatments = {name: said.get(name) or treatment(name) for name in leaves}
        unclear = {name: x for name, x in treatments.items() if isinstance(x, tuple)}
        if unclear:
            raise _unspecified(unclear, shapes, named.names)
        return {name: x for name, x in treatments.items() if not isinstance(x, tuple)}

    def _treatment(
        self, p: Parameter, known: Treatment | Readings | None, *, selected: bool
    ) -> Treatment | Readings:
        """What its box says, or else the family, or else the rule; and whether it is a guess."""
        if known is None and self.family is not None:
            known = self.family(p)
        if known is None or (selected and isinstance(known, str)):
            known = _by_rule(p, selected=selected)
        if not isinstance(known, MatrixAxes):
            return known
        columns = as_tuple(known.columns)
        of_heads = p.role in ("query", "key") or p.place.layer == "q_einsum"
        if self.head_wise and of_heads and len(columns) == 2:
            known = dataclasses.replace(known, columns=columns[1])  # each head is a matrix
        guess = None if selected else _guess(p, known)
        if guess is None:
            return known
        if self.guess:
            return dataclasses.replace(known, said_by=guess)
        turned = Reading(MatrixAxes(known.columns, known.rows), "outputs first")
        return (Reading(known, guess), *[turned] * (len(known.named) == 2))


Matrices = Selection | MatrixRule | None
"""The type of an optimizer's argument `matrices`."""


def as_rule(
    matrices: Matrices = None, weight_dimension_numbers: Any = None, /, **defaults: Any
) -> MatrixRule:
    """Builds the complete rule from two arguments of an optimizer.

    `defaults` are the method's, of fields that the rule leaves out; other fields become `None`.
    """
    rule = matrices if isinstance(matrices, MatrixRule) else MatrixRule(matrices)
    left_out = [f.name for f in dataclasses.fields(rule) if getattr(rule, f.name) is METHODS_OWN]
    fields = {name: defaults.get(name) for name in left_out}
    if weight_dimension_numbers is not None:
        if rule.weight_dimension_numbers is not None:
            raise ValueError(
                "weight_dimension_numbers is given both as an argument and in matrices="
                f"MatrixRule(...); give it only once. The argument is {weight_dimension_numbers!r}."
            )
        fields["weight_dimension_numbers"] = weight_dimension_numbers
    return dataclasses.replace(rule, **fields)


def _by_rule(p: Parameter, *, selected: bool) -> Treatment | Readings:
    """The rule for one parameter; what a user selected is a matrix under any name."""
    is_vector = sum(size > 1 for size in p.shape) <= 1
    if p.ndim <= 1:
        reason = "vector" if p.shape else "scalar"
    elif is_vector and not p.is_named and not (selected and p.ndim == 2):
        reason = "vector"
    elif p.reason is not None or selected:
        reason = None if selected and p.reason == "embedding" else p.reason
    elif p.is_depthwise:
        reason = "depthwise convolution"
    else:
        per_layer = p.ndim == 2 and not p.is_named and p.is_vector_per_layer
        reason = "a vector per layer" if per_layer else None
    known = reason or axes_of(p)
    if isinstance(known, tuple) and is_vector:
        known = "vector"
    if selected and isinstance(known, str):
        return MatrixAxes(rows=(), columns=tuple(range(p.ndim)))  # one row
    return known


def _guess(p: Parameter, axes: MatrixAxes) -> str | None:
    """Why it is a guess that the parameter is a matrix; None if it is not."""
    if p.ndim == 2 and not axes.said_by and not p.is_named:
        return "a guess from its two axes"
    last = p.last.lower()  # like `mm_input_weight`: no `weight` of a layer, nor one of torch
    if p.ndim == 2 and last.endswith("_weight") and not last.endswith("proj_weight"):
        return "a guess: its inputs may come first"
    if _SHARED_TABLE.fullmatch(p.name):
        return "a guess: a shared table has the same name"
    merged = p.ndim > 3 and not isinstance(axes.rows, int)
    of_channels = len(axes.named) == 2 < p.ndim and p.is_called(OF_CHANNELS)
    if of_channels or ((merged or p.is_convolution) and p.has_one_input):
        return "a guess: a depthwise convolution has the same shape"
    return None


def _check_no_rule(argument: str, value: Any) -> None:
    """Refuses a rule, its name or family, or the module of rules in the place of another value."""
    if isinstance(value, str) and value in NAMES:
        raise ValueError(f"{argument} is {value!r}; give the rule, matrices=curvax.rules.{value}.")
    if isinstance(value, (types.ModuleType, MatrixRule, Family)):
        what = "a rule or its family; give a rule"
        if isinstance(value, types.ModuleType):
            what = f"the module {value.__name__}; give a rule of it"
        raise ValueError(f"{argument} is {what} as matrices=, such as matrices=curvax.rules.linen.")


def _check_selection(argument: str, selection: Any) -> None:
    _check_no_rule(argument, selection)
    patterns = isinstance(selection, (list, tuple)) and all(isinstance(p, str) for p in selection)
    predicate = callable(selection) and not isinstance(selection, type)
    left_out = selection is None or selection is METHODS_OWN
    if not (left_out or isinstance(selection, str) or patterns or predicate):
        word, _ = _WORDS[argument]
        raise ValueError(
            f'{argument} must be None, "{word}", a path pattern, a sequence of them, a predicate '
            "such as lambda path, leaf: leaf.ndim == 2 (a mask goes to optax.partition), or "
            f"curvax.MatrixRule(…) for more; got {shown(selection)}."
        )
    if predicate:
        check_predicate(argument, selection)


def _selected(
    argument: str, selection: Selection | None, leaves: Mapping[str, Any], names: Sequence[str]
) -> frozenset[str] | None:
    """The paths that `selection` selects; a pattern that matches none of `names` is an error."""
    if selection is None:
        return None
    word, selected_by_word = _WORDS[argument]
    if selection == word:
        return selected_by_word(leaves)
    if callable(selection):
        return frozenset(name for name, leaf in leaves.items() if selection(name, leaf))
    patterns = [selection] if isinstance(selection, str) else list(selection)
    check_patterns(argument, patterns, names)
    return frozenset(name for name in leaves if any(matches(name, p) for p in patterns))


def _unspecified(
    unclear: Mapping[str, Readings], shapes: Shapes, names: Collection[str]
) -> ValueError:
    """The error for the parameters `unclear`; `names` are the paths of all parameters."""
    listed = [f"{name!r} {shapes[name]}" for name in unclear]
    if len(listed) > _SHOWN:
        listed = [*listed[:_SHOWN], f"{len(listed) - _SHOWN} more"]
    which = f"parameter {listed[0]}" if len(listed) == 1 else f"parameters {', '.join(listed)}"
    lines = []
    for pattern, name in _patterns(unclear, shapes, names).items():
        first, *others = unclear[name]
        lines.append(f"    {pattern!r}: {_pasted(first.axes)},  # {shapes[name]}: {first.meaning}")
        lines += [f"    # or {_pasted(other.axes)},  # {other.meaning}" for other in others]
    return ValueError(
        f"the rule cannot tell the matrix axes of the {which}. Say which is right, as "
        "weight_dimension_numbers=, or write another if none is; axes that are neither rows nor "
        "columns are batch axes, such as scanned layers, and None instead of MatrixAxes sends a "
        "parameter to AdamW:\n" + "\n".join(["{", *lines, "}"])
    )


def _patterns(
    unclear: Mapping[str, Readings], shapes: Shapes, names: Collection[str]
) -> dict[str, str]:
    """The patterns of the entries to paste, with a parameter that each of them stands for."""
    alike: dict[tuple[str, object], list[str]] = {}
    for name, readings in unclear.items():
        pattern = re.sub(r"\d+", "*", name)
        alike.setdefault((pattern, (shapes[name], readings)), []).append(name)
    entries: dict[str, str] = {}
    for (pattern, _), members in alike.items():
        stands = len(members) > 1 and {n for n in names if matches(n, pattern)} == {*members}
        entries |= {pattern: members[0]} if stands else {name: name for name in members}
    return entries


def _pasted(axes: MatrixAxes) -> str:
    return f"curvax.MatrixAxes(rows={axes.rows}, columns={axes.columns})"
