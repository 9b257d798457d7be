"""ACT on the cluster: pure machines that decide (lifecycle, membership, node) and the loops that carry out."""
