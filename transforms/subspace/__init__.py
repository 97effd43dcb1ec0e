"""Low-rank subspaces: what GaLore, Fira, Alice, Apollo and SUMO are made of."""
