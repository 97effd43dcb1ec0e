"""Flax's gemma example (NNX) on sentences made here, with its own pipeline, loop and checkpoints.

Instead of downloading sentences, the pipeline reads arithmetic. Its checkpoints do not contain the
place in the data, so a restart skips the data that was read. Its sampler of texts, which runs after
the last step, fails with JAX 0.11 and 0.12 whatever the optimizer is, so no text is sampled.
"""

import functools
import itertools
import logging
import random
from pathlib import Path

import grain
import input_pipeline
import input_pipeline_grain
import numpy as np
import optax
import orbax.checkpoint as ocp
import train as gemma
from _check import check_restart, watched
from configs import tiny

import curvax

SETTINGS = {
    "vocab_size": 40,
    "max_corpus_chars": 5000,
    "max_target_length": 32,
    "max_eval_target_length": 32,
    "per_device_batch_size": 8,
    "eval_per_device_batch_size": 8,
    "prefetch_num_workers": 0,
    "num_eval_steps": 1,
    "learning_rate": 0.02,
    "warmup_steps": 5,
    "use_bfloat16": False,
    "transformer_params": {
        "num_layers": 2,
        "embed_dim": 32,
        "hidden_dim": 64,
        "num_heads": 4,
        "head_dim": 8,
        "num_kv_heads": 1,
        "use_post_attn_norm": False,
        "use_post_ffw_norm": False,
        "attention_types": (1, 1),
        "final_logit_softcap": None,
    },
}


def sentences(name: str, split: str) -> grain.MapDataset:
    numbers = random.Random(split)
    lines = [
        f"{a} and {b} are {a + b}"
        for a, b in ((numbers.randrange(50), numbers.randrange(50)) for _ in range(512))
    ]
    return grain.MapDataset.source(lines).map(lambda line: {"inputs": line, "targets": line})


class NoText:
    """In place of the example's sampler."""

    text = ("",)

    def __init__(self, **arguments):
        pass

    def __call__(self, *arguments, **settings):
        return self


class MeanLosses(logging.Handler):
    """What the loop logs: the mean of the losses since its start."""

    def __init__(self):
        super().__init__()
        self.found = []

    def emit(self, record):
        if str(record.msg).startswith("Finished training step"):
            self.found.append(float(record.args[2]))


def train(client: str, folder: Path, steps: int) -> tuple[np.ndarray, dict]:
    checkpoints = folder / "checkpoints"
    done = 1 + max((int(path.name) for path in checkpoints.glob("[0-9]*")), default=-1)
    get_datasets = input_pipeline.get_datasets

    def unread(**arguments):
        train_ds, *others = get_datasets(**arguments)
        return itertools.islice(iter(train_ds), done, None), *others

    input_pipeline.get_datasets = unread
    input_pipeline_grain.get_raw_dataset = sentences
    muon = functools.partial(curvax.muon, matrices=curvax.rules.nnx)
    optax.adamw = lambda learning_rate, b1, b2, eps, weight_decay: curvax.flat_state(
        watched(client, muon(learning_rate, weight_decay=weight_decay))
    )
    gemma.sampler_lib.Sampler = NoText
    means = MeanLosses()
    logging.getLogger("absl").addHandler(means)
    logging.getLogger("absl").setLevel(logging.INFO)
    gemma.train_and_evaluate(tiny.get_config().replace(**SETTINGS, num_train_steps=steps), folder)
    losses = np.diff(means.found * np.arange(1, len(means.found) + 1), prepend=0)
    saved = checkpoints / str(steps - 1) / "default"
    return losses, ocp.PyTreeCheckpointer().restore(saved)


if __name__ == "__main__":
    check_restart(train, ["gemma"], steps=20)
