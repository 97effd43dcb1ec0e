"""The building blocks of all optimizers, one idea per room: a map.

- `matrices`: from a parameter tree to stacks of matrices and back: which parameters are matrices
  (`_matrix_rule`, by `_parameters` and `_readings`), their rows and columns (`_form`), stacks
  (`_view`), in chunks (`_chunks`), the parameters of another optimizer (`_routing`).
- `directions`: from gradients to directions, one transformation a file.
- `kronecker`: Shampoo, ASGO, SOAP: the transformations (`_precondition`, `_eigenbasis`), the
  statistics of both sides and the plot of a refresh (`_factor`), and what it renews: bases
  (`_bases`), of whitened gradients too (`_whitened`), and roots of them or stored ones (`_roots`).
- `subspace`: GaLore to SUMO: projections (`_subspace`, `_rule`), bases (`_bases`),
  the gradient outside the subspace (`_compensation`), adapters (`_adapter`).
- `refresh`: when to refresh: policies, which matrices are due (`_due`); and how (`_methods`).
- `storage`: how many bits factors, roots and bases take, one form a file; the codec (`_codec`).
- `weights`: what a step does with the weights beside the direction (`_weights_side`); parameters
  in bfloat16 (`_bfloat16`) and in int8 (`_int8`); averages.
- `linalg`: decompositions, roots, products (`_products`), loops over matrices (`_loops`).
- `distribute`: a stack over devices: who holds which matrix (`_shares`), its way there and the work
  of one device (`_step`), the state (`_layout`), shardings (`_meshes`).
- `state`: summaries, checkpoints (`_portable`, `_format`), shardings and host memory (`_sharding`),
  quantized moments, injected hyperparameters, which parameter an array is of (`_traced`).
- `layerwise`: updates during the backward pass, and which optimizers they suit (`_mixing`).

Modules beside the rooms: guards against non-finite gradients and damaged states (`_guard`) and
against spikes (`_spikes`), one array at a time and the plan of all arrays (`_stacks`), sides
(`_side`), parameter paths (`_paths`), argument checks (`_validate`, `_keywords`), others' states
(`_own_state`), counters (`_counts`), tree maps (`_trees`), how moments follow a change of basis
(`_carry`), the records of `init` (`_recording`).
`test_house.py` lists the floors.

The way of a gradient through `soap(storage=packed(), mesh=mesh)` (`optimizers/_assemble.py`):

1. `matrices/_routing`: checks the arguments and widens the gradient to its parameter's dtype
   (`_trees`); biases go to AdamW (`optax.partition`), kernels on;
2. `matrices/_view`: gathers the kernels of one shape into a stack `(N, m, n)`;
3. `distribute/_distribute`: `_step.OnMesh` sends each matrix to its owner, where `_step.Step` runs
   what follows; `_shares` says which device owns which matrices of a stack;
4. `matrices/_chunks`: a few matrices of a large stack at a time;
5. `_guard`: a zero gradient for a matrix that is not finite (`_step.Step` has restarted those
   whose state the last step damaged);
6. `kronecker/_eigenbasis`: the gradient goes into the bases (`_bases`) and its Gram matrices into
   the statistics, stored by `storage/_packed`; what is due (`refresh/_due`, in the loops of
   `linalg/_loops`) is refreshed (`_factor`) by a turn (`linalg/_turns`), with the moments; these
   give the direction (`directions/_moment_ratio`), which `linalg/_numerics` shortens;
7. `_step.OnMesh` sends the directions back, `matrices/_view` splits the stacks into updates, and
   Optax adds weight decay and learning rate.
"""
