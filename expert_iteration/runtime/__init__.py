"""Builds the parts of a run and places them on devices."""
