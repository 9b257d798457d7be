"""Act on communication: links between workers, and the collectives over them."""
