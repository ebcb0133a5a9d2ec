"""Published systems to compare with, in the code that serves."""
