"""The slow loop: queue, admission, placement, instances, slice load, pool residency."""
