"""Matrix-structured optimizers for JAX, as Optax transformations.

Full optimizers, for a whole tree of parameters: `muon`, `racs`, `asgo`. Their directions, for
batches of matrices: `scale_by_muon`, `scale_by_racs`, `scale_by_asgo`. The parts of which they are
made, and tools to look into them, are below.
"""

from importlib import metadata as _metadata

from .optimizers import asgo, muon, racs, scale_by_asgo, scale_by_muon, scale_by_racs
from .transforms._inverse_root import inverse_root
from .transforms._matrix_axes import MatrixAxes
from .transforms._matrix_rule import MatrixRule, find_output_layer
from .transforms._matrix_view import on_matrices
from .transforms._momentum import momentum
from .transforms._norm_growth import limit_norm_growth
from .transforms._orthogonalize import orthogonalize, scale_by_shape
from .transforms._polar import NEWTON_SCHULZ_COEFFICIENTS, newton_schulz, polar_qdwh, polar_svd
from .transforms._precondition import precondition
from .transforms._refresh import every
from .transforms._routing import route
from .transforms._row_column_scaling import row_column_scales, scale_by_rows_and_columns
from .transforms._summary import state_bytes, state_of, summarize

try:
    __version__ = _metadata.version("curvax")
except _metadata.PackageNotFoundError:  # a checkout that is not installed
    __version__ = "0.0.0+checkout"

__all__ = [
    "NEWTON_SCHULZ_COEFFICIENTS",
    "MatrixAxes",
    "MatrixRule",
    "asgo",
    "every",
    "find_output_layer",
    "inverse_root",
    "limit_norm_growth",
    "momentum",
    "muon",
    "newton_schulz",
    "on_matrices",
    "orthogonalize",
    "polar_qdwh",
    "polar_svd",
    "precondition",
    "racs",
    "route",
    "row_column_scales",
    "scale_by_asgo",
    "scale_by_muon",
    "scale_by_racs",
    "scale_by_rows_and_columns",
    "scale_by_shape",
    "state_bytes",
    "state_of",
    "summarize",
]
