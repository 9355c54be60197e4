"""Expert Iteration for language models: sample, score, keep the best, train with SFT + KL, repeat."""

__version__ = "0.1.0"
