"""The controller's side: catalogue, pool, workers and requests in flight."""
