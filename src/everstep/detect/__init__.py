"""Judges: pure functions and state machines from what was observed to what it means. No clock, no I/O, no torch."""
