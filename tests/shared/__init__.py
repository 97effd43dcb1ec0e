"""Gradients, programs and trajectories that several test files share."""
