"""Not vLLM. SGLang on a CPU imports names of it that it never calls there; this package has those names."""
