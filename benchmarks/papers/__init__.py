"""Figures and tables of the papers, reproduced with curvax; one script each.

Results go to `benchmarks/results/papers`.
"""
