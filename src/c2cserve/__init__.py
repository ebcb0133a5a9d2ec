"""c2cserve: a whole catalogue of LLMs in host memory, served by any compute slice."""

__version__ = "0.1.0"
