"""The names of parameters in families of models, which are compared by their words.

A path ends in the name of an array, below the name of its layer: `block_0/mlp/up/kernel`. Some
names are of matrices only (`_MATRIX`), some of arrays of any layer, of which the layer's name tells
the rest (`SHARED`), and some of other parameters. With any other name a matrix is a guess.
"""

import functools
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

Shapes = Mapping[str, tuple[int, ...]]
"""The shapes of parameters, by path."""

# Fields of boxes around an array, also quantized ones
_FIELDS = ("q", "qvalue", "value", "raw_value", "array", "data_array", "data", "arr", "_value")
# Parts of complex numbers, first Optax', and a field beside its transformed value
_TWINS = (("real", "imaginary"), ("real", "imag"), ("re", "im"), ("value", "raw_value"))

_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
SHARED = ("kernel", "weight", "weights", "w", "W")  # of arrays that are named after their layer

_MATRIX = re.compile(
    r"""
    ( (.+_)? kernel                                             # Flax
    | [wW]_? ([a-zA-Z] | in | out | up | down | gate | q?kv)? (_[a-zA-Z])?  # wq, W_O, wq_a
    | (.+_)? proj(ection)? | (.+_)? lora_?[ab] | (.+_)? conv
    | q?kv | [qkvo] | query | key | value | out | output | up | down
    | dense | linear | fc | c_attn | c_fc
    ) (_?\d+)?
    """,
    re.VERBOSE,
)
_SHARED_FORMS = re.compile(r"[wW]|weights?|weight_(?!g$).+|.+_weight|.+_w\d?")
HEAD = re.compile(
    r"(lm_?head|head|(to_)?logits(_dense)?|unembed(ding)?|embed_out|readout|classifier"
    r"|output_(layer|projection))(_\d+)?"
)
_VECTOR_WORDS = re.compile(
    r"\w*bias(es)?|beta|offset|shift|scales?|gamma|gain|gates?|alpha|lambdas?|temperature|std|logs?"
    r"|decay|slope|scalars?|sinks?"
)
_VECTOR_NAMES = re.compile(r"b(\d+|[a-z]|qkv)?(_.+)?|g|weight_g|time_(mix|first|faaaa|maa)(_.+)?")
_MATRICES_OF_VECTORS = re.compile(  # RWKV's, and what projects to gates
    r"time_.+_w\d|(decay|shift|gates?|log|.+_(mlp|msa|attn))_(w\d?|weights?)"
    r"|.+_(linear|dense|fc|einsum)(_?\d+)?"
)
_BIAS_WORDS = re.compile(r"\w*bias(es)?")
_NORM = re.compile(r"(?i:(?!.*ada).*(norm|ln)(_?(f|\d+))*)")
NORM_WORDS = re.compile(r"\w*norms?|normalization|ln|bn|gn|rms")
_TABLE_WORDS = re.compile(
    r"(?!un|de)\w*embed\w*|\w*embs?|wte|wpe|pos|positions?|positional|relpos|tables?|codebooks?"
    r"|codevectors?|tokens"
)
_TABLE_NAMES = re.compile(r"W_E|cls|latents?|(.*_)?(tokens?|tok|prompts?)")
POSITION_WORDS = re.compile(r"pos\w*|wpe|relpos|type|segment")
_PROJECTION_WORDS = re.compile(
    r"patch(es)?|proj(ection)?|linear|dense|mlp|fc|conv\w*|ada\w*|modulation|film"
)
# Layers, in lower case
DEPTHWISE = re.compile(r"depthwise|dw_?conv|(?<![a-z])dw(?![a-z])")
SPECTRAL = re.compile(r"spectral(?!_?norm)|fourier")
CONVOLUTION = re.compile(rf"^(?!.*({SPECTRAL.pattern}|graph|gcn)).*conv(?!e)")  # no converter
OF_CHANNELS = re.compile(r"conv_?\dd")
TRANSPOSED = re.compile(r"transpos|deconv|trans_?conv|(?<![a-z])t_?conv|conv_?t(rans)?(?![a-z])")
LOCAL = re.compile(r"conv_?local|local_?conv|locally_?connected")
SETS = re.compile(r"expert|moe|relation|(?<![a-z])rel(?![a-z])|graph|gcn")
OF_STATE_SPACE = ("A_log", "dt_bias")
ROUTERS = ("gate", "router", "router_gate", "gate_logits")
KERNELS = ("", "/kernel", "/w", "/weight")
OF_MLP = re.compile(r"w_?i(_[01])?|w_?(in|up|gate|1|3)|(gate_)?(up|gate)(_proj)?")
DOWN = re.compile(r"wo|w_?(out|down|2)|down(_proj)?")
SPELLED = {
    "query": ("query", "q", "wq", "w_q", "q_proj", "query_proj"),
    "key": ("key", "k", "wk", "w_k", "k_proj", "key_proj"),
    "value": ("value", "v", "wv", "w_v", "v_proj", "value_proj"),
    "out": ("out", "o", "wo", "w_o", "o_proj", "out_proj", "output"),
}
ROLES = {name: role for role, spelled in SPELLED.items() for name in spelled}
AROUND_ROLE = re.compile(
    r"((self|cross)_)?att(entio)?n_|_att(entio)?n|_proj(ection)?|_dense|_w(?![a-z])"
)


def as_read(shapes: Shapes) -> dict[str, str]:
    """The names that the rule reads, by path.

    What separates names is a slash, as the dots of a flat dict, and several `_` (torchax). Levels
    below the name of an array do not belong to it: both parts of a complex parameter, the field of
    a box (`embedding/q`, `kernel/raw_value`), the direction of a weight norm (`weight_v`), and a
    last level `value` that all parameters have, as in the state of Flax NNX as a flat dict.
    """
    read = {
        path: _PARAMETRIZED.sub(r"\1", _SEPARATORS.sub("/", path).strip("/")) for path in shapes
    }
    known = {read[path]: shape for path, shape in shapes.items()}
    boxed = all(name.endswith(("/value", "/raw_value")) for name in known)
    return {path: _name_of_array(name, known, boxed) for path, name in read.items()}


def _name_of_array(name: str, shapes: Shapes, boxed: bool) -> str:
    above, _, last = name.rpartition("/")
    beside = lambda x: f"{above}/{x}" in shapes  # noqa: E731
    if last == "weight_v" and beside("weight_g"):
        return name.removesuffix("_v")
    others = (x for pair in _TWINS if last in pair for x in pair if x != last)
    is_twin = any(shapes.get(f"{above}/{x}") == shapes[name] for x in others)
    array = path_of(above)[2]
    of_array = array in SHARED or kind_of(above) == "table" or has(_BIAS_WORDS, array)
    is_field = last in _FIELDS and of_array and not (beside("k") or beside("key"))
    return above if boxed or is_twin or is_field else name


# "a.b", ('a', 'b'), ['a']['b'], DictKey(key='a'), a__b, TensorFlow's "a:0"
_SEPARATORS = re.compile(r":0$|([^\w~-]|\w+Key\((key|name|idx)=|__+)+")
_PARAMETRIZED = re.compile(r"parametrizations/(\w+)/original1?$")  # torch's; `original0` is a scale


class Place(NamedTuple):
    """Where a parameter is: the path of its layer's module, its layer, and its name in the layer.

    A parameter that is not called `kernel`, `weight` or `w` counts as a layer, as in `attn/wq`.
    """

    scope: str  # ends in "/", unless it is the root
    layer: str
    within: str  # "/kernel", "/weight", ..., or "" if the parameter counts as a layer

    def beside(self, layer: str) -> str:
        """The path of the same parameter of another layer."""
        return f"{self.scope}{layer}{self.within}"


@functools.cache
def layer_place(name: str) -> Place:
    """The place of the parameter `name`."""
    above, parent, last = path_of(name)
    if last in SHARED and parent:
        return Place(above, parent, f"/{last}")
    return Place(f"{above}{parent}/" if parent else "", last, "")


@functools.cache
def kind_of(name: str) -> str | None:
    """What an array of this path is, "table" or "vector", if its name says that it is either."""
    _, parent, last = path_of(name)
    # A table may be called `weight` in a layer `embed_tokens` or `relative_attention_bias`.
    of_bias = last in SHARED and _layer_has(_BIAS_WORDS, parent)
    of_table = (_layer_has(_TABLE_WORDS, parent) or of_bias) and not HEAD.fullmatch(parent)
    said = (
        ("table", _TABLE_NAMES.fullmatch(last)),
        (None, _is_strong(last, parent) or _MATRICES_OF_VECTORS.fullmatch(last)),
        ("vector", _VECTOR_NAMES.fullmatch(last) or has(_VECTOR_WORDS, last)),
        ("vector", _NORM.fullmatch(parent)),  # such as `embed_norm`
        ("table", _layer_has(_TABLE_WORDS, last) or of_table),
        ("vector", has(NORM_WORDS, last) or _is_norm(parent)),
    )
    return next((kind for kind, fits in said if fits), None)


def is_of_matrices(last: str) -> bool:
    """Whether matrices have this name, if nothing of the path says otherwise."""
    return _is_strong(last) or _SHARED_FORMS.fullmatch(last) is not None


def is_output_first(last: str) -> bool:
    """Whether the layout is torch's `(out, in, ...)`, as for all that is called `weight`."""
    return "weight" in _words(last)


@functools.cache
def scopes(name: str) -> tuple[str, ...]:
    """The modules around a parameter, from the inside; each ends in "/", unless it is the root."""
    parts = name.split("/")[:-1]
    return tuple("".join(f"{part}/" for part in parts[:n]) for n in range(len(parts), -1, -1))


def is_of_norm(name: str) -> bool:
    """Whether the parameter is one of a normalization layer."""
    _, parent, last = path_of(name)
    return not _is_strong(last, parent) and _is_norm(parent)


def bias_names(name: str) -> Iterator[str]:
    """The names that the bias of a parameter may have."""
    *_, last = path_of(name)
    scope = name.removesuffix(last)
    for word in ("kernel", "weight"):
        if word in last:
            yield f"{scope}{last.replace(word, 'bias')}"
    if last in SHARED:
        yield from (f"{scope}bias", f"{scope}b", f"{scope}biases")
    elif last.endswith("_w"):
        yield f"{scope}{last[:-1]}b"
    elif last[:1] in ("w", "W"):
        yield f"{scope}b{last[1:]}"
    else:
        yield from (f"{name}_bias", f"{name}_b")


def path_of(name: str) -> tuple[str, str, str]:
    """The path above the layer (with a final "/"), the layer, and the parameter's own name."""
    *above, last = name.split("/")
    parent = above.pop() if above else ""
    return "".join(f"{part}/" for part in above), parent, last


@functools.cache
def _words(name: str) -> tuple[str, ...]:
    return tuple(word.lower() for word in _WORDS.findall(name))


def has(pattern: re.Pattern[str], name: str) -> bool:
    """Whether a word of the name fits."""
    return any(pattern.fullmatch(word) for word in _words(name))


def _layer_has(pattern: re.Pattern[str], name: str) -> bool:
    """The same for a layer, unless it projects: `pos_proj`, `patch_embed`, `norm_mlp`."""
    return has(pattern, name) and not has(_PROJECTION_WORDS, name)


def _is_norm(layer: str) -> bool:
    """Whether a layer is a norm: `mlp_norm` is one, `norm_mlp` is not."""
    return _NORM.fullmatch(layer) is not None or _layer_has(NORM_WORDS, layer)


def _is_strong(last: str, layer: str = "") -> bool:
    """Whether the name alone is one of a matrix, whatever its layer is called.

    EasyLM's norms have a `kernel`, and so has the layer of an adaptive norm.
    """
    if last in SHARED[1:] or (last == "kernel" and _NORM.fullmatch(layer)):
        return False
    return _MATRIX.fullmatch(last) is not None or HEAD.fullmatch(last) is not None
