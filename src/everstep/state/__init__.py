"""Training state: its flat, typed form, which travels between members without pickle."""
