"""How many bits factors, roots and moments take."""
