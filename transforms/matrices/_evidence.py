"""Evidence of the parameters beside a parameter: whether layers or experts are stacked."""

from __future__ import annotations

import math
import re

from ._names import OF_STATE_SPACE, Shapes, bias_of, is_of_norm, layer_place, modules_near, scopes


def is_in_stack(name: str, shapes: Shapes, axis: int = 0) -> bool:
    """Whether the parameter's layers are stacked along `axis` (0 or 1), as a bias or a norm tells.

    With layers its bias is `(layers, out)` or `(out, layers)`. Without a bias, the norms of the
    module around it are `(layers, features)` or `(features, layers)`.
    """
    bias = bias_of(name, shapes)
    vectors = _norms_around(name, shapes) if bias is None else [bias]
    return _are_stacks(vectors, shapes[name][axis], axis)


def is_scanned(name: str, shapes: Shapes) -> bool:
    """Whether layers are on axis 1, also if it is a kernel of attention that says so."""
    layers = shapes[name][1]
    return is_in_stack(name, shapes, axis=1) or any(
        len(x) == 4 and x[1] == layers and re.fullmatch(r".*attention\w*/(query|out)/kernel", other)
        for other, x in shapes.items()
    )


def is_vector_per_layer(name: str, shapes: Shapes) -> bool:
    """Whether something beside a parameter with two axes says that one of them is of layers.

    In scanned layers a norm is `(layers, features)` or `(features, layers)`, and no matrix has two
    axes. In a state space model, `D` has the axes of `A_log`: layers and heads, or channels.
    """
    shape, scope = shapes[name], layer_place(name).scope
    if any(shapes.get(f"{scope}{own}", ())[:2] == shape for own in OF_STATE_SPACE):
        return True
    norms = _norms_around(name, shapes, deepest=1)
    return any(_are_stacks(norms, shape[axis], axis) for axis in (0, 1))


def _norms_around(name: str, shapes: Shapes, deepest: float = math.inf) -> list[tuple[int, ...]]:
    """The norms of the innermost module around a parameter that has some."""
    for scope in scopes(name):
        norms = [
            x
            for other, x in shapes.items()
            if other.startswith(scope)
            and other.count("/") - scope.count("/") <= deepest
            and is_of_norm(other)
        ]
        if norms:
            return norms
    return []


def _are_stacks(vectors: list[tuple[int, ...]], layers: int, axis: int) -> bool:
    stacked = (len(x) == 2 and x[axis] == layers and x[1 - axis] > 1 for x in vectors)
    return bool(vectors) and all(stacked)


def has_experts(name: str, shapes: Shapes) -> bool:
    """Whether a router beside the parameter has an output for each entry of its first axis."""
    routers = (
        shapes.get(f"{module}{layer}{kernel}")
        for module in modules_near(name)
        for layer in ("gate", "router", "router_gate", "gate_logits")
        for kernel in ("", "/kernel", "/w", "/weight")
    )
    experts = shapes[name][0]
    return any(x is not None and len(x) == 2 and experts in x for x in routers)
