"""Updating each layer as soon as its gradient exists, during the backward pass."""
