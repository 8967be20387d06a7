"""Finding what an agent lacks and training exactly that (arXiv 2604.05336)."""
