"""The numbers of PTX in NumPy: their types, and sums and products that are rounded once."""
