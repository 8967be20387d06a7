"""`trace-jax compile`: a run's programs compiled for devices that are not there, and what that says about them."""
