"""The vocabulary: frozen dataclasses that every role shares. Standard library only."""
