"""The methods: one recipe a file, each a short chain of the parts in `transforms`."""

from ._asgo import asgo, scale_by_asgo
from ._dasgo import dasgo, scale_by_dasgo
from ._dr_shampoo import dr_shampoo, scale_by_dr_shampoo
from ._eigen_adam import eigen_adam, scale_by_eigen_adam
from ._foam import foam, scale_by_foam
from ._muon import muon, scale_by_muon
from ._racs import racs, scale_by_racs
from ._shampoo import shampoo
from ._shampoo_direction import scale_by_shampoo
from ._soap import scale_by_soap, soap

__all__ = [
    "asgo",
    "dasgo",
    "dr_shampoo",
    "eigen_adam",
    "foam",
    "muon",
    "racs",
    "scale_by_asgo",
    "scale_by_dasgo",
    "scale_by_dr_shampoo",
    "scale_by_eigen_adam",
    "scale_by_foam",
    "scale_by_muon",
    "scale_by_racs",
    "scale_by_shampoo",
    "scale_by_soap",
    "shampoo",
    "soap",
]
