"""The command `python -m kvcached.verify_kernels`: may attention backends run over a KV cache with holes?

Two properties are proven of each backend, by running it as its engine does over real memory. *Hole-safe*: no row without memory is touched.
*Top ids*: block ids anywhere in an id space as large as the card address the right rows. docs/KERNELS.md says what is run and how to read it.
"""
