"""The pure scheduler: standard library and numpy only; no clock, no randomness, no input/output."""
