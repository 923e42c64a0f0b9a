"""Whether replicas are well: their signs of life, and what follows when they fail."""
