"""The k largest values of each row."""
