"""The methods: one recipe a file, each a short chain of the parts in `transforms`."""
