"""Words everybody shares: types, events, clock, configuration, wire format, errors. Imports nothing of ours."""
