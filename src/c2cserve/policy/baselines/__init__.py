"""Published systems to compare with, in the code that serves. Simulations run them, and servers
whose `--policy` names one (`policy.by_name`)."""
