"""Public fakes: a virtual clock, a lossy network, and whole simulated clusters for the control plane's machines."""
