"""How results are shown: one module a thing, each with a rich table and JSON of the same values."""
