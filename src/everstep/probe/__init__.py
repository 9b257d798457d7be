"""Observations from inside a worker process: progress, phases, stacks. No judgement, and no file of ours imports torch
before the script's process needs it."""
