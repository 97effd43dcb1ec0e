"""The optimizers, one per file: each is a short chain of transformations from `transforms`."""

from ..transforms._keywords import name_unknown_keywords
from ._alice import alice, scale_by_alice
from ._apollo import apollo, scale_by_apollo
from ._asgo import asgo, scale_by_asgo
from ._assemble import assemble
from ._dasgo import dasgo, scale_by_dasgo
from ._dr_shampoo import dr_shampoo, scale_by_dr_shampoo
from ._eigen_adam import eigen_adam, scale_by_eigen_adam
from ._fira import fira, scale_by_fira
from ._foam import foam, scale_by_foam
from ._galore import galore, scale_by_galore
from ._kl_shampoo import kl_shampoo, scale_by_kl_shampoo
from ._muon import muon, scale_by_muon
from ._osgdm import osgdm, scale_by_osgdm
from ._racs import racs, scale_by_racs
from ._shampoo import scale_by_shampoo, shampoo
from ._soap import scale_by_soap, soap
from ._sumo import scale_by_sumo, sumo
from ._swan import scale_by_swan, swan

__all__ = [
    "alice",
    "apollo",
    "asgo",
    "assemble",
    "dasgo",
    "dr_shampoo",
    "eigen_adam",
    "fira",
    "foam",
    "galore",
    "kl_shampoo",
    "muon",
    "osgdm",
    "racs",
    "scale_by_alice",
    "scale_by_apollo",
    "scale_by_asgo",
    "scale_by_dasgo",
    "scale_by_dr_shampoo",
    "scale_by_eigen_adam",
    "scale_by_fira",
    "scale_by_foam",
    "scale_by_galore",
    "scale_by_kl_shampoo",
    "scale_by_muon",
    "scale_by_osgdm",
    "scale_by_racs",
    "scale_by_shampoo",
    "scale_by_soap",
    "scale_by_sumo",
    "scale_by_swan",
    "shampoo",
    "soap",
    "sumo",
    "swan",
]

name_unknown_keywords(__name__, __all__)
