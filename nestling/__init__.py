"""Several language models in one checkpoint."""
