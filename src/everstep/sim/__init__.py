"""A job on a modelled cluster in virtual time: what failures cost it, and what each way to answer them saves.

Run: everstep sim scenario.toml. Everything here is pure: time is a virtual clock, chance is a generator that is given.
"""
