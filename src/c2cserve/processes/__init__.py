"""How processes of the program depend on each other."""
