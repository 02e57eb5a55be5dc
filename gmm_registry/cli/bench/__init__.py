"""gmm-registry bench: every backend on a shape, against one another and against the roofline limit."""
