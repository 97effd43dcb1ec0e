"""The rule that decides which parameters are matrices, and along which axes.

In Flax "two axes means matrix" is wrong: the bias of an attention layer is 2-D `(heads, head_dim)`
and its kernel 3-D. The default rule uses the parameter's path and shape:

| parameter | treatment |
|---|---|
| vectors, scalars, `bias`, `scale`, parameters of normalization layers, embeddings | not a matrix |
| any other leaf with two axes | rows × columns as stored |
| `query`, `key`, `value` `/kernel` `(D, H, K)` | `D × H·K` (`head_wise`: `H` of `D × K`) |
| `out/kernel` `(H, K, D)` | `H·K × D` |
| kernel of a layer whose name contains "conv" | all axes but the last × last |
| anything else with three axes or more | an error that asks for a specification |

A layer axis is never merged into a matrix axis: the rule detects it by the extra axis of the bias,
and asks for a specification. (Without a bias it cannot: specify the axes of scanned convolutions
and scanned attention.)

A `MatrixRule` also sets the block size and whether matrices share arrays. Every optimizer takes one
as `matrices=`; `as_rule` fills in the defaults of the method.
"""

from __future__ import annotations

import dataclasses
import enum
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import optax

from .._paths import check_patterns, is_hole, matches, named_leaves
from .._validate import check_bool, check_choice, check_positive_int, check_real
from ._form import AxesEntry, MatrixAxes, as_matrix_axes

Treatment = MatrixAxes | str
"""The axes of a matrix, or the reason why a parameter is not a matrix."""

Selection = str | Sequence[str] | Callable[[str, Any], bool]
"""Glob pattern(s) on paths, or a predicate of path and leaf."""

_ATTENTION_IN = ("query", "key", "value")
_HEAD_NAMES = re.compile(r"(lm_?head|head|logits|unembed(ding)?|readout|classifier)(_\d+)?")
_NORM_NAMES = re.compile(r"norm|^ln(_|\d|$)", re.IGNORECASE)


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

    Every optimizer takes a rule as its argument `matrices`. A field that is left out takes the
    default of the method, if it has one, such as `block_size=1200` of `shampoo`. A field set to
    `None` is `None` in every method.

    Args:
      matrices: which parameters are matrices. `None` is the rule for Flax: kernels, but not biases,
        scales and embeddings. `"all"` takes every parameter (a vector, a `bias` or a `scale` is
        then a matrix with one row). A glob pattern on paths (`*` also matches "/"), several
        patterns, or a predicate `(path, leaf) -> bool` select parameters. If left out: the default
        of the method (`"all"` for `asgo` and `dasgo`), else `None`.
      weight_dimension_numbers: axes that override those of the rule. Either a tree (or prefix tree)
        of `MatrixAxes`, `optax.contrib.MuonDimensionNumbers` or `None` (not a matrix) with the
        structure of the parameters; or a callable from the parameters to such a tree; or a mapping
        from path patterns to entries, in which the first match wins and the rule decides on
        unmatched parameters.
      head_wise: whether query and key kernels `(D, H, K)` are one matrix per head.
      output_layer: a pattern or predicate for an output layer that is *not* a matrix. `"auto"`
        finds it (see `find_output_layer`); `None` makes no exception. If left out: the default of
        the method (`"auto"` for `racs` and `apollo`), else `None`.
      block_size: cuts matrices into balanced blocks of at most this many rows and columns, each a
        separate matrix; `None` does not cut. If left out: the default of the method (1200 for
        `shampoo`), else `None`.
      stack: `True` stacks all matrices of one shape in one array, `False` stacks none, and `None`
        stacks matrices of at most 128 × 128 elements.

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

    def __post_init__(self):
        _check_selection("matrices", self.matrices)
        _check_selection("output_layer", self.output_layer)
        check_bool("head_wise", self.head_wise)
        if self.block_size is not None and self.block_size is not METHODS_OWN:
            check_positive_int("block_size", self.block_size)
        check_choice("stack", self.stack, (None, True, False))

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
        specified = _specified(self.weight_dimension_numbers, params, named.names)
        complete = as_rule(self)
        excluded = complete._output_layer(leaves, named.names)
        chosen = complete._chosen(leaves, named.names)
        shapes = {name: tuple(leaf.shape) for name, leaf in leaves.items()}

        def treatment(name: str) -> Treatment:
            axes = specified.get(name, _UNSPECIFIED)
            if name in excluded:
                return "output layer"
            if axes is None:
                return "weight_dimension_numbers is None"
            if chosen is not None and name not in chosen:
                return "not selected by matrices"
            if axes is not _UNSPECIFIED:
                return axes
            return _flax_axes(name, shapes, chosen=chosen is not None, head_wise=self.head_wise)

        return {name: treatment(name) for name in leaves}

    def _chosen(self, leaves: Mapping[str, Any], names: Sequence[str]) -> frozenset[str] | None:
        if self.matrices is None:
            return None
        if self.matrices == "all":
            return frozenset(leaves)
        return _selected("matrices", self.matrices, leaves, names)

    def _output_layer(self, leaves: Mapping[str, Any], names: Sequence[str]) -> frozenset[str]:
        if self.output_layer is None:
            return frozenset()
        if self.output_layer == "auto":
            return find_output_layer(leaves)
        return _selected("output_layer", self.output_layer, leaves, names)


Matrices = Selection | MatrixRule | None
"""The type of an optimizer's argument `matrices`."""


def as_rule(
    matrices: Matrices = None, weight_dimension_numbers: Any = None, /, **own: Any
) -> MatrixRule:
    """Builds the complete rule from two arguments of an optimizer.

    Args:
      matrices: a `MatrixRule`, or only its field `matrices`.
      weight_dimension_numbers: the field of that name.
      **own: defaults of the method for fields that the rule leaves out; other fields become `None`.

    Raises:
      ValueError: if `weight_dimension_numbers` is given both as a field and as an argument.
    """
    rule = matrices if isinstance(matrices, MatrixRule) else MatrixRule(matrices)
    left_out = [f.name for f in dataclasses.fields(rule) if getattr(rule, f.name) is METHODS_OWN]
    given = {name: own.get(name) for name in left_out}
    if weight_dimension_numbers is not None:
        if rule.weight_dimension_numbers is not None:
            raise ValueError(
                "weight_dimension_numbers is given both as an argument and in matrices="
                f"MatrixRule(...); give it only once. The argument is {weight_dimension_numbers!r}."
            )
        given["weight_dimension_numbers"] = weight_dimension_numbers
    return dataclasses.replace(rule, **given)


_UNSPECIFIED: Any = object()


def find_output_layer(leaves: Mapping[str, Any]) -> frozenset[str]:
    """Finds the paths of kernels that map features to the output.

    A 2-D kernel qualifies by the name of its layer (`lm_head`, `head`, `logits`, `unembed`,
    `readout` or `classifier`), or by a shape `(D, V)` that matches an embedding `(V, D)`. Kernels
    that qualify by both are returned; else those by name; else those by shape.
    """
    kernels = {
        name: tuple(leaf.shape)
        for name, leaf in leaves.items()
        if len(leaf.shape) == 2 and _is_kernel(name)
    }
    embeddings = {
        tuple(leaf.shape)[::-1]
        for name, leaf in leaves.items()
        if len(leaf.shape) == 2 and _is_embedding(name)
    }
    by_shape = {name for name, shape in kernels.items() if shape in embeddings}
    by_name = {name for name in kernels if any(map(_HEAD_NAMES.fullmatch, name.split("/")[:-1]))}
    return frozenset(by_shape & by_name or by_name or by_shape)


def _parts(name: str) -> tuple[str, str]:
    """The name of a parameter and the name of its layer."""
    *above, last = name.split("/")
    return last, above[-1] if above else ""


def _is_kernel(name: str) -> bool:
    return not _is_embedding(name) and _parts(name)[0] in ("kernel", "weight", "w")


def _is_embedding(name: str) -> bool:
    last, layer = _parts(name)
    embeds = "embed" in layer.lower() or layer in ("wte", "wpe")
    return "embed" in last.lower() or (last != "kernel" and embeds and "unembed" not in layer)


def _flax_axes(
    name: str, shapes: Mapping[str, tuple[int, ...]], *, chosen: bool, head_wise: bool
) -> Treatment:
    """The default rule for one parameter; `chosen` makes it a matrix under any name."""
    shape = shapes[name]
    ndim = len(shape)
    last, layer = _parts(name)
    one_row = MatrixAxes(rows=(), columns=tuple(range(ndim)))
    if ndim <= 1:
        return one_row if chosen else ("vector" if ndim else "scalar")
    if last in ("bias", "scale") or _NORM_NAMES.search(layer):
        return one_row if chosen else f"{last} of {layer}" if layer else last
    if _is_embedding(name) and not chosen:
        return "embedding"
    if ndim == 2:
        return MatrixAxes(rows=0, columns=1)
    bias = shapes.get(f"{name.removesuffix(last)}bias")
    if ndim == 3 and last == "kernel" and layer in _ATTENTION_IN and bias in (None, shape[1:]):
        if head_wise and layer != "value":
            return MatrixAxes(rows=0, columns=2)
        return MatrixAxes(rows=0, columns=(1, 2))
    if ndim == 3 and last == "kernel" and layer == "out" and bias in (None, shape[2:]):
        return MatrixAxes(rows=(0, 1), columns=2)
    if last in ("kernel", "weight") and "conv" in layer.lower() and bias in (None, shape[-1:]):
        return MatrixAxes(rows=tuple(range(ndim - 1)), columns=ndim - 1)
    if sum(size > 1 for size in shape) <= 1:
        return one_row if chosen else "vector"
    raise ValueError(
        f"the parameter {name!r} has shape {shape}, and the rule cannot tell its matrix axes. "
        f"Give weight_dimension_numbers={{{name!r}: curvax.MatrixAxes(rows=..., columns=...)}}; "
        "other axes are batch axes, such as scanned layers. Give None instead of MatrixAxes to "
        "send it to AdamW."
    )


def _check_selection(argument: str, selection: Any) -> None:
    patterns = isinstance(selection, (list, tuple)) and all(isinstance(p, str) for p in selection)
    predicate = callable(selection) and not isinstance(selection, MatrixRule)
    left_out = selection is None or selection is METHODS_OWN
    if not (left_out or isinstance(selection, str) or patterns or predicate):
        raise ValueError(
            f"{argument} must be None, a path pattern, a sequence of them, or a predicate of path "
            f"and leaf; got {selection!r}."
        )


def _selected(
    argument: str, selection: Selection, leaves: Mapping[str, Any], names: Sequence[str]
) -> frozenset[str]:
    """The paths that `selection` selects; a pattern that matches none of `names` is an error."""
    if callable(selection):
        return frozenset(name for name, leaf in leaves.items() if selection(name, leaf))
    patterns = [selection] if isinstance(selection, str) else list(selection)
    check_patterns(argument, patterns, names)
    return frozenset(name for name in leaves if any(matches(name, p) for p in patterns))


def _is_entry(x: Any) -> bool:
    return is_hole(x) or isinstance(x, (MatrixAxes, optax.contrib.MuonDimensionNumbers))


def _specified(spec: Any, params: Any, names: Sequence[str]) -> dict[str, MatrixAxes | None]:
    """The entries of `weight_dimension_numbers` by path; None means "not a matrix"."""
    if spec is None:
        return {}
    # A tree may be callable as well (a module); a function is a leaf that is not an entry.
    if callable(spec) and not all(map(_is_entry, jax.tree.leaves(spec, is_leaf=_is_entry))):
        spec = spec(params)
    if isinstance(spec, Mapping) and spec and all(map(_is_entry, spec.values())):
        check_patterns("weight_dimension_numbers", map(str, spec), names)
        found = ((n, next((e for p, e in spec.items() if matches(n, str(p))), ...)) for n in names)
        return {name: _axes(entry) for name, entry in found if entry is not ...}
    return _specified_by_tree(spec, names)


def _specified_by_tree(spec: Any, names: Sequence[str]) -> dict[str, MatrixAxes | None]:
    entries: dict[str, AxesEntry | None] = {}
    for path, entry in jax.tree_util.tree_leaves_with_path(spec, is_leaf=_is_entry):
        place = jax.tree_util.keystr(path, simple=True, separator="/")
        if not _is_entry(entry):
            raise ValueError(
                f"weight_dimension_numbers has {entry!r} at {place!r}; entries must be "
                "curvax.MatrixAxes, optax.contrib.MuonDimensionNumbers or None."
            )
        entries[place] = entry

    def covering(name: str) -> str | None:
        boxed = ("", name, f"{name}/value")
        return next((p for p in entries if p in boxed or name.startswith(f"{p}/")), None)

    above = {name: covering(name) for name in names}
    lacking = [n for n, p in above.items() if p is None]
    surplus = sorted(set(entries) - set(above.values()))
    if lacking or surplus:
        where = f"has no entry for {lacking[0]!r}" if lacking else f"has an entry at {surplus[0]!r}"
        raise ValueError(
            f"weight_dimension_numbers must have the structure of the parameters, but it {where}. "
            f"The parameters are {', '.join(names[:8])}{', ...' if len(names) > 8 else ''}."
        )
    return {n: _axes(entries[p]) for n, p in above.items() if p is not None}


def _axes(entry: AxesEntry | None) -> MatrixAxes | None:
    return None if is_hole(entry) else as_matrix_axes(entry)  # pyright: ignore
