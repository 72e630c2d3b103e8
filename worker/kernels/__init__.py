"""The CPU kernels in C, and their build."""
