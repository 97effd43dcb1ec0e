"""Everything that computes, in rooms: a map of the house.

- `matrices`: parameters become stacks of matrices, and back. Which parameters are matrices, and
  along which axes (`_rule`); rows, columns, heads, blocks (`_axes`); stacks (`_view`); what goes to
  another optimizer (`_routing`).
- `directions`: a gradient's matrices become directions: momentum, orthogonalization, row and column
  scaling, grafting, limits; what moments do when a basis changes (`_carry`).
- `kronecker`: Shampoo, ASGO and SOAP. Inverse roots of factors (`_precondition`, `_factor`),
  eigenbases (`_eigenbasis`), the statistics of both (`_statistic`).
- `subspace`: GaLore to SUMO. Projections (`_subspace`, `_rule`), how bases are found (`_bases`),
  what becomes of the rest of the gradient (`_compensation`).
- `refresh`: when something is computed anew. Policies (`_policy`, `_foam`, `_diagonal_residual`,
  `_below_norm`), and the loop that refreshes only the matrices that are due (`_due`).
- `storage`: in how many bits factors and roots are kept: dense, 4-bit squares (`_quantized`), 4-bit
  Cholesky factors (`_cholesky`), and the code itself (`_codec`).
- `linalg`: functions of arrays alone: eigendecompositions, inverse roots, polar factors, products.
- `distribute`: on which device each matrix lives.
- `state`: what an optimizer does and has (`_summary`, `_report`), checkpoints (`_portable`,
  `_format`), shardings, moments in codes, hyperparameters in the state.

What all rooms share lies beside them: bad gradients (`_guard`), the sides of a matrix (`_side`),
names of parameters (`_paths`), random keys (`_keys`), checks of arguments (`_validate`), counters
(`_counts`), trees (`_trees`), and how `init` tells `summarize` what it does (`_recording`). Imports
run downwards only; the floors are in `tests/project/test_house.py`.
"""
