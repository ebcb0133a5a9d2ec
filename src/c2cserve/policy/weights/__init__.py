"""Which weights are kept in a slice's HBM, and which are lent by a neighbour."""
