"""When a root, a basis or a subspace is computed anew."""
