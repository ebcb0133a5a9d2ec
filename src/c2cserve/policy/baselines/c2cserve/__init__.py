"""C2CServe as published: chunk sizes, and alpha of hybrid GEMMs."""
