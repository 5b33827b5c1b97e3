"""Measurements that docs/FIGURES.md quotes: `python -m bench.matrix`, `python -m bench.two_engines`, `python -m bench.sharing`,
`python -m bench.map`."""
