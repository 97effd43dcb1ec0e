"""Weights: their lengths and decay, their averages, and those in few bits, which still learn."""
