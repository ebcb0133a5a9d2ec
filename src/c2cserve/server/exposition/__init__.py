"""Metrics in Prometheus' text form, of catalogues with hundreds of models."""
