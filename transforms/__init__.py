"""The building blocks of all optimizers, one idea per room: a map.

- `matrices`: from a parameter tree to stacks of matrices and back: which parameters are matrices
  (`_matrix_rule`), rows, columns, heads and blocks (`_form`), stacks (`_view`, `_split_stack`), the
  parameters of another optimizer (`_routing`).
- `directions`: from gradients to directions, one transformation a file; how moments follow a
  change of basis (`_carry`).
- `kronecker`: Shampoo, ASGO, SOAP: inverse roots (`_precondition`, `_factor`), eigenbases
  (`_eigenbasis`), the statistics of both (`_statistic`).
- `subspace`: GaLore to SUMO: projections (`_subspace`, `_rule`), bases (`_bases`), ranks (`_rank`),
  the gradient outside the subspace (`_compensation`), adapters (`_adapter`).
- `refresh`: when to refresh: policies, and the loop over the matrices that are due (`_due`).
- `storage`: how many bits factors and roots take: dense (`_storage`), 4-bit squares (`_quantized`)
  and Cholesky factors (`_cholesky`, `_triangle`), the codec (`_codec`).
- `linalg`: functions of arrays: eigendecompositions, inverse roots, polar factors, products.
- `distribute`: which device holds which matrix (`_shares`) and its state (`_layout`, `_meshes`).
- `state`: summaries, checkpoints (`_portable`, `_format`), shardings, quantized moments, injected
  hyperparameters, and which parameter an array belongs to (`_traced`, `_entries`).
- `layerwise`: updates during the backward pass, and which optimizers they suit (`_mixing`).

Beside the rooms: guards against non-finite gradients (`_guard`), sides of a matrix (`_side`),
parameter paths (`_paths`), random keys (`_keys`), argument checks (`_validate`), states of other
optimizers (`_own_state`), weight decay (`_decay`), counters (`_counts`), tree maps (`_trees`), what
`init` records (`_recording`). Imports run downwards; `tests/project/test_house.py` has the floors.
"""
