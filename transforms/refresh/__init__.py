"""When a root, a basis or a subspace is refreshed."""
