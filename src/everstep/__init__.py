"""Everstep keeps a PyTorch training job running through failures. Start with `everstep run --help`."""
