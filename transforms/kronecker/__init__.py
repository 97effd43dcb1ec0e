"""Kronecker factors and eigenbases: what Shampoo, ASGO and SOAP are made of."""
