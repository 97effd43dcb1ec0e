"""Transformations of a gradient's matrices into directions, with vectors of state or none."""
