"""What is asked of a simulated machine: traces, real and synthetic, mapped onto its catalogue."""
