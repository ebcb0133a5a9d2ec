"""A worker's side: one slice's loop, its engine, and the shared GPU process."""
