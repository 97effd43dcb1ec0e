"""Conversion between a tree of parameters and stacks of matrices."""
