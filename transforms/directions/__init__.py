"""Transformations from gradient matrices to directions, with momentum or vectors as state."""
