"""The part that decides: one thread, deterministic, no I/O, no torch, no clock, no chance."""
