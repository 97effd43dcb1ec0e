"""Which parameters are matrices, and along which axes: the Flax-aware rule and its overrides.

In Flax "two axes means matrix" is wrong: the bias of an attention layer is 2-D `(heads, head_dim)`
and its kernel 3-D. The default rule looks at the parameter's path and shape:

| parameter | seen as |
|---|---|
| vectors, scalars, `bias`, `scale`, parameters of normalization layers, embeddings | not a matrix |
| any other leaf with two axes | rows × columns as stored |
| `query`, `key`, `value` `/kernel` `(D, H, K)` | `D × H·K` (`head_wise`: `H` of `D × K`) |
| `out/kernel` `(H, K, D)` | `H·K × D` |
| kernel of a layer whose name contains "conv" | all axes but the last × last |
| anything else with three axes or more | an error that asks for a specification |

A stack of layers is never merged into a matrix axis: a bias with an axis too many gives it away,
and such kernels ask for a specification. (Give one for scanned convolutions and attention without
bias.)

A `MatrixRule` also says how the matrices are cut into blocks and whether they share arrays. Every
optimizer takes one as `matrices=`; `as_rule` completes it with the defaults of the method.
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
from ._axes import AxesEntry, MatrixAxes, as_matrix_axes

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
"""Default of the fields for which methods have defaults of their own; `None` outside of a method.

It is not `None`, by which a user switches a method's default off."""


@dataclasses.dataclass(frozen=True)
class MatrixRule:
    """Decides for every parameter whether it is a matrix (or a batch of them), and how.

    Every optimizer takes a rule as its argument `matrices`. A field that is left out has the
    method's own default, if the method has one, such as `block_size=1200` for `shampoo`; a field
    that is `None` is `None` in every method.

    Args:
      matrices: which parameters are matrices. `None` is the rule for Flax: kernels, but not biases,
        scales and embeddings; `"all"` takes every parameter (a vector, a `bias` or a `scale` is
        then a matrix with one row); a glob pattern on paths (`*` also crosses "/"), several of
        them, or a predicate `(path, leaf) -> bool` selects. Left out: the method's own (`"all"` for
        `asgo` and `dasgo`), or `None`.
      weight_dimension_numbers: axes of parameters for which the rule's are not wanted: a tree
        (or prefix tree) of `MatrixAxes`, `optax.contrib.MuonDimensionNumbers` or `None` (not a
        matrix) with the structure of the parameters; a callable from the parameters to such a
        tree; or a mapping from path patterns to entries, where the first that fits wins and
        the rule decides on the rest.
      head_wise: whether query and key kernels `(D, H, K)` are one matrix per head.
      output_layer: a pattern or predicate for an output layer that is *not* to be a matrix;
        `"auto"` finds it (see `find_output_layer`), `None` makes no exception. Left out: the
        method's own (`"auto"` for `racs` and `apollo`), or `None`.
      block_size: cut matrices into balanced blocks of at most this many rows and columns, each a
        matrix of its own; `None` does not cut. Left out: the method's own (1200 for `shampoo`), or
        `None`.
      stack: `True` keeps all matrices of one shape in one array, `False` none; `None` stacks those
        of at most 128 × 128 elements.

    Raises:
      ValueError: naming the field that is not allowed.

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
        """The treatment of every parameter, by path.

        Raises:
          ValueError: naming the parameter, if it is not real and floating, has a zero-size axis,
            or needs a specification; naming the argument, if a pattern or tree does not fit.
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
"""What an optimizer takes as `matrices`."""


def as_rule(
    matrices: Matrices = None, weight_dimension_numbers: Any = None, /, **own: Any
) -> MatrixRule:
    """The complete rule that two arguments of an optimizer say.

    Args:
      matrices: a `MatrixRule`, or its field `matrices` alone.
      weight_dimension_numbers: the field of that name.
      **own: the method's own defaults of fields that the rule leaves out; `None` for all others.

    Raises:
      ValueError: if both the rule and the second argument have `weight_dimension_numbers`.
    """
    rule = matrices if isinstance(matrices, MatrixRule) else MatrixRule(matrices)
    left_out = [f.name for f in dataclasses.fields(rule) if getattr(rule, f.name) is METHODS_OWN]
    given = {name: own.get(name) for name in left_out}
    if weight_dimension_numbers is not None:
        if rule.weight_dimension_numbers is not None:
            raise ValueError(
                "weight_dimension_numbers is given twice, as an argument and in matrices="
                f"MatrixRule(...); give it once. The argument is {weight_dimension_numbers!r}."
            )
        given["weight_dimension_numbers"] = weight_dimension_numbers
    return dataclasses.replace(rule, **given)


_UNSPECIFIED: Any = object()


def find_output_layer(leaves: Mapping[str, Any]) -> frozenset[str]:
    """The paths of kernels that map features to the output.

    These are the 2-D kernels `(D, V)` beside an embedding `(V, D)`; if there is none, those of
    a layer called `lm_head`, `head`, `logits`, `unembed`, `readout` or `classifier`.
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
    """The names of a parameter and of the layer that holds it."""
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
    """The default rule for one parameter; `chosen` parameters are matrices whatever their name."""
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
        f"the parameter {name!r} has shape {shape}: which axes are its matrix? Say so with "
        f"weight_dimension_numbers={{{name!r}: curvax.MatrixAxes(rows=..., columns=...)}} (axes "
        "not named are batch axes, such as scanned layers), or None in place of the axes to leave "
        "it to AdamW."
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
    """The paths that `selection` picks; a pattern that fits none of `names` is an error."""
    if callable(selection):
        return frozenset(name for name, leaf in leaves.items() if selection(name, leaf))
    patterns = [selection] if isinstance(selection, str) else list(selection)
    check_patterns(argument, patterns, names)
    return frozenset(name for name in leaves if any(matches(name, p) for p in patterns))


def _is_entry(x: Any) -> bool:
    return is_hole(x) or isinstance(x, (MatrixAxes, optax.contrib.MuonDimensionNumbers))


def _specified(spec: Any, params: Any, names: Sequence[str]) -> dict[str, MatrixAxes | None]:
    """The entries of `weight_dimension_numbers` by path; None where it says "not a matrix"."""
    if spec is None:
        return {}
    # A tree may be callable too (a module); a function is a leaf that is not an entry.
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
            f"the structure of weight_dimension_numbers differs from the parameters': it {where}. "
            f"The parameters are {', '.join(names[:8])}{', ...' if len(names) > 8 else ''}."
        )
    return {n: _axes(entries[p]) for n, p in above.items() if p is not None}


def _axes(entry: AxesEntry | None) -> MatrixAxes | None:
    return None if is_hole(entry) else as_matrix_axes(entry)  # pyright: ignore
