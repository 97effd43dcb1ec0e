"""The ground state of a ring of spins, by netket's `VMC` with a complex network.

No matrix of curvax is complex: Optax's wrapper gives it the real and the imaginary parts.
"""

from pathlib import Path

import flax
import netket as nk
import optax
from _check import check_restart, watched

import curvax

SPINS = 8


def train(client: str, folder: Path, until: int):
    """Trains until so many steps, from the checkpoint in the folder."""
    hilbert = nk.hilbert.Spin(0.5, SPINS)
    hamiltonian = nk.operator.IsingJax(hilbert, nk.graph.Chain(SPINS), h=1.0)
    network = nk.models.RBM(alpha=2, param_dtype=complex)
    sampler = nk.sampler.MetropolisLocal(hilbert, n_chains=16)
    vstate = nk.vqs.MCState(sampler, network, n_samples=256, seed=0, sampler_seed=1)
    optimizer = watched(client, curvax.muon(0.03))
    wrapped = optax.contrib.split_real_and_imaginary(optimizer)
    file, done, kept = folder / "checkpoint.msgpack", 0, wrapped.init(vstate.parameters)
    if file.exists():
        read = flax.serialization.from_bytes((vstate, kept, done), file.read_bytes())
        vstate, kept, done = read
    driver = nk.driver.VMC(hamiltonian, wrapped, variational_state=vstate)
    driver._optimizer_state = kept
    log = nk.logging.RuntimeLog()
    driver.run(until - done, out=log, show_progress=False)
    saved = (driver.state, driver._optimizer_state, until)
    file.write_bytes(flax.serialization.to_bytes(saved))
    energies = log.data["Energy"]["Mean"].real
    return energies, (driver.state.variables, driver._optimizer_state)


check_restart(train, ["netket"])
