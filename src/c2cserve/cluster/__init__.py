"""Many machines: the protocol between fronts and nodes, and Ray, which starts nodes."""
