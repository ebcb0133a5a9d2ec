"""Text processes: tokenizers, templates, and the text of growing outputs."""
