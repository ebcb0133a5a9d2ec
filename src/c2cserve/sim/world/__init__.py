"""The simulated world: clock, machine, links, costs, requests."""
