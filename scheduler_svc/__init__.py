"""Serves causal language models to many clients at once by continuous batching."""
