"""SLINFER: placing by shadow validation, KV memory sized in advance."""
