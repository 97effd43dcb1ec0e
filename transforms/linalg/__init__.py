"""Functions of arrays alone: eigendecompositions, inverse roots, polar factors, products."""
