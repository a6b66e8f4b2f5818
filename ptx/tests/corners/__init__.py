"""Every instruction at its corners, against values from the manual, or from Python's integers and fractions."""
