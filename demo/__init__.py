"""A real vLLM on the same requests, natively and on kvcached: `python -m demo --help`."""
