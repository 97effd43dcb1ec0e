"""Matrix-structured optimizers for JAX, as Optax transformations.

Each method in `curvax.optimizers` is a full optimizer for a tree of parameters, such as `muon`, and
a direction for batches of matrices, such as `scale_by_muon`.

| names | use |
|---|---|
| `assemble` | builds a full optimizer from any direction |
| `momentum`, `orthogonalize`, `precondition`, `in_eigenbasis`, `in_subspace`, ... | directions |
| `distribute`, `quantize_state`, `inject_hyperparams`, `skip_spikes` | wrappers |
| `stochastic_rounding`, `kahan_summation`, `master_weights` | wrappers for bfloat16 weights |
| `ema_nesterov`, `primal_average`, `tail_average`, `eval_params` | averages, points ahead |
| `to_int8`, `from_int8`, `int8_weights` | weights in 8 bits, and the wrapper that updates them |
| `on_matrices`, `route`, `MatrixRule`, `MatrixAxes` | which parameters are matrices |
| `layerwise`, `clip_by_last_norm` | layers that are updated during the backward pass |
| `summarize`, `report`, `state_of`, `state_bytes` | inspection of optimizers and states |
| `portable_state`, `place_state`, `take_over` | checkpoints |
| `state_sharding`, `state_on_host`, `flat_state` | where a state lies, in which containers |
| `curvax.rules` | which parameters are matrices in a family of models |
| `curvax.policies` | refresh policies |
| `curvax.polar` | ways to compute a polar factor |
| `curvax.eigenbases` | ways to renew an eigenbasis |
| `curvax.grafts` | lengths of directions |
| `curvax.weights` | what a step does with the weights beside the direction |
| `curvax.subspaces` | bases, carry rules and compensations for `in_subspace` |
| `curvax.recipes` | what leads the field, made of these parts |
| `curvax.published` | the settings that papers publish |

`curvax/transforms/__init__.py` has the map of the modules, and follows a step through them.
"""

from importlib import metadata as _metadata

from . import (  # the first import is the first to run
    _requirements,  # noqa: F401
    eigenbases,
    grafts,
    polar,
    policies,
    published,
    recipes,
    rules,
    subspaces,
    weights,
)
from .optimizers import (
    alice,
    apollo,
    asgo,
    assemble,
    dasgo,
    dr_shampoo,
    eigen_adam,
    fira,
    foam,
    galore,
    kl_shampoo,
    muon,
    osgdm,
    racs,
    scale_by_alice,
    scale_by_apollo,
    scale_by_asgo,
    scale_by_dasgo,
    scale_by_dr_shampoo,
    scale_by_eigen_adam,
    scale_by_fira,
    scale_by_foam,
    scale_by_galore,
    scale_by_kl_shampoo,
    scale_by_muon,
    scale_by_osgdm,
    scale_by_racs,
    scale_by_shampoo,
    scale_by_soap,
    scale_by_sumo,
    scale_by_swan,
    shampoo,
    soap,
    sumo,
    swan,
)
from .transforms._spikes import skip_spikes
from .transforms.directions._blend import blend, trust_gate
from .transforms.directions._cautious_updates import cautious_updates
from .transforms.directions._clip_by_last_norm import clip_by_last_norm
from .transforms.directions._diagonal import precondition_diagonal
from .transforms.directions._dion import scale_by_dion
from .transforms.directions._graft import graft
from .transforms.directions._moment_ratio import moment_ratio
from .transforms.directions._momentum import momentum
from .transforms.directions._neurons import normalize_neurons
from .transforms.directions._norm_growth import limit_norm_growth
from .transforms.directions._normalize import (
    normalize_columns,
    normalize_matrices,
    normalize_rows,
    standardize_rows,
)
from .transforms.directions._orthogonalize import orthogonalize, scale_by_shape
from .transforms.directions._row_column_scaling import row_column_scales, scale_by_rows_and_columns
from .transforms.directions._weight_decay import add_cautious_decay
from .transforms.distribute._distribute import distribute
from .transforms.kronecker._eigenbasis import in_eigenbasis
from .transforms.kronecker._precondition import precondition
from .transforms.layerwise._layerwise import layerwise
from .transforms.linalg._coefficients import NEWTON_SCHULZ_COEFFICIENTS, polar_express
from .transforms.linalg._inverse_root import inverse_root
from .transforms.linalg._iterations import power_iteration
from .transforms.linalg._polar import newton_schulz, polar_qdwh, polar_svd
from .transforms.linalg._products import products
from .transforms.matrices._form import MatrixAxes
from .transforms.matrices._matrix_rule import MatrixRule
from .transforms.matrices._output_layer import find_output_layer
from .transforms.matrices._routing import route
from .transforms.matrices._view import on_matrices
from .transforms.refresh._policy import every
from .transforms.state._flat_state import flat_state
from .transforms.state._format import check_state, describe_state
from .transforms.state._inject import inject_hyperparams
from .transforms.state._portable import place_state, portable_state
from .transforms.state._quantize_state import quantize_state
from .transforms.state._report import report
from .transforms.state._sharding import state_on_host, state_sharding
from .transforms.state._summary import state_bytes, state_of, summarize
from .transforms.state._take_over import take_over
from .transforms.storage._cholesky import cholesky
from .transforms.storage._packed import packed
from .transforms.storage._quantized import quantized
from .transforms.storage._storage import Storage, dense
from .transforms.subspace._adapter import Adapter, extract_adapter
from .transforms.subspace._subspace import in_subspace
from .transforms.weights._averages import ema_nesterov, eval_params, primal_average, tail_average
from .transforms.weights._bfloat16 import kahan_summation, master_weights, stochastic_rounding
from .transforms.weights._clip_logits import clip_logits
from .transforms.weights._int8 import from_int8, int8_weights, to_int8
from .transforms.weights._weight_norms import keep_weight_norm, scale_by_weight_norm

try:
    __version__ = _metadata.version("curvax")
except _metadata.PackageNotFoundError:  # a checkout that is not installed
    __version__ = "0.0.0+checkout"

__all__ = [
    "NEWTON_SCHULZ_COEFFICIENTS",
    "Adapter",
    "MatrixAxes",
    "MatrixRule",
    "Storage",
    "add_cautious_decay",
    "alice",
    "apollo",
    "asgo",
    "assemble",
    "blend",
    "cautious_updates",
    "check_state",
    "cholesky",
    "clip_by_last_norm",
    "clip_logits",
    "dasgo",
    "dense",
    "describe_state",
    "distribute",
    "dr_shampoo",
    "eigen_adam",
    "eigenbases",
    "ema_nesterov",
    "eval_params",
    "every",
    "extract_adapter",
    "find_output_layer",
    "fira",
    "flat_state",
    "foam",
    "from_int8",
    "galore",
    "graft",
    "grafts",
    "in_eigenbasis",
    "in_subspace",
    "inject_hyperparams",
    "int8_weights",
    "inverse_root",
    "kahan_summation",
    "keep_weight_norm",
    "kl_shampoo",
    "layerwise",
    "limit_norm_growth",
    "master_weights",
    "moment_ratio",
    "momentum",
    "muon",
    "newton_schulz",
    "normalize_columns",
    "normalize_matrices",
    "normalize_neurons",
    "normalize_rows",
    "on_matrices",
    "orthogonalize",
    "osgdm",
    "packed",
    "place_state",
    "polar",
    "polar_express",
    "polar_qdwh",
    "polar_svd",
    "policies",
    "portable_state",
    "power_iteration",
    "precondition",
    "precondition_diagonal",
    "primal_average",
    "products",
    "published",
    "quantize_state",
    "quantized",
    "racs",
    "recipes",
    "report",
    "route",
    "row_column_scales",
    "rules",
    "scale_by_alice",
    "scale_by_apollo",
    "scale_by_asgo",
    "scale_by_dasgo",
    "scale_by_dion",
    "scale_by_dr_shampoo",
    "scale_by_eigen_adam",
    "scale_by_fira",
    "scale_by_foam",
    "scale_by_galore",
    "scale_by_kl_shampoo",
    "scale_by_muon",
    "scale_by_osgdm",
    "scale_by_racs",
    "scale_by_rows_and_columns",
    "scale_by_shampoo",
    "scale_by_shape",
    "scale_by_soap",
    "scale_by_sumo",
    "scale_by_swan",
    "scale_by_weight_norm",
    "shampoo",
    "skip_spikes",
    "soap",
    "standardize_rows",
    "state_bytes",
    "state_of",
    "state_on_host",
    "state_sharding",
    "stochastic_rounding",
    "subspaces",
    "summarize",
    "sumo",
    "swan",
    "tail_average",
    "take_over",
    "to_int8",
    "trust_gate",
    "weights",
]
