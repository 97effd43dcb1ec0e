"""Low-rank subspaces, which GaLore, Fira, Alice, Apollo and SUMO are built on."""
