"""The tests. Benchmarks and the site share `registry`, `helpers` and `hlo` with them."""
