"""The methods: one recipe a file, each a short chain of the parts in `transforms`."""

from ._asgo import asgo, scale_by_asgo
from ._dasgo import dasgo, scale_by_dasgo
from ._dr_shampoo import dr_shampoo, scale_by_dr_shampoo
from ._foam import foam, scale_by_foam
from ._muon import muon, scale_by_muon
from ._racs import racs, scale_by_racs
from ._shampoo import shampoo
from ._shampoo_direction import scale_by_shampoo

__all__ = [
    "asgo",
    "dasgo",
    "dr_shampoo",
    "foam",
    "muon",
    "racs",
    "scale_by_asgo",
    "scale_by_dasgo",
    "scale_by_dr_shampoo",
    "scale_by_foam",
    "scale_by_muon",
    "scale_by_racs",
    "scale_by_shampoo",
    "shampoo",
]
