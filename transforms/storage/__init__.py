"""In how many bits factors, roots and moments are kept."""
