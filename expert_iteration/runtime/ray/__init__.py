"""Parts of a run in processes of their own, as Ray actors. The only modules that import ray."""
