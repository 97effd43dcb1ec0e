"""Kronecker factors and eigenbases: the core of Shampoo, ASGO and SOAP."""
