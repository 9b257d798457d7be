"""Everstep beside other tools: one file and one extra each."""
