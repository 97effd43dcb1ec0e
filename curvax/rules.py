"""Rules for families of models, for `matrices=`, as in `muon(0.02, matrices=curvax.rules.maxtext)`.

Each is a `MatrixRule` that knows the conventions of a family where names and shapes leave a choice.
The default rule decides on all other parameters. To change a field as well, use
`dataclasses.replace(curvax.rules.maxtext, block_size=1024)`. `weight_dimension_numbers=` takes
precedence over the family.
"""

from .transforms.matrices._families import (
    EQUINOX,
    HAIKU,
    HF_FLAX,
    KERAS,
    LINEN,
    MAXTEXT,
    NNX,
    TORCH_LAYOUT,
)
from .transforms.matrices._matrix_rule import MatrixRule

equinox = MatrixRule(family=EQUINOX)
"""Equinox: `weight` is `(out, in)`, a convolution `(out, in, ...)` (of three axes, by its name or
its bias), or `(layers, out, in)` or `(out, layers, in)` if its bias or the norms around it have an
axis of layers, as `eqx.filter_vmap` makes them."""

haiku = MatrixRule(family=HAIKU)
"""Haiku: `layer_stack` stacks along axis 0; a transposed convolution is `(..., out, in)`."""

hf_flax = MatrixRule(family=HF_FLAX)
"""Hugging Face's Flax models: as `linen`; GPT-2's `c_attn`, `c_proj` and `c_fc` are `(out, in)`,
and `c_attn` is three matrices; a bias may say that they are `(in, out)`."""

keras = MatrixRule(family=KERAS)
"""Keras: attention is `(D, H, K)`, or `(H, D, K)` in Gemma, and `(H, K, D)`; a transposed
convolution is `(..., out, in)`, a depthwise one `(height, width, in, multiplier)`."""

linen = MatrixRule(family=LINEN)
"""Flax Linen: attention is `(D, H, K)` and `(H, K, D)`; experts stack on axis 0, and `nn.scan` on
axis 0 or 1, as biases and norms tell."""

maxtext = MatrixRule(family=MAXTEXT)
"""MaxText with scanned layers (`param_scan_axis=1`) or without, experts, latent attention."""

nnx = MatrixRule(family=NNX)
"""Flax NNX: as `linen`; `nnx.vmap` over modules stacks like `nn.scan`."""

torch_layout = MatrixRule(family=TORCH_LAYOUT)
"""Models from PyTorch: each matrix is `(out, in)` whatever it is called, unless its bias
contradicts; convolutions are `(out, in, ...)`, transposed ones `(in, out, ...)`. Experts are
`(experts, out, in)` or `(experts, in, out)`, as a bias or a router tells; else the rule asks."""

__all__ = ["equinox", "haiku", "hf_flax", "keras", "linen", "maxtext", "nnx", "torch_layout"]
