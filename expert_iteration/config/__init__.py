"""Typed configuration: schema, checks and the Hydra loader."""
