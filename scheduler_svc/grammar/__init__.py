"""Structured output: what a client may ask for, its check in a process apart, and matching."""
