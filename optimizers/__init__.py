"""The methods: one recipe a file, each a short chain of the parts in `transforms`."""

from ._asgo import asgo, scale_by_asgo
from ._muon import muon, scale_by_muon
from ._racs import racs, scale_by_racs

__all__ = ["asgo", "muon", "racs", "scale_by_asgo", "scale_by_muon", "scale_by_racs"]
