"""The papers, as the table of the README cites them."""

GONG = "[Gong et al. 2025](https://arxiv.org/abs/2502.07752)"
AN = "[An et al. 2025](https://arxiv.org/abs/2503.20762)"
NAM = "[Nam and Ahn 2026](https://arxiv.org/abs/2606.02365)"
REFAEL = "[Refael et al. 2025](https://arxiv.org/abs/2505.24749)"
