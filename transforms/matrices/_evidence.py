"""Evidence of the parameters beside a parameter: whether layers or experts are stacked."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ._names import OF_STATE_SPACE, Shapes, bias_of, is_of_norm, layer_place, modules_near


def is_in_stack(name: str, shapes: Shapes, axis: int = 0) -> bool:
    """Whether the parameter's layers are stacked along `axis` (0 or 1), as a bias or a norm tells.

    With layers its bias is `(layers, out)` or `(out, layers)`. Without a bias, the norms of the
    module around it are `(layers, features)` or `(features, layers)`.
    """
    layers, bias = shapes[name][axis], bias_of(name, shapes)
    if bias is not None:
        return _is_stack_of_vectors(bias, layers, axis)
    for scope in _scopes(name):
        norms = [x for other, x in shapes.items() if other.startswith(scope) and is_of_norm(other)]
        if norms:
            return all(_is_stack_of_vectors(x, layers, axis) for x in norms)
    return False


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
    scope = layer_place(name).scope
    if any(shapes.get(f"{scope}{own}", ())[:2] == shapes[name] for own in OF_STATE_SPACE):
        return True
    for scope in _scopes(name):
        norms = [
            x
            for other, x in shapes.items()
            if other.startswith(scope)
            and other.count("/") - scope.count("/") <= 1
            and is_of_norm(other)
        ]
        if norms:
            return any(
                all(_is_stack_of_vectors(x, shapes[name][axis], axis) for x in norms)
                for axis in (0, 1)
            )
    return False


def _is_stack_of_vectors(shape: tuple[int, ...], layers: int, axis: int) -> bool:
    return len(shape) == 2 and shape[axis] == layers and shape[1 - axis] > 1


def _scopes(name: str) -> Iterator[str]:
    """The modules around a parameter, from the inside; each ends in "/", unless it is the root."""
    parts = name.split("/")[:-1]
    for end in range(len(parts), -1, -1):
        yield "".join(f"{part}/" for part in parts[:end])


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
