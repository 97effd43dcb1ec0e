"""The settings that papers publish: `RUNS`, and the optimizer of each.

`RUNS["alice/llama-130M"].optimizer()` is Alice as Gong et al. trained LLaMA 130M with it. Each
`Run` has the paper's numbers, their places in the paper, and the values that the paper leaves open
(docs/published.md).
"""

from ._published_calls import Run
from ._published_tables import RUNS

__all__ = ["RUNS", "Run"]
