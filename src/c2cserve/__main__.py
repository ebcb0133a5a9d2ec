"""`python -m c2cserve` is the command `c2cserve`, where commands are not on PATH."""

from c2cserve.cli.main import app

if __name__ == "__main__":
    app()
