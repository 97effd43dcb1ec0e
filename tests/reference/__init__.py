"""NumPy float64 transcriptions, written from the papers and independent of the library."""
