"""Expert Iteration for language models: sample, score, keep the best, train with SFT + KL, repeat."""

from time import monotonic

__version__ = "0.1.0"

STARTED = monotonic()
"""When this was imported, on the clock of time.monotonic: about when the process began."""
