"""When a root, a basis or a subspace is refreshed, and how a root or a basis is."""
