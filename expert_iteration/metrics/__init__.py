"""Metrics: their glossary, their way to file, terminal and wandb, and the plots at the end."""
