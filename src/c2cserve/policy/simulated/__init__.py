"""What only simulations run today. A live server calls it with no weights to keep and no
lookahead."""
