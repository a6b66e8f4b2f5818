"""A program, `python -m baguakit.store`, which runs the store of `bk.elastic`."""
