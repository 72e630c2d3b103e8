"""The CPU kernels in C, and building them."""
