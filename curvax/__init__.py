"""Matrix-structured optimizers for JAX, as Optax transformations.

Full optimizers, for a whole tree of parameters, and their directions, for batches of matrices, as
`scale_by_<method>`: `muon`, `osgdm`, `swan`, `racs`, `asgo`, `dasgo`, `shampoo`, `foam`,
`dr_shampoo`, `soap`, `eigen_adam`, `galore`, `fira`, `alice`, `apollo`, `sumo`. The parts of which
they are made, `assemble`, which makes a full optimizer of any direction, and tools to look into
them are below; refresh policies are in `curvax.policies`, what subspaces are made of in
`curvax.subspaces`.
"""

from importlib import metadata as _metadata

from . import policies, subspaces
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
from .transforms._adapter import Adapter, extract_adapter
from .transforms._cholesky import cholesky
from .transforms._diagonal import precondition_columns
from .transforms._distribute import distribute
from .transforms._eigenbasis import in_eigenbasis
from .transforms._graft import graft
from .transforms._inject import inject_hyperparams
from .transforms._iterative_roots import power_iteration
from .transforms._matrix_axes import MatrixAxes
from .transforms._matrix_rule import MatrixRule, find_output_layer
from .transforms._matrix_view import on_matrices
from .transforms._moment_ratio import moment_ratio
from .transforms._momentum import momentum
from .transforms._norm_growth import limit_norm_growth
from .transforms._normalize import normalize_columns, normalize_rows
from .transforms._orthogonalize import orthogonalize, scale_by_shape
from .transforms._polar import NEWTON_SCHULZ_COEFFICIENTS, newton_schulz, polar_qdwh, polar_svd
from .transforms._portable import place_state, portable_state
from .transforms._precondition import precondition
from .transforms._quantize_state import quantize_state
from .transforms._quantized import quantized
from .transforms._refresh import every
from .transforms._report import report
from .transforms._roots import inverse_root
from .transforms._routing import route
from .transforms._row_column_scaling import row_column_scales, scale_by_rows_and_columns
from .transforms._state_format import check_state, describe_state
from .transforms._state_sharding import state_sharding
from .transforms._storage import dense
from .transforms._subspace import in_subspace
from .transforms._summary import state_bytes, state_of, summarize

try:
    __version__ = _metadata.version("curvax")
except _metadata.PackageNotFoundError:  # a checkout that is not installed
    __version__ = "0.0.0+checkout"

__all__ = [
    "NEWTON_SCHULZ_COEFFICIENTS",
    "Adapter",
    "MatrixAxes",
    "MatrixRule",
    "alice",
    "apollo",
    "asgo",
    "assemble",
    "check_state",
    "cholesky",
    "dasgo",
    "dense",
    "describe_state",
    "distribute",
    "dr_shampoo",
    "eigen_adam",
    "every",
    "extract_adapter",
    "find_output_layer",
    "fira",
    "foam",
    "galore",
    "graft",
    "in_eigenbasis",
    "in_subspace",
    "inject_hyperparams",
    "inverse_root",
    "limit_norm_growth",
    "moment_ratio",
    "momentum",
    "muon",
    "newton_schulz",
    "normalize_columns",
    "normalize_rows",
    "on_matrices",
    "orthogonalize",
    "osgdm",
    "place_state",
    "polar_qdwh",
    "polar_svd",
    "policies",
    "portable_state",
    "power_iteration",
    "precondition",
    "precondition_columns",
    "quantize_state",
    "quantized",
    "racs",
    "report",
    "route",
    "row_column_scales",
    "scale_by_alice",
    "scale_by_apollo",
    "scale_by_asgo",
    "scale_by_dasgo",
    "scale_by_dr_shampoo",
    "scale_by_eigen_adam",
    "scale_by_fira",
    "scale_by_foam",
    "scale_by_galore",
    "scale_by_muon",
    "scale_by_osgdm",
    "scale_by_racs",
    "scale_by_rows_and_columns",
    "scale_by_shampoo",
    "scale_by_shape",
    "scale_by_soap",
    "scale_by_sumo",
    "scale_by_swan",
    "shampoo",
    "soap",
    "state_bytes",
    "state_of",
    "state_sharding",
    "subspaces",
    "summarize",
    "sumo",
    "swan",
]
