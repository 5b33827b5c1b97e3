"""vLLM: one file a seam. `seams` declares them all, `plugin` puts them in place where an engine starts."""
