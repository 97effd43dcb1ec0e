"""How many of their cells the tests run; without pytest, which the site's build does not have."""

import os

ALL_CELLS = bool(os.environ.get("CURVAX_ALL_CELLS"))  # run all cells instead of a sample
