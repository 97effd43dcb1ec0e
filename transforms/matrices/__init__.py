"""How a tree of parameters becomes stacks of matrices, and back."""
