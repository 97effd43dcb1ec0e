"""The building blocks of all optimizers, one idea per room: a map.

- `matrices`: from a parameter tree to stacks of matrices and back: which parameters are matrices
  (`_matrix_rule`, by `_names` and `_readings`), their rows and columns (`_form`), stacks (`_view`),
  in chunks (`_chunks`), the parameters of another optimizer (`_routing`).
- `directions`: from gradients to directions, one transformation a file; how moments follow a
  change of basis (`_carry`).
- `kronecker`: Shampoo, ASGO, SOAP: inverse roots (`_precondition`, `_factor`), eigenbases
  (`_eigenbasis`, `_basis`), the statistics of both (`_statistic`, `_whitened`).
- `subspace`: GaLore to SUMO: projections (`_subspace`, `_rule`), bases (`_bases`),
  the gradient outside the subspace (`_compensation`), adapters (`_adapter`).
- `refresh`: when to refresh: policies, which matrices are due (`_due`).
- `storage`: how many bits factors, roots and bases take, one form a file; the codec (`_codec`).
- `weights`: parameters in bfloat16: random bits, or bits that the state keeps; in int8 (`_int8`).
- `linalg`: decompositions, roots, products (`_products`), loops over matrices (`_loops`).
- `distribute`: a stack over devices: who holds which matrix (`_shares`), the work
  of one device (`_step`), its state (`_layout`).
- `state`: summaries, checkpoints (`_portable`, `_format`), shardings, host memory (`_host`),
  quantized moments, injected hyperparameters, which parameter an array is of (`_traced`).
- `layerwise`: updates during the backward pass, and which optimizers they suit (`_mixing`).

Beside the rooms: guards against non-finite gradients (`_guard`), damaged states (`_restart`) and
spikes (`_spikes`), one array at a time, and what `init` knows of all of them (`_stacks`), sides
(`_side`), parameter paths (`_paths`), argument checks (`_validate`), others' states (`_own_state`),
counters (`_counts`), tree maps (`_trees`), what `init` records (`_recording`). `test_house.py`
lists the floors.
"""
