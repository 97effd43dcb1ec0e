"""Everything that computes: the parts of which the methods are chains."""
