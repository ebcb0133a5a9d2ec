"""Grammars that outputs are held to: written for llguidance, and matched token by token."""
