"""Moving bytes between host memory and GPUs over every link of the machine (docs/transfers.md)."""
