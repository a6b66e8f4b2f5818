"""The store of `bk.elastic`, a program: `python -m baguakit.store`."""
