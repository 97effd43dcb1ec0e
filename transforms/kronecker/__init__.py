"""Kronecker factors and eigenbases: the core of Shampoo, ASGO and SOAP.

Comments name lines, or symbols, of algorithms: Shampoo's is Algorithm 2 of arXiv:2412.10663, ASGO's
Algorithm 2 of arXiv:2503.20762, SOAP's Algorithm 6 of arXiv:2502.07752, and FOAM's Algorithm 3 of
arXiv:2606.02365.
"""
