"""Engines: they generate with their own copy of the weights."""
