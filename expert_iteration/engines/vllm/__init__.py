"""Generation by vLLM: a replica, and what it adds to vLLM's worker. The only modules that import vllm."""
