"""Pages for browsers, made of a few files that the server has itself."""
