"""The driver: ports, the only loop, the record and its replay."""
