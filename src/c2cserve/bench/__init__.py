"""The load generator and `c2cserve bench`: a server measured from outside."""
