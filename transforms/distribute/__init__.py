"""On which device each matrix lives."""
