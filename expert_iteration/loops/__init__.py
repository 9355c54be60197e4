"""The loops: the same two verbs, `collector.collect()` and `trainer.step()`, in different orders."""
