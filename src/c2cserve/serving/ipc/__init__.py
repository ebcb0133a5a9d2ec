"""What controller and workers share: channel, messages, status page."""
