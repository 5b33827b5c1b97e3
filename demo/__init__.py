"""A real engine on the same requests, natively and on kvcached: `python -m demo --help`."""
