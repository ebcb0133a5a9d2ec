"""What happens to a request before the application sees it: when it arrived, and whether it is
refused at once."""
