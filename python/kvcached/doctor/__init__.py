"""Why an engine's KV cache is elastic here, or is not: `kvctl doctor`, `python -m kvcached.doctor`."""
