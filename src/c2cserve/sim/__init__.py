"""World 1: the server's own loops in virtual time, against measured and published costs."""
