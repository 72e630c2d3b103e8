"""Starts and supervises scheduler and worker as child processes; imports neither."""
