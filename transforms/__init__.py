"""The building blocks of all optimizers, one idea per room: a map.

- `matrices`: from a parameter tree to stacks of matrices, and back. Which parameters are matrices
  and along which axes, attention kernels included (`_matrix_rule`); rows, columns, heads and blocks
  (`_form`); stacks (`_view`, `_split_stack`); the parameters of another optimizer (`_routing`).
- `directions`: from gradients to directions: `_momentum`, `_moment_ratio`, `_orthogonalize`,
  `_normalize`, `_row_column_scaling`, `_diagonal`, `_graft`, `_norm_growth`; how moments follow a
  change of basis (`_carry`).
- `kronecker`: Shampoo, ASGO, SOAP. Inverse roots (`_precondition`, `_factor`), eigenbases
  (`_eigenbasis`), the statistics of both (`_statistic`).
- `subspace`: GaLore to SUMO. Projection (`_subspace`, `_rule`), bases (`_bases`), ranks (`_rank`),
  what happens to the gradient outside the subspace (`_compensation`), adapters (`_adapter`).
- `refresh`: when to refresh roots, bases and subspaces. Policies (`_policy`, `_foam`,
  `_diagonal_residual`, `_below_norm`); the loop over the matrices that are due (`_due`).
- `storage`: how many bits factors, roots and bases take. Dense (`_storage`), squares
  (`_quantized`), Cholesky factors (`_cholesky`), packed triangles (`_packed`, `_triangle`), the
  codec (`_codec`) and its `_dither`.
- `linalg`: functions of arrays: eigendecompositions, inverse roots, polar factors, products.
- `distribute`: which device holds which matrix (`_distribute`, `_shares`), and where its state is
  (`_layout`, `_meshes`).
- `state`: summaries (`_summary`, `_report`), checkpoints (`_portable`, `_format`), shardings
  (`_sharding`), quantized moments (`_quantize_state`), injected hyperparameters (`_inject`), and
  which parameter an array belongs to (`_traced`, `_entries`).

The files beside the rooms serve all of them: guards against non-finite gradients (`_guard`), the
sides of a matrix (`_side`), parameter paths (`_paths`), random keys (`_keys`), argument checks
(`_validate`), counters (`_counts`), tree maps (`_trees`), and what `init` records for `summarize`
(`_recording`). Imports only run downwards; `tests/project/test_house.py` lists the floors.
"""
