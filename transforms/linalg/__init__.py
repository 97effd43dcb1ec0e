"""Functions of arrays: eigendecompositions, inverse roots, polar factors, products."""
