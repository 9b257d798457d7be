"""The command line: one file per verb, `main` finds them, none is imported before it is asked for."""
