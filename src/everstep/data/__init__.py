"""Which samples a step trains on: their order, each member's part of them, and the account of what was consumed."""
