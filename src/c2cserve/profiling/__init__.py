"""What `c2cserve profile` measures of a machine."""
