"""A parameter among others: what its name, its shape and what lies beside it say.

What lies beside it is evidence: its bias, the norms around it, the same parameters of the layers
beside it, other parts of the same attention, and the router of its experts.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping

from . import _names as names
from ._form import MatrixAxes

Shape = tuple[int, ...]


class Parameters(dict[str, Shape]):
    """The shapes of parameters by the names that the rule reads, and what all of them say.

    `norms` are the shapes of all norms inside of each module that has some, `own_norms` those of
    each module that has a norm of its own, not in another module.
    """

    def __init__(self, shapes: Mapping[str, Shape]):
        super().__init__(shapes)
        self.norms: dict[str, list[Shape]] = {}
        self.own_norms: dict[str, list[Shape]] = {}
        for name in filter(names.is_of_norm, self):
            for depth, scope in enumerate(names.scopes(name)):
                for norms in (self.norms, self.own_norms)[: 2 if depth < 2 else 1]:
                    norms.setdefault(scope, []).append(self[name])

    @functools.cached_property
    def each(self) -> dict[str, Parameter]:
        """The parameters by name."""
        return {name: Parameter(name, self) for name in self}

    @functools.cached_property
    def places(self) -> dict[tuple[str, str], list[Parameter]]:
        """The same parameters of all layers of a module."""
        parts: dict[tuple[str, str], list[Parameter]] = {}
        for p in self.each.values():
            parts.setdefault((p.place.scope, p.place.within), []).append(p)
        return parts

    @functools.cached_property
    def of_one_layer(self) -> dict[int, Parameters]:
        """By the axis of layers, 0, 1 or -1: the shapes without it."""
        less = lambda x, axis: (*x[:axis], *x[axis:][1:]) if len(x) > 1 else x  # noqa: E731
        return {a: Parameters({name: less(x, a) for name, x in self.items()}) for a in (0, 1, -1)}

    @functools.cached_property
    def layer_axes(self) -> dict[str, frozenset[int]]:
        """Of each module with norms: the axis of layers (0, 1 or -1), or all that nothing excludes.

        In scanned layers norms are `(layers, features)` or `(features, layers)`. Beside `(8, 3)` a
        kernel `(8, 3, 16)` fits both, but another one, `(16, 3, 8)`, only axis 1. The last axis is
        that of layers if no other fits all kernels, and one has the features of the norms first:
        a norm of each head is `(heads, head_dim)` beside `(features, heads, head_dim)`.
        """
        every: frozenset[int] = frozenset((0, 1, -1))
        layers, come_first = dict.fromkeys(self.norms, every), dict.fromkeys(self.norms, False)
        for p in self.each.values():
            if p.ndim > 2 and p.reason is None:
                for scope in filter(layers.__contains__, names.scopes(p.name)):
                    layers[scope] &= p.axes_of_layers or every
                    come_first[scope] |= p.sizes((0, -1)) in self.norms[scope]
        for scope, axes in layers.items():
            layers[scope] = axes - {-1} or (axes if come_first[scope] else frozenset())
        return layers


class Parameter:
    """A parameter among others."""

    def __init__(self, name: str, tree: Parameters):
        self.name, self.tree, self.shape = name, tree, tree[name]
        self.ndim = len(self.shape)
        self.place, self.last = names.layer_place(name), names.path_of(name)[2]
        self.output_first = names.is_output_first(self.last)
        # The module of its layer, and the one around it
        self.near = names.scopes(self.place.scope)[:2]
        # The innermost module around it that has norms inside, and their shapes
        self.scope_of_norms = next(filter(tree.norms.__contains__, names.scopes(name)), None)
        self.norms = tree.norms.get(self.scope_of_norms or "", [])

    def sizes(self, axes: Iterable[int]) -> Shape:
        """The sizes of some axes."""
        return tuple(self.shape[axis] for axis in axes)

    # By the name

    @functools.cached_property
    def reason(self) -> str | None:
        """Why it is not a matrix whatever its shape; None if its name allows it.

        The reason is "embedding" for tables, else the name of the parameter and its layer. No table
        has a bias, and a `b` beside an `a` is a second factor, but one beside a `w` a bias. The
        bias of a norm has its shape, and that of another layer has not.
        """
        _, parent, last = names.path_of(self.name)
        start, _, end = last.rpartition("_")
        beside = lambda x: f"{self.name.removesuffix(end)}{x}" in self.tree  # noqa: E731
        kind = names.kind_of(self.name)
        if end == "b" and beside("a"):
            kind = None
        elif end == "b" and start and beside("w"):
            kind = "vector"
        elif end == "w" and start and beside("b") and not names.has(names.NORM_WORDS, start):
            kind = None
        elif kind == "table":
            has_bias = self.bias is not None and {*self.bias} <= {*self.shape}
            return None if has_bias else "embedding"
        elif last in names.SHARED and self.bias is not None:
            whole = len(self.bias) == self.ndim and min(self.shape, default=1) > 1
            bias, shape = ([n for n in x if n > 1] for x in (self.bias, self.shape))
            kind = "vector" if bias == shape and (kind == "vector" or whole) else None
        return kind and (f"{last} of {parent}" if parent else last)

    @functools.cached_property
    def is_named(self) -> bool:
        """Whether the path is one that matrices have, so that two axes are not a guess."""
        return names.is_of_matrices(self.last) and self.reason is None

    @functools.cached_property
    def role(self) -> str | None:
        """The part of attention that its layer is: `attn_out_proj` is "out"."""
        if self.place.within not in ("", "/kernel", "/w", "/weights"):
            return None
        layer = self.place.layer.lower()  # TransformerLens' `W_Q`
        return names.ROLES.get(layer) or names.ROLES.get(names.AROUND_ROLE.sub("", layer))

    @functools.cached_property
    def _layer(self) -> tuple[str, str]:
        """The names of the module and of the layer, `patch_embed/proj`; of a list, of the list."""
        module, layer, _ = (part.lower() for part in self.place)
        *_, above, around = ["", "", *module.rstrip("/").split("/")]
        return (above, around) if layer.isdigit() else (around, layer)

    @property
    def is_convolution(self) -> bool:
        """Whether the layer's name is one of a convolution; convolutions embed patches."""
        around, layer = self._layer
        embeds = "patch" in around or any(x in layer for x in ("patch", "stem", "embed"))
        return self.is_called(names.CONVOLUTION) or (self.ndim > 3 and embeds)

    @property
    def is_spectral(self) -> bool:
        """Whether the layer's name is one of a convolution with a matrix for each frequency."""
        parent = names.path_of(self.name)[1].lower()
        in_parent = names.SPECTRAL.search(parent) is not None
        return self.ndim > 2 and (in_parent or self.is_called(names.SPECTRAL))

    def is_called(self, pattern: re.Pattern[str]) -> bool:
        """Whether the layer has such a name."""
        return pattern.search(self._layer[1]) is not None

    @property
    def may_share_bias(self) -> bool:
        """Whether its matrices may have one bias: places, experts, relations, frequencies.

        Layers that are stacked have a bias each, so a vector beside others says that a sum goes
        over all axes that it lacks, as in a convolution.
        """
        of_set = any(map(names.SETS.search, self._layer)) or self.axis_of_experts == 0
        return of_set or self.is_called(names.LOCAL) or self.is_spectral

    @property
    def is_depthwise(self) -> bool:
        """Whether the parameter is a filter per channel.

        Its name and an axis of size 1 tell, or that it is the convolution of a state space model (a
        module with `A_log` or `dt_bias`, such as Mamba).
        """
        if self.ndim < 3:
            return False
        if self.is_called(names.DEPTHWISE):
            return self.has_one_input or (self.shape[-1] == 1 and not self.output_first)
        fields = (f"{module}{field}" for module in self.near for field in names.OF_STATE_SPACE)
        return self.is_convolution and self.has_one_input and any(x in self.tree for x in fields)

    @property
    def has_one_input(self) -> bool:
        """Whether the axis of inputs of a convolution has size 1: also that of a depthwise one.

        Griffin's `conv_1d/w (width, channels)` does not have this axis.
        """
        if self.ndim == 2:
            return self.is_called(names.OF_CHANNELS)
        return self.shape[1 if self.output_first else -2] == 1

    # By its bias

    @functools.cached_property
    def bias(self) -> Shape | None:
        """The shape of its bias, if it has one: `(n,)` if it is `(1, n)` beside two axes."""
        biases = (self.tree[bias] for bias in names.bias_names(self.name) if bias in self.tree)
        bias = next(biases, None)
        if bias is None or len(bias) < self.ndim:
            return bias
        return tuple(itertools.dropwhile(lambda size: size == 1, bias))

    @property
    def width(self) -> int | None:
        """The size of a bias that is a vector; Equinox's of a convolution is `(out, 1, 1)`."""
        bias = self.bias or ()
        is_vector = len(bias) in (1, self.ndim - 1) and all(size == 1 for size in bias[1:])
        return bias[0] if bias and is_vector else None

    def fits_bias(self, axes: MatrixAxes, *, loose: bool = False, shared: bool = False) -> bool:
        """Whether a bias has the outputs, with axes of layers where the kernel has them.

        Equinox' convolutions have an axis of size 1 for each other one of the kernel but the
        inputs, `(out, 1, 1)`; of `(out, in, k)` only loosely. Others have one for each row, `(L, 1,
        out)`. Loosely the axes may also be in the order of the kernel, `(E, F)` of `(D, E, F)`. A
        bias may be `shared` where its matrices may share one, as those of a local convolution
        always may.
        """
        batch, rows, columns = axes.positions(self.ndim)
        outputs, every = self.sizes(columns), range(self.ndim)
        expected = [*outputs]
        for axis in batch:
            expected.insert(axis, self.shape[axis])
        fitting = [tuple(expected), tuple(1 if a in rows else self.shape[a] for a in every)]
        if loose or self.ndim > 3:
            fitting.append((*expected, *[1] * (self.ndim - 1 - len(expected))))
        if loose:
            fitting.append(self.sizes(a for a in every if a not in rows))
        if self.is_called(names.LOCAL) or (shared and self.may_share_bias):
            fitting += [(*self.sizes(batch[:k]), *outputs) for k in range(len(batch))]
        return self.bias is None or self.bias in fitting

    @property
    def has_bias_of_places(self) -> bool:
        """Whether its bias may be one for each place of a convolution's output."""
        bias, output = self.bias or (), 0 if self.output_first else -1
        of_places = len(bias) == self.ndim - 1 > 1 and bias[output] == self.shape[output]
        return of_places and self.is_called(names.CONVOLUTION) and not self.is_called(names.LOCAL)

    @property
    def sides_by_bias(self) -> list[tuple[Shape, Shape]]:
        """The axes that may be inputs, those which the bias lacks, and the others."""
        every = range(self.ndim)
        subsets = itertools.combinations(every, len(self.bias or ()))
        of_bias = [x for x in subsets if self.sizes(x) == self.bias != self.shape]
        return [(tuple(a for a in every if a not in others), others) for others in of_bias]

    # By the norms around it

    @functools.cached_property
    def axes_of_layers(self) -> frozenset[int]:
        """The axes that may be of layers, as far as the bias and the norms of a kernel tell."""
        norms, features = self.norms, {x[0] for x in self.norms if x}
        bias = [self.bias] if self.bias and len(self.bias) < 3 else []

        def fits(axis: int) -> bool:
            """Layers on axis 1 or the last need features too; a bias is also `(heads, dim)`."""
            vectors = norms if axis == -1 else norms + bias
            others = {size for a, size in enumerate(self.shape) if a != axis % self.ndim}
            has_features = axis == 0 or not norms or bool(features & others)
            return has_features and _are_stacks(vectors, self.shape[axis], abs(axis))

        return frozenset(filter(fits, (0, 1, -1)))

    @property
    def is_staged(self) -> bool:
        """Whether an axis of stages or of copies of a model is in front of that of layers."""
        staged = all(len(x) == 3 and x[:1] == self.shape[:1] for x in self.norms)
        return bool(self.norms) and staged and not self.is_convolution

    @functools.cached_property
    def in_stage(self) -> Parameter | None:
        """Itself without the axis of stages, if it has one.

        With four axes the norms of a part of attention may be those of the heads of scanned layers.
        """
        of_heads = self.role and any(map(self.sibling, ("query", "key", "value")))
        fits = self.is_staged and self.ndim > (4 if of_heads else 3)
        return self.tree.of_one_layer[0].each[self.name] if fits else None

    def layer_axes(self, *, near: bool = False) -> frozenset[int]:
        """The axes along which layers are stacked, as norms say; none without layers.

        `near` norms are those of a module around the kernel, not of another module.
        """
        scope = self.scope_of_norms
        if self.ndim < 3 or (near and scope not in self.tree.own_norms):
            return frozenset()
        axes = self.axes_of_layers
        return axes if scope is None else axes & self.tree.layer_axes[scope]

    @property
    def is_scanned(self) -> bool:
        """Whether layers are on axis 1, also if it is a kernel of attention that says so."""
        of_attention = re.compile(r".*attention\w*/(query|out)/kernel").fullmatch
        stacks = (x[1] for other, x in self.tree.items() if len(x) == 4 and of_attention(other))
        norms = self.norms if self.scope_of_norms else []  # not those of the whole tree
        stacked = self.layer_axes() or _are_stacks(norms, self.shape[1], 1)
        return bool(stacked) or self.shape[1] in stacks

    @property
    def is_vector_per_layer(self) -> bool:
        """Whether something beside a parameter with two axes says that one of them is of layers.

        In scanned layers a norm is `(layers, features)` or `(features, layers)`, and what has two
        axes is not a matrix. In a state space model, `D` has the axes of `A_log`.
        """
        beside = (self.tree.get(f"{self.place.scope}{field}", ()) for field in names.OF_STATE_SPACE)
        if self.is_staged or any(x[:2] == self.shape for x in beside):
            return True
        own = self.tree.own_norms
        norms = next((own[scope] for scope in names.scopes(self.name) if scope in own), [])
        return any(_are_stacks(norms, self.shape[axis], axis) for axis in (0, 1))

    # By the layers beside it

    @property
    def beside(self) -> list[Parameter]:
        """The same parameters of the other layers of the module."""
        return [p for p in self.tree.places[self.place.scope, self.place.within] if p is not self]

    def sibling(self, role: str) -> Parameter | None:
        """A part of the same attention; None if there is none, or a choice of shapes."""
        if role == self.role:
            return self
        for path in map(self.place.beside, names.SPELLED[role]):
            if path in self.tree:
                return self.tree.each[path]
        by_shape = {p.shape: p for p in self.beside if p.role == role}
        return next(iter(by_shape.values())) if len(by_shape) == 1 else None

    @property
    def swapped(self) -> tuple[int, ...]:
        """The only two axes that a layer beside it has the other way round: `up` and `down`."""
        beside, every = {p.shape for p in self.beside} - {self.shape}, range(self.ndim)
        turned = lambda i, j: self.sizes({i: j, j: i}.get(a, a) for a in every)  # noqa: E731
        pairs = [x for x in itertools.combinations(every, 2) if turned(*x) in beside]
        return pairs[0] if len(pairs) == 1 else ()

    @property
    def axis_of_experts(self) -> int | None:
        """The axis, 0 or 1, whose entries are the outputs of a router beside it."""
        for features, experts in self._routers():
            if self.shape[:2] == (features, experts) and features != experts:
                return 1
            if self.shape[0] in (features, experts):
                return 0
        return None

    @property
    def inputs_of_experts(self) -> int | None:
        """The axis of the inputs of experts `(E, ., .)`, as a bias or a router tells; else None.

        It is -1 or -2. A router has the features, which are the inputs of `up` and `gate` and the
        outputs of `down`.
        """
        *stack, _, _ = self.shape
        turned = {x: self.shape[-3 - x] for x in (-1, -2)}
        shared = [()] * self.may_share_bias
        fits = {x for x in turned if self.bias in [(*y, turned[x]) for y in (stack, *shared)]}
        for router in () if self.bias else self._routers():
            of_features = {x for x in turned if self.shape[x] in {*router} - {stack[-1]}}
            if stack[-1] in router and names.OF_MLP.fullmatch(self.place.layer):
                fits = of_features
            elif stack[-1] in router and names.DOWN.fullmatch(self.place.layer):
                fits = {-3 - x for x in of_features}
        return fits.pop() if len(fits) == 1 else None

    def _routers(self) -> Iterator[Shape]:
        """The features and the experts of the routers beside it."""
        for module, layer, kernel in itertools.product(self.near, names.ROUTERS, names.KERNELS):
            router = self.tree.get(f"{module}{layer}{kernel}", ())
            if len(router) == 2:
                yield router[::-1] if names.is_output_first(kernel) else router


def _are_stacks(vectors: list[Shape], layers: int, axis: int) -> bool:
    stacked = (len(x) == 2 and x[axis] == layers and x[1 - axis] > 1 for x in vectors)
    return bool(vectors) and all(stacked)
