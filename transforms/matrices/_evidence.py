"""Evidence of the parameters beside a parameter: its bias, and layers or experts in stacks."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterator

from ._form import MatrixAxes, as_tuple
from ._names import (
    OF_STATE_SPACE,
    Shapes,
    bias_of,
    is_local,
    is_of_norm,
    is_output_first,
    layer_place,
    modules_near,
    scopes,
    why_no_matrix,
)


class Parameters(dict[str, tuple[int, ...]]):
    """The shapes of parameters by the names that the rule reads, and what all of them say."""

    @functools.cached_property
    def norms(self) -> dict[str, list[tuple[int, ...]]]:
        """The shapes of all norms inside of each module that has some."""
        found: dict[str, list[tuple[int, ...]]] = {}
        for name in filter(is_of_norm, self):
            for scope in scopes(name):
                found.setdefault(scope, []).append(self[name])
        return found

    @functools.cached_property
    def own_norms(self) -> dict[str, list[tuple[int, ...]]]:
        """The same of each module that has a norm of its own, not in another module."""
        found: dict[str, list[tuple[int, ...]]] = {}
        for name in filter(is_of_norm, self):
            for scope in scopes(name)[:2]:
                found.setdefault(scope, []).append(self[name])
        return found

    @functools.cached_property
    def layer_axes(self) -> dict[str, frozenset[int]]:
        """Of each module with norms: the axis of layers (0, 1 or -1), or all that nothing excludes.

        In scanned layers norms are `(layers, features)` or `(features, layers)`. Beside `(8, 3)` a
        kernel `(8, 3, 16)` fits both, but another one, `(16, 3, 8)`, only axis 1. The last axis is
        that of layers if no other fits all kernels, and one has the features of the norms first:
        a norm of each head is `(heads, head_dim)` beside `(features, heads, head_dim)`.
        """
        every: frozenset[int] = frozenset((0, 1, -1))
        found = dict.fromkeys(self.norms, every)
        come_first: set[str] = set()
        for name, shape in self.items():
            if len(shape) > 2 and why_no_matrix(name, self) is None:
                fits = self.axes_of_layers(name) or every
                for scope in filter(found.__contains__, scopes(name)):
                    found[scope] &= fits
                    if (shape[0], shape[-1]) in self.norms[scope]:
                        come_first.add(scope)
        last = {scope: frozenset({-1} if scope in come_first else ()) for scope in found}
        return {scope: axes - {-1} or axes & last[scope] for scope, axes in found.items()}

    def axes_of_layers(self, name: str) -> frozenset[int]:
        """The axes that may be of layers, as far as the bias and the norms of a kernel tell."""
        shape, bias = self[name], bias_of(name, self)
        norms = self.norms.get(self.scope_of_norms(name) or "", [])
        vectors = norms + ([bias] if bias and len(bias) < 3 else [])
        fits = {axis for axis in (0, 1) if _are_stacks(vectors, shape[axis], axis)}
        fits |= {-1} if _are_stacks(norms, shape[-1], 1) else set()  # a bias is also (heads, dim)
        # Layers on axis 1 or the last need features too.
        features = {x[0] for x in norms if x}
        for axis, others in ((1, {*shape[:1], *shape[2:]}), (-1, {*shape[:-1]})):
            if norms and not features & others:
                fits.discard(axis)
        return frozenset(fits)

    def scope_of_norms(self, name: str) -> str | None:
        """The innermost module around a parameter that has norms inside."""
        return next((scope for scope in scopes(name) if scope in self.norms), None)


def layer_axes(name: str, shapes: Parameters, *, near: bool = False) -> frozenset[int]:
    """The axes along which a kernel's layers are stacked, as norms say; none without layers.

    `near` norms are those of a module around the kernel, not of another module.
    """
    scope = shapes.scope_of_norms(name)
    if len(shapes[name]) < 3 or (near and scope not in shapes.own_norms):
        return frozenset()
    axes = shapes.axes_of_layers(name)
    return axes if scope is None else axes & shapes.layer_axes[scope]


def is_scanned(name: str, shapes: Parameters) -> bool:
    """Whether layers are on axis 1, also if it is a kernel of attention that says so."""
    shape, scope = shapes[name], shapes.scope_of_norms(name)
    if layer_axes(name, shapes) or (scope and _are_stacks(shapes.norms[scope], shape[1], 1)):
        return True
    return any(
        len(x) == 4
        and x[1] == shape[1]
        and re.fullmatch(r".*attention\w*/(query|out)/kernel", other)
        for other, x in shapes.items()
    )


def fits_bias(axes: MatrixAxes, name: str, shapes: Shapes, *, loose: bool = False) -> bool:
    """Whether a bias has the outputs, with axes of layers where the kernel has them.

    Equinox' convolutions have an axis of size 1 for each other one of the kernel but the inputs,
    `(out, 1, 1)`; of `(out, in, k)` only loosely. Loosely the axes may also be in the order of the
    kernel, `(E, F)` of `(D, E, F)`. All places of a local convolution may share a bias.
    """
    shape, bias = shapes[name], bias_of(name, shapes)
    ndim = len(shape)
    inputs = {axis % ndim for axis in as_tuple(axes.rows)}
    named = {axis % ndim for axis in axes.named}
    expected = [shape[axis] for axis in as_tuple(axes.columns)]
    for axis in range(ndim):
        if axis not in named:
            expected.insert(axis, shape[axis])
    padded = (*expected, *[1] * (ndim - 1 - len(expected)))
    if bias in (None, tuple(expected)) or (ndim > 3 and bias == padded):
        return True
    if is_local(name) and bias == tuple(shape[axis] for axis in as_tuple(axes.columns)):
        return True
    in_order = tuple(size for axis, size in enumerate(shape) if axis not in inputs)
    return loose and bias in (in_order, padded)


def width_of(bias: tuple[int, ...] | None, ndim: int = 2) -> int | None:
    """The size of a bias that is a vector; Equinox's of a convolution is `(out, 1, 1)`."""
    if bias is None or len(bias) not in (1, ndim - 1) or any(size > 1 for size in bias[1:]):
        return None
    return bias[0]


def inputs_by_bias(name: str, shapes: Shapes) -> Iterator[tuple[int, ...]]:
    """The axes that may be inputs: those which the bias lacks."""
    shape, bias = shapes[name], bias_of(name, shapes)
    for others in itertools.combinations(range(len(shape)), len(bias or ())):
        if 0 < len(others) < len(shape) and tuple(shape[axis] for axis in others) == bias:
            yield tuple(axis for axis in range(len(shape)) if axis not in others)


def is_vector_per_layer(name: str, shapes: Parameters) -> bool:
    """Whether something beside a parameter with two axes says that one of them is of layers.

    In scanned layers a norm is `(layers, features)` or `(features, layers)`, and what has two axes
    is not a matrix. In a state space model, `D` has the axes of `A_log`: layers and heads, or
    channels.
    """
    shape, scope = shapes[name], layer_place(name).scope
    if any(shapes.get(f"{scope}{own}", ())[:2] == shape for own in OF_STATE_SPACE):
        return True
    norms = next((shapes.own_norms[x] for x in scopes(name) if x in shapes.own_norms), [])
    return any(_are_stacks(norms, shape[axis], axis) for axis in (0, 1))


def _are_stacks(vectors: list[tuple[int, ...]], layers: int, axis: int) -> bool:
    stacked = (len(x) == 2 and x[axis] == layers and x[1 - axis] > 1 for x in vectors)
    return bool(vectors) and all(stacked)


def axis_of_experts(name: str, shapes: Shapes) -> int | None:
    """The axis, 0 or 1, whose entries are the outputs of a router beside the parameter."""
    shape = shapes[name]
    for features, experts in _routers(name, shapes):
        if shape[:2] == (features, experts) and features != experts:
            return 1
        if shape[0] in (features, experts):
            return 0
    return None


def inputs_of_experts(name: str, shapes: Shapes) -> int | None:
    """The axis of the inputs of experts `(E, ., .)`, as a bias or a router tells; None if unknown.

    It is -1 or -2. A router has the features, which are the inputs of `up` and `gate` and the
    outputs of `down`.
    """
    (*_, experts, inner, last) = shapes[name]
    sides = (inner, last)
    bias, layer = bias_of(name, shapes), layer_place(name).layer
    fits = {x for x in (-1, -2) if bias == (*shapes[name][:-2], sides[-3 - x])}
    for router in () if bias else _routers(name, shapes):
        of_features = {x for x in (-1, -2) if sides[x] in {*router} - {experts}}
        if experts in router and OF_MLP.fullmatch(layer):
            fits = of_features
        elif experts in router and _DOWN.fullmatch(layer):
            fits = {-3 - x for x in of_features}
    return fits.pop() if len(fits) == 1 else None


def _routers(name: str, shapes: Shapes) -> Iterator[tuple[int, ...]]:
    """The features and the experts of the routers beside a parameter."""
    for module, layer, kernel in itertools.product(modules_near(name), _ROUTERS, _KERNELS):
        router = shapes.get(f"{module}{layer}{kernel}", ())
        if len(router) == 2:
            yield router[::-1] if is_output_first(kernel) else router


OF_MLP = re.compile(r"w_?i(_[01])?|w_?(in|up|gate|1|3)|(gate_)?(up|gate)(_proj)?")
_DOWN = re.compile(r"wo|w_?(out|down|2)|down(_proj)?")
_ROUTERS = ("gate", "router", "router_gate", "gate_logits")
_KERNELS = ("", "/kernel", "/w", "/weight")
