"""C2CServe's dataflows as published, to be compared with."""
