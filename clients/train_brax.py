"""Brax's PPO learns to balance a pole.

Brax's own checkpoints have the networks without the optimizer. What an epoch ends with (networks,
optimizer, environments) is saved here. A restart runs Brax from its beginning, so that it makes the
same random keys, and takes the result of the saved epochs from there.
"""

import itertools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from _check import check_restart, watched
from brax import envs
from brax.training.agents.ppo import train as ppo

import curvax


def replicated(tree, devices):
    """`jax.device_put_replicated`, which Brax 0.14.2 calls, and JAX 0.10 no longer has."""
    mesh = jax.sharding.Mesh(np.array(devices), "devices")
    sharding = jax.sharding.NamedSharding(mesh, jax.P("devices"))
    return jax.tree.map(lambda x: jax.device_put(jnp.stack([x] * len(devices)), sharding), tree)


jax.device_put_replicated = replicated  # as JAX's guide from `pmap` says

SETTINGS = {
    "learning_rate": 0.01,
    "episode_length": 100,
    "num_envs": 64,
    "unroll_length": 10,
    "batch_size": 64,
    "num_minibatches": 4,
    "num_updates_per_batch": 4,
    "normalize_observations": True,
    "run_evals": False,
}
EPOCH = 3 * 64 * 4 * 10  # steps of the environments
EPOCHS = 6


def train(client: str, folder: Path, epochs: int) -> tuple[list, dict]:
    optax.adam = lambda learning_rate: watched(
        client, curvax.muon(learning_rate, matrices=curvax.rules.linen)
    )
    checkpointer = ocp.StandardCheckpointer()
    done = max((int(path.name) for path in folder.glob("[0-9]*")), default=0)
    pmap, losses, result = jax.pmap, [], {}

    def with_checkpoints(function, **arguments):
        run = pmap(function, **arguments)
        if getattr(function, "__name__", "") != "training_epoch":
            return run
        numbers = itertools.count(1)

        def epoch(networks_and_optimizer, environments, key):
            number, state = next(numbers), (networks_and_optimizer, environments)
            if number < done:
                return *state, {}
            if number == done:
                return *checkpointer.restore(folder.absolute() / str(number), state), {}
            *state, metrics = run(*state, key)
            losses.append(metrics["total_loss"].mean())
            if number == epochs:
                checkpointer.save(folder.absolute() / str(number), tuple(state))
                checkpointer.wait_until_finished()
                result["state"] = jax.tree.map(np.asarray, state)
            return *state, metrics

        return epoch

    jax.pmap = with_checkpoints
    environment = envs.get_environment("inverted_pendulum")
    ppo.train(environment, epochs * EPOCH, num_evals=epochs + 1, **SETTINGS)
    return losses, result


if __name__ == "__main__":
    check_restart(train, ["brax"], EPOCHS)
