"""Questions asked of simulations: how many models fit, which machine, what binds."""
