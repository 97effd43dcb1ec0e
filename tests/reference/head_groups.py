"""Any direction on groups of heads, such as pairs, transcribed in NumPy float64.

Source: modded-nanogpt, track 1, `records/track_1_short/2026-04-08_PairedHeadMuon/README.md`, and
`train_gpt.py` lines 1272-1280: the query and key matrices (heads * d, inputs) are cut into
matrices (2 d, inputs), one for each two heads that are neighbors, and each is orthogonalized alone.

Readings chosen:
- Groups are contiguous: heads 0 and 1, 2 and 3, ... Their number divides that of the heads.
- axis=0 is the source's (outputs by inputs); axis=1 is for kernels stored inputs by outputs.
- Norms, moments and factors of the method are those of a group.
"""

import numpy as np


def on_head_groups(method, gradients, *, heads, group=2, axis=0, **options):
    """The directions of `method`, a reference, on each group; as the gradients are shaped."""
    assert heads % group == 0, (heads, group)
    cut = [np.split(np.asarray(G, np.float64), heads // group, axis=axis) for G in gradients]
    runs = [method([parts[i] for parts in cut], **options)[0] for i in range(heads // group)]
    return [np.concatenate([run[t] for run in runs], axis=axis) for t in range(len(gradients))]
